"""Runs the kernels of `gridformer.models.kernels` and what they must equal.

On a CPU they run in a process of their own whose Triton interprets them.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models.blocks import DropoutRng
from gridformer.models.blocks.attention import AttentionHeads
from gridformer.models.blocks.scores import DocumentBounds, ScoreParts, Window, document_bounds
from gridformer.models.kernels import library
from gridformer.parallel import build_parallel
from gridformer.utils import rng
from gridformer.utils.batch import IGNORE, Batch
from tests.support.fake_gpu import own_process

NO_TRITON = "Triton is not installed; `make test` installs it where it exists, which is on Linux"
NO_LOOPS = "Triton's interpreter runs no loops with this version of numpy; a newer Triton does"

KEY = rng.key(1234, 7, "layers.0.dropout1")
# shape, first sample, block along s and h, probability
MASKS: dict[str, tuple[tuple[int, int, int], int, tuple[int, int, int, int], float]] = {
    "several tiles": ((1, 3, 1030), 5, (0, 3, 0, 0), 0.3),
    "a block": ((2, 7, 24), 2**33 + 5, (14, 7, 0, 24), 0.1),
    "two runs of tokens": ((2, 8, 24), 5, (16, 3, 40, 0), 0.3),
    "far away": ((1, 3, 6), 2**32 - 1, (2_100_000_000, 3, 0, 4_800_000_000), 1 - 2**-40),
}
Sizes = tuple[int, int, int, int, int]  # samples, heads, queries, keys, head size
ATTENTION: dict[str, tuple[Sizes, bool, bool, bool, float, int, int]] = {
    # sizes, causal, padded, biased, dropout, heads of queries for one of keys, window
    "dropout": ((2, 2, 21, 37, 24), False, False, False, 0.3, 1, 0),
    "causal, dropout": ((1, 2, 37, 37, 16), True, False, False, 0.5, 1, 0),
    "everything": ((2, 2, 18, 20, 5), True, True, True, 0.2, 2, 7),
    "padding": ((2, 1, 17, 33, 16), False, True, False, 0.0, 1, 0),
    "bias": ((2, 2, 33, 20, 8), False, False, True, 0.0, 1, 0),
    "causal, padding": ((2, 1, 40, 40, 8), True, True, False, 0.0, 1, 0),
    "shared keys": ((2, 6, 17, 19, 8), True, False, False, 0.1, 3, 0),
    "a segment": ((1, 2, 33, 70, 8), True, False, False, 0.0, 2, 0),
    "window": ((1, 2, 70, 75, 8), True, False, False, 0.0, 2, 20),
    # Of 16 keys in a tile, the last one is also seen by the first query of a tile.
    "wide window": ((1, 2, 70, 75, 8), True, False, False, 0.0, 2, 55),
    "documents": ((2, 2, 70, 70, 8), True, False, False, 0.2, 2, 0),
    "documents, window": ((2, 1, 70, 70, 8), True, False, False, 0.0, 1, 36),
    "documents, both ways": ((2, 1, 70, 70, 8), False, False, True, 0.0, 1, 0),
    "documents of two rows": ((2, 1, 40, 49, 8), False, False, False, 0.0, 1, 0),
    "documents of two rows, bias": ((2, 2, 70, 80, 8), False, False, True, 0.2, 2, 0),
}
# Where documents begin in each sample: one goes through several tiles, and several share a tile.
DOCUMENTS = ((0, 3, 4, 21, 63), (0, 16, 48))
# Where those of keys begin that are not at the positions of queries. The last 5 keys are of none.
OF_KEYS = ((0, 1, 18, 20, 30), (0, 20, 33))
# Several tiles of a real run.
LARGE = ((2, 4, 300, 333, 64), True, True, True, 0.1, 2, 70)


def counter_of(first_sample: int, device: str = "cpu") -> Tensor:
    """Return the counter of a site whose key is `KEY`."""
    return torch.tensor([*rng.halves(KEY), first_sample, 0], device=device)


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Yield a caller of top-level functions in a process whose CPU has the kernels of a GPU.

    Triton reads the variable when it is imported and when it decorates kernels, and torch imports
    Triton with some of its modules, so the process has it from its start, and this one must not.
    """
    pytest.importorskip("triton", reason=NO_TRITON)
    with own_process(imports_nothing=True) as call:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            call(_begin)
        yield call


