"""Attention of all families uses the fused kernel, and no scores are kept if it needs no bias."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks.attention import _Heads
from gridformer.models.blocks.scores import SharedBias, added_to_scores
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

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
        calls.append({"q": q, "k": k, "mask": mask, **how})
        return fused(q, k, v, mask, **how)

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
    with patch.object(_Heads, "_unfused", side_effect=AssertionError):
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
