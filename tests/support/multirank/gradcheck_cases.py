"""Cases of tests/multirank/test_gradcheck.py: products of a grid, norms, lookups, loss, sums."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gridformer.comm import autograd
from gridformer.mesh import Axes
from gridformer.models.blocks import IGNORE, LayerNorm, RMSNorm, SequenceRows
from gridformer.models.blocks.experts import expert_product, sorted_rows
from gridformer.models.blocks.scores import past
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.experts import GatheredAlong, TokensOfGrid
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import GridNorm
from gridformer.parallel.tensor.sequence import GatheringRows
from gridformer.parallel.tensor.summa.stationary import Ends, WeightParts, weight_stationary
from tests.support.multirank.cutting import COL, EACH, ROW, Case, CaseMaker, Dims, cut, join

# How a product is computed: a schedule, and what it keeps. Each evaluation makes it again, because
# an open prefetcher must not see a weight change.
How = Callable[[Axes], tuple[summa.Schedule, summa.GatheredWeight | None, bool]]


def _gather(
    axes: Axes, keep_input: bool = False, keep_weight: bool = False, parts: int = 1
) -> tuple[Any, Any, bool]:
    weight = summa.GatheredWeight(axes.row)
    weight.open()
    schedule = summa.Gathered(axes, summa.Sharded(axes.col, -1), parts)
    return schedule, weight if keep_weight else None, keep_input


SCHEDULES: dict[str, How] = {
    "broadcast": lambda axes: (summa.Broadcast(axes), None, False),
    "pipelined": lambda axes: (summa.Pipelined(axes), None, False),
    "gather": _gather,
    "gather-parts": partial(_gather, parts=3),
}
KEEPS: dict[str, How] = {
    "gather-keep_input": partial(_gather, keep_input=True),
    "gather-keep_weight": partial(_gather, keep_weight=True),
    "gather-keep_all": partial(_gather, keep_input=True, keep_weight=True),
    "gather-parts-keep_weight": partial(_gather, keep_weight=True, parts=2),
}


def product_of(
    transposed: bool, how: How, has_bias: bool, sizes: tuple[int, ...], axes: Axes
) -> Case:
    """Multiply [b, s, K] by [K, N] or by the transpose of [N, K].

    Rows shard b and the weight's first dimension, columns the rest. Each copy of the bias on the
    rows is one variable.
    """
    b, s, k, n = sizes

    def on_grid(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        schedule, weight, keep_input = how(axes)
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        my_bias = cut(bias[0], (ROW, COL), axes)[0] if bias else None
        if transposed:
            c = summa.product_abt(*mine, schedule, my_bias, weight)
        else:
            c = summa.product_ab(*mine, schedule, my_bias, weight, keep_input)
        return join(c, (ROW, None, COL), axes)

    def plain(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        c = a @ (w.t() if transposed else w)
        return c + bias[0].repeat_interleave(b // len(bias[0]), 0).unsqueeze(1) if bias else c

    weight = (n, k) if transposed else (k, n)
    return Case([(b, s, k), weight, *[(axes.row.size, n)] * has_bias], on_grid, plain)


def one_operand_wanted(wanted: int, transposed: bool, how: How, axes: Axes) -> Case:
    """A product whose other operand needs no gradient, so that its half of backward is skipped."""
    both = product_of(transposed, how, False, (2, 2, 6, 6), axes)
    generator = torch.Generator().manual_seed(4)
    constant = torch.randn(both.shapes[1 - wanted], generator=generator, dtype=torch.float64)

    def of_one(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(x, constant) if wanted == 0 else function(constant, x)

    return Case([both.shapes[wanted]], partial(of_one, both.on_grid), partial(of_one, both.plain))


def lookup(how: How, output_stationary: bool, v: int, h: int, n_tokens: int, axes: Axes) -> Case:
    """Look up rows of a table [v, h], or of one stored as [h, v].

    The tokens differ between the rows, and some words occur twice.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, v, (axes.row.size, n_tokens, 2), generator=generator)
    tokens[:, :, 0] = v - 1
    tokens[:, 0, 1] = 0

    def on_grid(table: Tensor) -> Tensor:
        schedule, weight, _ = how(axes)
        mine = tokens[axes.row.index], cut(table, (ROW, COL), axes)
        rows = summa.lookup(*mine, schedule, axes, output_stationary, weight)
        return join(rows.unsqueeze(0), (ROW, None, None, COL), axes)

    if output_stationary:
        return Case([(v, h)], on_grid, lambda table: F.embedding(tokens, table))
    return Case([(h, v)], on_grid, lambda table: F.embedding(tokens, table.t()))


