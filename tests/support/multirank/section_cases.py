"""Cases of tests/multirank/test_gradcheck.py: Megatron's sections, the norm and the loss."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gridformer.mesh import Axes
from gridformer.models.blocks import IGNORE, LayerNorm, RMSNorm
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import GridNorm
from tests.support.multirank.collective_cases import COL, ROW, CaseMaker
from tests.support.multirank.cutting import Case, Dims, cut, join

# On one row of devices, activations between sections are whole on all of them, or sharded over s,
# or over b as with sub-graphs; they are gathered at once or in chunks.
BETWEEN: dict[str, Dims] = {
    "replicated": (None, None, None),
    "sequence": (None, COL, None),
    "sequence-parts": (None, COL, None),
    "samples-parts": (COL, None, None),
}


def _one_row(between: str, axes: Axes) -> summa.Gathered:
    dims, parts = BETWEEN[between], 2 if between.endswith("parts") else 1
    boundary = summa.Replicated(axes.col)
    if COL in dims:
        boundary = summa.Sharded(axes.col, dims.index(COL))
    return summa.Gathered(axes, boundary, parts)


def section_opens(between: str, keep_input: bool, axes: Axes) -> Case:
    """C = A B + bias: A is whole or sharded over s; the columns of B, bias and C are sharded."""

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, BETWEEN[between], axes), cut(w, (None, COL), axes)
        my_bias = cut(bias, (COL,), axes)
        c = summa.product_ab(*mine, _one_row(between, axes), my_bias, None, keep_input)
        return join(c, (None, None, COL), axes)

    cols = axes.col.size
    shapes: list[tuple[int, ...]] = [(cols, cols, 3), (3, 2 * cols), (2 * cols,)]
    return Case(shapes, on_grid, lambda a, w, bias: a @ w + bias)


def section_closes(between: str, axes: Axes) -> Case:
    """C = A Bᵀ + bias: A and the columns of B are sharded, C is whole or sharded over s or b.

    The bias is one variable that all devices hold, or one on each device, which sees its part of C.
    """
    cols, whole = axes.col.size, between == "replicated"

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, (None, None, COL), axes), cut(w, (None, COL), axes)
        my_bias = cut(bias, (None if whole else COL, None), axes)[0]
        c = summa.product_abt(*mine, _one_row(between, axes), my_bias)
        return join(c, BETWEEN[between], axes)

    def plain(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        each = bias.unsqueeze(1) if between.startswith("samples") else bias
        return a @ w.t() + each

    shapes: list[tuple[int, ...]] = [(cols, cols, 2 * cols), (3, 2 * cols)]
    return Case([*shapes, (1 if whole else cols, 3)], on_grid, plain)


def section_lookup(between: str, axes: Axes) -> Case:
    """Look up rows of a table [h, v] with sharded words, for tokens that all devices know."""
    cols = axes.col.size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2 * cols, (2, 2 * cols), generator=generator)

    def on_grid(table: Tensor) -> Tensor:
        mine = cut(table, (None, COL), axes)
        rows = summa.lookup(tokens, mine, _one_row(between, axes), axes, output_stays=False)
        return join(rows, BETWEEN[between], axes)

    return Case([(3, 2 * cols)], on_grid, lambda table: F.embedding(tokens, table.t()))


def sections() -> dict[str, CaseMaker]:
    """Return Megatron's products, on one row of devices."""
    makers: dict[str, CaseMaker] = {}
    for between in BETWEEN:
        makers[f"section_opens-{between}"] = partial(section_opens, between, False)
        makers[f"section_opens-{between}-keep_input"] = partial(section_opens, between, True)
        makers[f"section_closes-{between}"] = partial(section_closes, between)
        if not between.startswith("samples"):  # with sharded samples the embedding is common
            makers[f"section_lookup-{between}"] = partial(section_lookup, between)
    return makers


# --------------------------------------------------------------------------- norm and loss


def layer_norm(h: int, eps: float, offset: float, axes: Axes) -> Case:
    """Each row's copies of the weights count as one variable: their gradients are partial sums."""
    rows, cols = axes.row.size, axes.col.size
    with torch.device("meta"):
        module = GridNorm(LayerNorm(h, eps), axes)
    assert {p.shape for p in module.parameters()} == {(h // cols,)}

    def on_grid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = {
            "weight": cut(weight, (ROW, COL), axes)[0],
            "bias": cut(bias, (ROW, COL), axes)[0],
        }
        mine = cut(x, (ROW, None, COL), axes)
        return join(
            torch.func.functional_call(module, values, (mine + offset,)), (ROW, None, COL), axes
        )

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.layer_norm(x + offset, (h,), eps=eps)
        return normed * weight.unsqueeze(1) + bias.unsqueeze(1)

    return Case([(rows, 2, h), (rows, h), (rows, h)], on_grid, plain)


def rms_norm(h: int, eps: float, scale: float, axes: Axes) -> Case:
    with torch.device("meta"):
        module = GridNorm(RMSNorm(h, eps, scale=scale), axes)

    def on_grid(x: Tensor, weight: Tensor) -> Tensor:
        values = {"weight": cut(weight, (ROW, COL), axes)[0]}
        mine = cut(x, (ROW, None, COL), axes)
        return join(torch.func.functional_call(module, values, (mine,)), (ROW, None, COL), axes)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (h,), eps=eps) * weight.unsqueeze(1) * scale

    return Case([(axes.row.size, 2, h), (axes.row.size, h)], on_grid, plain)


def cross_entropy(v: int, padded: int, axes: Axes) -> Case:
    """A row of devices computes its tokens' loss, which is one variable that all of them hold."""
    rows = axes.row.size
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, v, (rows, 2, 2), generator=generator)
    targets[:, 0, 0] = v - 1
    targets[-1, 1, 1] = IGNORE
    loss: nn.Module = VocabParallelCrossEntropy(axes.col, v)

    def on_grid(logits: Tensor) -> Tensor:
        # What padded columns hold must not matter; 50 would be the largest logit by far.
        overhang = torch.zeros(padded, dtype=logits.dtype)
        overhang[v:] = 50.0
        mine = cut(logits + overhang, (ROW, None, None, COL), axes)
        # gradcheck runs the backward pass several times, and the loss uses up what it has saved.
        value = checkpoint(loss, mine[0], targets[axes.row.index], use_reentrant=False)
        return join(value.unsqueeze(0), (ROW,), axes)

    def plain(logits: Tensor) -> Tensor:
        each = [
            F.cross_entropy(x[..., :v].flatten(0, 1), t.flatten(), reduction="sum")
            for x, t in zip(logits, targets)
        ]
        return torch.stack(each)

    return Case([(rows, 2, 2, padded)], on_grid, plain)


def norm_and_loss_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    return {
        "layer_norm-one-column-each": partial(layer_norm, cols, 1e-5, 0.0),
        "layer_norm": partial(layer_norm, 2 * cols, 1e-1, 3.0),
        "rms_norm": partial(rms_norm, 2 * cols, 1e-1, 0.5),
        "cross_entropy": partial(cross_entropy, 3 * cols, 3 * cols),
        "cross_entropy-padded": partial(cross_entropy, 3 * cols - 1, 3 * cols),
        "cross_entropy-rank-of-padding": partial(cross_entropy, 2 * cols - 1, 3 * cols),
    }