def _begin() -> None:
    # Words of 32 bits are meant to wrap, of which numpy warns.
    warnings.filterwarnings("ignore", message="overflow encountered")
    from gridformer.models.kernels import flash, masking, softmax

    library.LIBRARY.impl("loss_terms", softmax.launch_terms, "CPU")
    library.LIBRARY.impl("loss_gradient", softmax.launch_gradient, "CPU")
    library.LIBRARY.impl("masked", masking.launch_masking, "CPU")
    library.LIBRARY.impl("attention", flash.launch_attention, "CPU")
    library.LIBRARY.impl("attention_backward", flash.launch_attention_backward, "CPU")
    library.available = lambda device, dtype: device.type == "cpu"


def runs_loops() -> bool:
    """Return whether this process's interpreter runs a loop that is not ours."""
    from tests.support.loop_kernel import counts

    return counts()


def run_attention(
    name: str, fused: bool, dtype: torch.dtype, device: str, tile: int = 16
) -> list[Tensor]:
    """Return the result and the gradients of q, k, v and the bias, which is at least float32.

    Args:
        tile: Tiles have this number of rows and columns; 0 means those of a real run.
    """
    from gridformer.models.kernels import flash

    (b, n, s, seen, d), causal, padded, biased, p, sharing, size = ATTENTION[name]
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, grad = random(b, s, n, d).transpose(1, 2), random(b, s, n * d)
    k, v = random(b, seen, n // sharing, 2, d).permute(3, 0, 2, 1, 4).unbind(0)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    inputs, valid, bias = [q, k, v], None, None
    if padded:
        valid = (torch.arange(seen) < torch.tensor([[seen], [seen - 9]])[:b]).to(device)
    if biased:
        bias = random(n, s, seen, dtype=torch.promote_types(dtype, torch.float32))
        inputs.append(bias.requires_grad_())
    config = ModelConfig(n_layers=1, hidden_size=n * d, n_heads=n, attention_dropout=p)
    heads = AttentionHeads(config, "x", DropoutRng(1, 2, 2**32 + 3), scaled=True).train()
    heads.head_block, heads.fused = 2, fused
    window = Window(size, seen, torch.device(device)) if size else None
    bounds = bounds_of(s, seen, device) if "documents" in name else None
    mask = None
    if padded or biased or size or bounds is not None:
        mask = ScoreParts(valid, bias, causal, window, bounds)
    with ExitStack() as stack:
        if tile:
            width = max(16, 1 << (d - 1).bit_length())
            sizes = {"D": width, "R": tile, "C": tile, "num_warps": 4}
            stack.enter_context(patch.object(flash, "tile_sizes", lambda *_: [sizes]))
        out = heads._attend(q, k, v, causal, mask, first_query=2**33 - 5, first_key=2**34 - 7)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def bounds_of(queries: int, keys: int, device: str) -> DocumentBounds:
    """Return the bounds of `DOCUMENTS`, or of as many documents in samples of another length."""

    def numbers(length: int, places: tuple[tuple[int, ...], ...]) -> Tensor:
        begins = torch.zeros(len(places), length, dtype=torch.int64)
        for begin, some in zip(begins, places):
            begin[torch.tensor(some)] = 1
        return begins.cumsum(1).to(device)

    places = tuple(tuple(place * queries // 70 for place in row) for row in DOCUMENTS)
    of_queries = numbers(queries, places)
    if queries == keys:
        return document_bounds(of_queries)
    return document_bounds(of_queries, numbers(keys, tuple((*row, keys - 5) for row in OF_KEYS)))


def config_of(family: Any, n_layers: int, rate: float, **more: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"hidden_size": 12, "n_heads": 2, "vocab_size": 31, "max_seq_len": 9}
    rates: dict[str, Any] = {"dropout": rate, "attention_dropout": rate}
    return ModelConfig(family=family, n_layers=n_layers, **sizes, **rates, **more)


def run_model(
    family: str, padded: bool, rate: float, fused: bool, packed: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and all gradients; if fused, no mask is made with PyTorch's operators."""
    more = {"n_kv_heads": 1, "window": 4} if family == "llama" else {}
    config = config_of(family, 1, rate, **more)
    model = build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"), "float64")
    model.uses_kernels(fused)
    model.dropout_rng.step = 3
    model.dropout_rng.at(slice(4, 6))
    with ExitStack() as stack:
        if fused:
            for owner, name in ((rng, "keep"), (AttentionHeads, "_unfused")):
                stack.enter_context(patch.object(owner, name, side_effect=AssertionError))
            if rate or padded or packed or family == "llama":  # T5 does not bias cross-attention
                stack.enter_context(
                    patch.object(F, "scaled_dot_product_attention", side_effect=AssertionError)
                )
        batch = batch_of(config, padded)
        if packed:
            batch["documents"] = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
            batch["positions"] = torch.tensor([[0, 1, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5]])
        if packed and config.two_stacks:
            numbers = [[0, 1, 1, 1, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1, 1]]
            positions = [[0, 0, 1, 2, 3, 4, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1, 2]]
            batch["source_documents"] = torch.tensor(numbers)
            batch["source_positions"] = torch.tensor(positions)
        loss = model.train().losses(batch)["tokens"]
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def run_compiled(family: str, backend: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses of several micro-batches, all gradients, and the number of graph breaks.

    Args:
        family: The family of a model with dropout, which uses the kernels.
        backend: Compiles its blocks; empty compiles nothing.
    """
    from torch._dynamo.utils import counters

    from gridformer.train.compile import compile_model

    config = config_of(family, 2, 0.2)
    model = build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu")).train()
    counters.clear()
    if backend:
        compile_model(model, backend)
    losses: list[float] = []
    with patch.object(rng, "keep", side_effect=AssertionError):
        for step, rows in ((0, slice(0, 2)), (0, slice(2, 4)), (1, slice(0, 2))):
            model.dropout_rng.step = step
            model.dropout_rng.at(rows)
            with torch.compiler.set_stance("fail_on_recompile" if losses else "default"):
                loss = model.losses(batch_of(config, False))["tokens"]
                loss.backward()
            losses.append(float(loss.detach()))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, sum(counters["graph_break"].values())


def batch_of(config: ModelConfig, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> Tensor:
        return torch.randint(0, 31, (2, n), generator=generator)

    def valid(n: int) -> Tensor:
        return torch.arange(n) < torch.tensor([[n], [2]])

    batch = {"tokens": tokens(7), "targets": tokens(7)}
    if config.two_stacks:
        batch["source"] = tokens(9)
    if padded:
        batch["valid"] = valid(7)
        if config.two_stacks:
            batch["source_valid"] = valid(9)
    return batch


# Rows, columns, which words they are, label smoothing, and the columns of a tile.
LOSSES: dict[str, tuple[int, int, int, int, float, int]] = {
    "one tile": (5, 30, 0, 30, 0.0, 0),
    "several tiles, padding": (7, 75, 0, 70, 0.1, 16),
    "a part of the words": (6, 40, 40, 33, 0.1, 16),
    "padding alone": (3, 16, 64, 0, 0.1, 16),
}


def run_loss(name: str, dtype: torch.dtype, device: str, fused: bool) -> list[Tensor]:
    """Return the terms of each token, the loss of some, and the gradient of the logits."""
    from gridformer.models.kernels import cross_entropy, softmax

    n, columns, first, n_words, smoothing, tile = LOSSES[name]
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(n, columns, generator=generator)).to(dtype).to(device)
    logits[1, 0] = 90.0  # exponentials of it overflow unless it is subtracted first
    targets = torch.randint(first - 5, first + max(n_words, 1) + 5, (n,), generator=generator)
    targets[0], targets[-1] = IGNORE, first  # the last is the first word of these
    targets = targets.to(device)
    words = cross_entropy.Words(first, n_words, 1.0 - smoothing, smoothing / 200)
    scale = torch.tensor(3.0, device=device)
    if fused:
        x = logits.requires_grad_()
        terms = torch.ops.gridformer.loss_terms(x.detach(), targets, *words)

        def combine(top: Tensor, total: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Add what other devices may have."""
            higher = top.clamp(min=2.0)
            return higher, total * (top - higher).exp() + 1.0, target + 0.5

        with patch.object(softmax, "_MOST", tile or softmax._MOST):
            loss = cross_entropy.cross_entropy(x, targets, words, combine, slice(1, None))
            (loss * scale).backward()
        assert x.grad is not None
        assert torch.equal(x.detach(), x.grad), "the gradient is in the place of the logits"
        return [*terms, loss.detach(), x.grad]
    x = logits.double().requires_grad_()
    mine = x[:, :n_words]
    top = mine.amax(1) if n_words else x.new_full((n,), -torch.inf)
    here = (targets >= first) & (targets < first + n_words)
    column = torch.where(here, targets - first, 0).unsqueeze(1)
    target = torch.where(here, x.gather(1, column).squeeze(1), 0.0) * words.share
    target = target + mine.sum(1) * words.spread
    higher = top.detach().clamp(min=2.0)
    others = torch.log((mine - higher.unsqueeze(1)).exp().sum(1) + 1.0) + higher
    loss = ((others - target - 0.5) * (targets != IGNORE))[1:].sum()
    (loss * scale).backward()
    assert x.grad is not None
    x.grad[0] = 0.0
    total = (mine - top.unsqueeze(1)).exp().sum(1)
    return [y.detach() for y in (top, total, target, loss, x.grad)]