def products_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    """M, K and N differ, and panels are at least two wide, except on 3x4 to save time."""
    both = math.lcm(rows, cols) * (1 if rows * cols > 9 else 2)
    ab, abt = (rows, 2, both, 2 * cols), (rows, 2, 2 * cols, both)
    makers: dict[str, CaseMaker] = {
        "product_ab-gather": partial(product_of, False, _gather, False, ab),
        "product_abt-gather": partial(product_of, True, _gather, False, abt),
    }
    for name, how in {**SCHEDULES, **KEEPS}.items():
        makers[f"product_ab-{name}-bias"] = partial(product_of, False, how, True, ab)
        # the other schedules ignore what is kept
        if name in SCHEDULES or name == "gather-keep_weight":
            makers[f"product_abt-{name}-bias"] = partial(product_of, True, how, True, abt)
            makers[f"lookup-output-{name}"] = partial(lookup, how, True, both, 2 * cols, 2)
            makers[f"lookup-input-{name}"] = partial(lookup, how, False, 2 * cols, both, 2)
    return makers


def stationary_section(rows: int, cols: int, dim: int, keep: bool, axes: Axes) -> Case:
    """Open and close a section with weights that stay, tokens over columns by b or by s.

    The opening weight has a part that rows divide, and one that each of them needs, as they need a
    head of keys. Each copy of a bias is one variable.
    """
    wide, k, n = 2, 2 * rows, 3 * rows  # columns of the second part, and of the first on a row
    own, b, s = wide * rows, 2 if dim else 2 * cols, 2 * cols if dim else 2
    tokens: Dims = (None, COL, ROW) if dim else (COL, None, ROW)

    def on_grid(x: Tensor, w: Tensor, bias: Tensor, w2: Tensor, bias2: Tensor) -> Tensor:
        by_tokens, by_width = summa.Sharded(axes.col, dim), summa.Sharded(axes.row, -1)
        opens = Ends(by_tokens, by_width, WeightParts(axes.row, (own, wide), (rows, 1)))
        my_bias = cut(bias, (ROW, COL), axes)[0]
        mine = cut(x, tokens, axes), cut(w, (ROW, COL), axes)
        both = weight_stationary(*mine, my_bias, opens, keep).split(wide, -1)
        inside, closes = both[0] * both[1], Ends(by_width, by_tokens)
        my_bias = cut(bias2, (COL, ROW), axes)[0]
        y = weight_stationary(inside, cut(w2, (COL, ROW), axes), my_bias, closes, keep)
        return join(y, tokens, axes)

    def plain(x: Tensor, w: Tensor, bias: Tensor, w2: Tensor, bias2: Tensor) -> Tensor:
        y = (x @ w).unflatten(-1, (cols, -1))  # of each column
        first, second = y[..., :own].unflatten(-1, (rows, -1)), y[..., own:].unsqueeze(-2)
        biases = bias[0].view(cols, -1)  # that of the first row
        of_first = biases[:, :own].unflatten(-1, (rows, -1))
        inside = (first + of_first) * (second + biases[:, own:].unsqueeze(1))
        out = inside.flatten(-3) @ w2
        of_tokens = bias2.repeat_interleave(2, 0)
        return out + (of_tokens if dim else of_tokens.unsqueeze(1))

    shapes = [(b, s, k), (k, cols * (own + wide)), (rows, cols * (own + wide))]
    return Case([*shapes, (rows * cols * wide, n), (cols, n)], on_grid, plain)


def stationary_weights(rows: int, cols: int) -> dict[str, CaseMaker]:
    ways = {"b": (0, False), "s": (1, False), "s-keep_input": (1, True)}
    return {
        f"product_stationary-{name}": partial(stationary_section, rows, cols, *way)
        for name, way in ways.items()
    }


