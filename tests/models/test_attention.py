"""Attention of all families uses the fused kernel, and no scores are kept if it needs no bias."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import DropoutRng, RelativeBias, scores
from gridformer.models.blocks.attention import AttentionHeads
from gridformer.models.blocks.dropout import keep_scores
from gridformer.models.blocks.scores import SharedBias, Window, added_to_scores, document_bounds
from gridformer.parallel import build_parallel
from gridformer.utils.batch import Batch

B, S, SOURCE = 3, 13, 17  # lengths that no other dimension has
LAYERS = 3
FAMILIES = ("gpt2", "bert", "t5", "transformer")


def build(family: str, **changes: Any) -> Model:
    values = {"hidden_size": 24, "n_heads": 4, "vocab_size": 31, "max_seq_len": SOURCE}
    config = ModelConfig(family=family, n_layers=LAYERS, **{**values, **changes})  # type: ignore[arg-type]
    return build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"))


def batch_of(model: Model, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> Tensor:
        return torch.randint(0, 31, (B, n), generator=generator)

    def valid(n: int) -> Tensor:
        return torch.arange(n) < torch.tensor([[n], [n - 1], [2]])

    batch = {"tokens": tokens(S), "targets": tokens(S)}
    if model.config.two_stacks:
        batch["source"] = tokens(SOURCE)
    if padded:
        batch["valid"] = valid(S)
        if model.config.two_stacks:
            batch["source_valid"] = valid(SOURCE)
    return batch


def calls_of(model: Model, batch: Batch) -> list[dict[str, Any]]:
    """Return how the fused kernel was called in one forward pass."""
    calls = []
    fused = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, **how: Any) -> Tensor:
        calls.append({"q": q, "k": k, "mask": attn_mask, **how})
        return fused(q, k, v, attn_mask, **how)

    with patch.object(F, "scaled_dot_product_attention", watched):
        loss = model.losses(batch)["tokens"]
    assert torch.isfinite(loss)
    return calls


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_kernel_is_always_called(family: str, training: bool, padded: bool) -> None:
    """Cover causal, padded, both, a relative bias, and cross-attention; evaluation ignores dropout.

    Layers of a stack share what is added to their scores.
    """
    model = build(family, dropout=0.1, attention_dropout=0.0 if training else 0.1)
    model.train(training)
    with patch.object(AttentionHeads, "_unfused", side_effect=AssertionError):
        calls = calls_of(model, batch_of(model, padded))
    relative = family == "t5"
    kinds = {
        "encoder": [c for c in calls if c["q"].shape[2] == c["k"].shape[2] == SOURCE],
        "cross": [c for c in calls if (c["q"].shape[2], c["k"].shape[2]) == (S, SOURCE)],
        "self": [c for c in calls if c["q"].shape[2] == c["k"].shape[2] == S],
    }
    stacks = ("encoder", "cross", "self") if model.config.two_stacks else ("self",)
    for name, found in kinds.items():
        assert len(found) == LAYERS * (name in stacks)
        masked = padded or (relative and name != "cross")
        causal = name == "self" and family != "bert"
        for call in found:
            assert call["mask"] is found[0]["mask"]
            assert (call["mask"] is not None) == masked
            assert call["is_causal"] == (causal and not masked)
    assert sum(map(len, kinds.values())) == len(calls)


def test_dropout_of_probabilities_takes_the_unfused_path() -> None:
    model = build("gpt2", attention_dropout=0.1).train()
    assert not calls_of(model, batch_of(model, padded=True))


@pytest.mark.parametrize(
    ("family", "padded", "n"),
    [
        ("gpt2", False, 0),
        ("bert", False, 0),
        ("bert", True, 0),
        ("transformer", False, 0),
        # A mask that is causal and padded is one tensor of s x s numbers for all layers.
        ("gpt2", True, 1),
        ("transformer", True, 1),
    ],
)
def test_no_layer_keeps_scores(family: str, padded: bool, n: int) -> None:
    """No kept tensor has s x s elements, or s x S in cross-attention."""
    model = build(family)
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if len(x.shape) > 1 and x.shape[-2] in (S, SOURCE) and x.shape[-1] in (S, SOURCE):
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.train().losses(batch_of(model, padded))["tokens"].backward()
    assert len(kept) == n


@pytest.mark.parametrize("masked", [True, False])
def test_a_shared_bias_gets_its_gradient_in_float32(masked: bool) -> None:
    """With 24 layers, what is added in bfloat16 to a sum of 1 would be lost."""
    bias = torch.zeros(2, 3, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False]])[:, None, None, :] if masked else None
    shared = added_to_scores(3, torch.bfloat16, mask, bias)
    assert isinstance(shared, SharedBias)
    small, reads = 2.0**-9, []
    for _ in range(24):
        reads.append(shared.of_layer())
        assert reads[-1].data_ptr() == shared.values.data_ptr(), "one memory for all layers"
        assert reads[-1].dtype == torch.bfloat16
    total = sum(
        (read * (small if layer else 1.0)).masked_fill(read.isinf(), 0.0).float().sum()
        for layer, read in enumerate(reads)
    )
    assert isinstance(total, Tensor)
    total.backward()
    want = torch.full((2, 3, 3), 1.0 + 23 * small)
    if masked:
        want[..., 2] = 0.0
    assert bias.grad is not None
    assert torch.equal(bias.grad, want)


# Whether attention is causal, heads of queries for one of keys, the window, whether there are
# documents, padding and a relative bias, and the rate of dropout.
SEGMENTED: dict[str, tuple[bool, int, int, bool, bool, bool, float]] = {
    "causal": (True, 1, 0, False, False, False, 0.0),
    "both ways": (False, 1, 0, False, True, False, 0.0),
    "shared keys": (True, 2, 0, False, False, False, 0.0),
    "dropout": (True, 2, 0, False, False, False, 0.3),
    "window": (True, 1, 4, False, False, False, 0.0),
    "window, dropout": (True, 2, 4, False, False, False, 0.3),
    "documents": (True, 2, 0, True, False, False, 0.0),
    "documents, window, dropout": (True, 1, 3, True, False, False, 0.3),
    "documents both ways": (False, 1, 0, True, False, True, 0.0),
    "relative bias": (True, 1, 0, False, True, True, 0.0),
    "relative bias both ways, dropout": (False, 1, 0, False, True, True, 0.3),
}


@pytest.mark.parametrize("queries", [2, 256], ids=["in parts", "at once"])
@pytest.mark.parametrize("name", SEGMENTED)
def test_segments_of_queries_equal_all_queries(
    name: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of segments, and the sums of their gradients, are those of plain attention."""
    causal, sharing, window, packed, padded, biased, p = SEGMENTED[name]
    monkeypatch.setattr(scores, "QUERIES", queries)
    n, d, f64 = 4, 6, torch.float64
    generator = torch.Generator().manual_seed(5)
    config = ModelConfig(n_layers=1, hidden_size=n * d, n_heads=n, attention_dropout=p)
    heads = AttentionHeads(config, "x", DropoutRng(1, 2, 3), scaled=True).train()
    heads.head_block = 1
    relative = RelativeBias(8, 10, n, not causal, std=1.0).double()
    torch.nn.init.normal_(relative.weight, generator=generator)
    q = torch.randn(B, n, S, d, generator=generator, dtype=f64, requires_grad=True)
    k, v = (
        torch.randn(B, n // sharing, S, d, generator=generator, dtype=f64, requires_grad=True)
        for _ in range(2)
    )
    numbers = (torch.arange(S) >= torch.tensor([[[4], [9]], [[1], [6]], [[13], [13]]])).sum(1)
    valid = torch.arange(S) < torch.tensor([[S], [S - 1], [2]])

    # Plain attention with one mask for all queries and keys.
    i, j = torch.arange(S)[:, None], torch.arange(S)
    seen = (j <= i) | torch.tensor(not causal)
    seen = seen & ((j > i - window) if window else True)
    seen = seen.expand(B, 1, S, S)
    if packed:
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None, :])
    if padded:
        seen = seen & valid[:, None, None, :]
    x = q @ k.repeat_interleave(sharing, 1).transpose(-1, -2) * d**-0.5
    x = x + relative(S, S) if biased else x
    probabilities = x.masked_fill(~seen, -torch.inf).softmax(-1)
    if p:
        keep = keep_scores(heads.counter(q.device), (B, n, S, S), (n, 0, 0), p)
        probabilities = probabilities * keep / (1 - p)
    want = (probabilities @ v.repeat_interleave(sharing, 1)).transpose(1, 2).flatten(2)

    found = []
    for first, end in ((0, 5), (5, 12), (12, 13)):
        begin = max(0, first - window + 1) if window else 0
        keys = slice(begin, end if causal else S)
        n_queries, n_keys = end - first, keys.stop - begin
        mask = added_to_scores(
            n_queries,
            f64,
            valid[:, None, None, keys] if padded else None,
            relative(n_queries, n_keys, first - begin) if biased else None,
            causal,
            window=Window(window, n_keys, q.device) if window else None,
            documents=document_bounds(numbers[:, first:end], numbers[:, keys]) if packed else None,
        )
        some = q[:, :, first:end], k[:, :, keys], v[:, :, keys]
        found.append(heads._attend(*some, causal, mask, first, begin))
    inputs = [q, k, v, *([relative.weight] if biased else [])]
    grad = torch.randn(B, S, n * d, generator=generator, dtype=f64)
    got = torch.cat(found, 1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    for one, other in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