def one_wanted() -> dict[str, CaseMaker]:
    """Return these cases for 2x3 only, since they are the same everywhere."""
    makers: dict[str, CaseMaker] = {}
    for name in ("broadcast", "gather", "gather-parts", "gather-keep_all"):
        how = {**SCHEDULES, **KEEPS}[name]
        for transposed, product in enumerate(("product_ab", "product_abt")):
            for wanted, letter in enumerate("ab"):
                make = partial(one_operand_wanted, wanted, bool(transposed), how)
                makers[f"{product}-{name}-only_{letter}_wanted"] = make
    return makers


# --------------------------------------------------------------------------- Megatron's sections

# On one row of devices, activations between sections are whole on all of them, or sharded over s,
# or over b as with sub-graphs; they are gathered at once or in chunks: of sequences, of tokens of
# each, or such as only hide messages.
BETWEEN: dict[str, Dims] = {
    "replicated": (None, None, None),
    "replicated-hidden": (None, None, None),
    "sequence": (None, COL, None),
    "sequence-parts": (None, COL, None),
    "sequence-tokens": (None, COL, None),
    "sequence-hidden": (None, COL, None),
    "samples-parts": (COL, None, None),
    "samples-hidden": (COL, None, None),
}
CHUNKS = {"parts": 2, "tokens": 4, "hidden": 4}


def _one_row(between: str, axes: Axes) -> summa.Gathered:
    dims, (_, _, chunks) = BETWEEN[between], between.partition("-")
    boundary = summa.Replicated(axes.col)
    if COL in dims:
        boundary = summa.Sharded(axes.col, dims.index(COL))
    return summa.Gathered(axes, boundary, CHUNKS.get(chunks, 1), chunks == "hidden")


def _tokens(between: str, cols: int) -> tuple[int, int]:
    """Return b and s: three tokens of each device make two unequal chunks of each sequence."""
    if between in ("sequence-tokens", "sequence-hidden"):
        return 2, 3 * cols
    return cols, cols


def section_opens(between: str, keep_input: bool, axes: Axes) -> Case:
    """C = A B + bias: A is whole or sharded over s; the columns of B, bias and C are sharded."""

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, BETWEEN[between], axes), cut(w, (None, COL), axes)
        my_bias = cut(bias, (COL,), axes)
        c = summa.product_ab(*mine, _one_row(between, axes), my_bias, None, keep_input)
        return join(c, (None, None, COL), axes)

    cols = axes.col.size
    shapes: list[tuple[int, ...]] = [(*_tokens(between, cols), 3), (3, 2 * cols), (2 * cols,)]
    return Case(shapes, on_grid, lambda a, w, bias: a @ w + bias)


def section_closes(between: str, axes: Axes) -> Case:
    """C = A Bᵀ + bias: A and the columns of B are sharded, C is whole or sharded over s or b.

    All devices hold the bias; where each has a part of C, their gradients of it are summed.
    """
    cols, whole = axes.col.size, between.startswith("replicated")

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, (None, None, COL), axes), cut(w, (None, COL), axes)
        held = bias if whole else bias.expand(cols, -1)
        my_bias = cut(held, (None if whole else COL, None), axes)[0]
        c = summa.product_abt(*mine, _one_row(between, axes), my_bias)
        return join(c, BETWEEN[between], axes)

    def plain(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return a @ w.t() + bias

    shapes: list[tuple[int, ...]] = [(*_tokens(between, cols), 2 * cols), (3, 2 * cols)]
    return Case([*shapes, (1, 3)], on_grid, plain)


def section_lookup(between: str, axes: Axes) -> Case:
    """Look up rows of a table [h, v] with sharded words, for tokens that all devices know."""
    cols = axes.col.size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2 * cols, (2, 2 * cols), generator=generator)

    def on_grid(table: Tensor) -> Tensor:
        mine = cut(table, (None, COL), axes)
        rows = summa.lookup(tokens, mine, _one_row(between, axes), axes, output_stationary=False)
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


def norm(h: int, make: Callable[[], Any], offset: float, plain: Any, axes: Axes) -> Case:
    """Each row's copies of the weights count as one variable: their gradients are partial sums."""
    rows = axes.row.size
    with torch.device("meta"):
        module = GridNorm(make(), axes)
    names = [name for name, _ in module.named_parameters()]
    assert {p.shape for p in module.parameters()} == {(h // axes.col.size,)}

    def on_grid(x: Tensor, *weights: Tensor) -> Tensor:
        values = {name: cut(weight, EACH, axes)[0] for name, weight in zip(names, weights)}
        mine = cut(x, (ROW, None, COL), axes) + offset
        return join(torch.func.functional_call(module, values, (mine,)), (ROW, None, COL), axes)

    def on_one(x: Tensor, *weights: Tensor) -> Tensor:
        return plain(x + offset, *(weight.unsqueeze(1) for weight in weights))

    return Case([(rows, 2, h), *[(rows, h)] * len(names)], on_grid, on_one)


def layer_norm(h: int, eps: float, offset: float) -> CaseMaker:
    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (h,), eps=eps) * weight + bias

    return partial(norm, h, partial(LayerNorm, h, eps), offset, plain)


def rms_norm(h: int, eps: float, scale: float) -> CaseMaker:
    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (h,), eps=eps) * weight * scale

    return partial(norm, h, partial(RMSNorm, h, eps, scale=scale), 0.0, plain)


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
        "layer_norm-one-column-each": layer_norm(cols, 1e-5, 0.0),
        "layer_norm": layer_norm(2 * cols, 1e-1, 3.0),
        "rms_norm": rms_norm(2 * cols, 1e-1, 0.5),
        "cross_entropy": partial(cross_entropy, 3 * cols, 3 * cols),
        "cross_entropy-padded": partial(cross_entropy, 3 * cols - 1, 3 * cols),
        "cross_entropy-rank-of-padding": partial(cross_entropy, 2 * cols - 1, 3 * cols),
    }


# --------------------------------------------------------------------------- collectives


def allreduce_identity(name: str, axes: Axes) -> Case:
    """Sum one variable per device to one variable per group."""
    dim, other = (0, COL) if name == ROW else (1, ROW)

    def on_grid(x: Tensor) -> Tensor:
        total = autograd.allreduce_identity(cut(x, (*EACH, None, None), axes), axes[name])
        return join(total.squeeze(0), (other, None, None), axes)

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, lambda x: x.sum(dim).clone())


def allreduce_allreduce(axes: Axes) -> Case:
    """Sum one variable per device down a column; the results are one variable per device, too."""

    def on_grid(x: Tensor) -> Tensor:
        mine = cut(x, (*EACH, None, None), axes)
        return join(autograd.allreduce_allreduce(mine, axes.row), (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True).expand_as(x)

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, plain)


def attention_over_rows(causal: bool, n_chunks: int, axes: Axes) -> Case:
    """Attention of sequences whose tokens rows divide; columns divide the heads."""
    rows, d, s = GatheringRows.over(axes.row), 2, 4 * axes.row.size
    order = torch.cat([SequenceRows(i, rows.n).of_row(torch.arange(s)) for i in range(rows.n)])

    def attend(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Any, first_query: int
    ) -> Tensor:
        seen = past(q.shape[2], k.shape[2], q.device) if causal else None
        out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def on_grid(*qkv: Tensor) -> Tensor:
        q, k, v = (cut(x[:, :, order], (None, COL, ROW, None), axes) for x in qkv)
        out = rows.attend(attend, q, k, v, causal, None)
        return join(out, (None, ROW, COL), axes)[:, order.argsort()]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    heads = n_chunks * axes.col.size
    return Case([(2, 2 * heads, s, d), (2, heads, s, d), (2, heads, s, d)], on_grid, plain)


def collectives_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    axes = [name for name, size in ((ROW, rows), (COL, cols)) if size > 1]
    found: dict[str, CaseMaker] = {
        f"allreduce_identity-{name}": partial(allreduce_identity, name) for name in axes
    }
    if rows > 1:
        found["allreduce_allreduce"] = allreduce_allreduce
        found["attention_over_rows"] = partial(attention_over_rows, False, 1)
        found["attention_over_rows-causal-chunks"] = partial(attention_over_rows, True, 3)
    return found


# --------------------------------------------------------------------------- experts


def rows_to_experts(name: str, axes: Axes) -> Case:
    """Send rows of different numbers to experts on other devices, and their results back.

    Each device along the axis has two experts, and the last of them has none that exists. Each
    device sends three rows, of which some experts get none.
    """
    axis, h, f = axes[name], 2, 2
    other = COL if name == ROW else ROW
    n_experts = 2 * axis.size - 1
    # Which expert each row of a device goes to, sorted; rows for one device come from all of them.
    chosen = torch.tensor([[0, 1, 1 + i % (n_experts - 1)] for i in range(axis.size)])

    def on_grid(x: Tensor, w: Tensor) -> Tensor:
        dims: Dims = (name, other, None, None)
        part = cut(w, (*dims, None), axes)[0, 0]
        tokens = TokensOfGrid(axis, "tokens", summa.Replicated(axis), axis, n_experts)
        counts = chosen[axis.index].bincount(minlength=n_experts)
        product: Any = lambda rows, ends: expert_product(rows, part, ends)  # noqa: E731
        rows = tokens.compute(cut(x, dims, axes)[0, 0], counts, product)
        return join(rows[None, None], dims, axes)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        of_rows = w.transpose(0, 1).flatten(1, 2)[:, chosen]  # [other devices, devices, 3, h, f]
        return torch.einsum("ijrh,jirhf->ijrf", x, of_rows)

    each = axis.size, axes[other].size
    return Case([(*each, 3, h), (*each, 2, h, f)], on_grid, plain)


def product_of_experts(dim: int, name: str | None, axes: Axes) -> Case:
    """Multiply sorted rows with matrices of experts, which an axis shards along `dim`.

    Along the other axis, devices have their own matrices.
    """
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second expert has no rows
    size = axes[name].size if name else 1
    k, n = (2 * size, 3) if dim == 1 else (3, 2 * size)

    def on_grid(x: Tensor, w: Tensor) -> Tensor:
        mine = cut(x, (*EACH, None, None), axes)[0, 0]
        dims = [None if one == name else one for one in EACH] + [None] * 3
        dims[2 + dim] = name
        part, whole = cut(w, tuple(dims), axes), GatheredAlong(axes[name], dim) if name else None
        y = expert_product(mine, part[0, 0], ends, whole)
        return join(y[None, None], (*EACH, None, None), axes)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        of_rows = w[:, :, [0, 0, 2, 2, 2]].expand(*x.shape[:2], -1, -1, -1)
        return torch.einsum("ijsk,ijskn->ijsn", x, of_rows)

    each = axes.row.size, axes.col.size
    of_w = [1 if one == name else axes[one].size for one in (ROW, COL)]
    return Case([(*each, 5, k), (*of_w, 3, k, n)], on_grid, plain)


def rows_by_key(k: int, axes: Axes) -> Case:
    """Sort k copies of each row by keys, weigh them by their places, and bring them back."""
    keys = torch.tensor([2, 0, 1, 0, 2, 2, 0, 1])[: 4 * k]
    weights = torch.arange(1.0, 4 * k + 1, dtype=torch.float64).unsqueeze(1)

    def on_grid(x: Tensor) -> Tensor:
        rows, restore = sorted_rows(x, keys, k)
        return restore(rows * weights)

    def plain(x: Tensor) -> Tensor:
        return x.repeat_interleave(k, 0) * weights[keys.argsort(stable=True).argsort()]

    return Case([(4, 2)], on_grid, plain)


def experts_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    axes = [name for name, size in ((ROW, rows), (COL, cols)) if size > 1]
    found: dict[str, CaseMaker] = {
        f"experts_rows-{name}": partial(rows_to_experts, name) for name in axes
    }
    found |= {
        f"experts_product-{name}-{dim}": partial(product_of_experts, dim, name)
        for name in axes
        for dim in (1, 2)
    }
    return found


def experts_on_one() -> dict[str, CaseMaker]:
    """Return what needs no other devices."""
    product = partial(product_of_experts, 1, None)
    return {"experts_product": product, **{f"sorted-{k}": partial(rows_by_key, k) for k in (1, 2)}}
