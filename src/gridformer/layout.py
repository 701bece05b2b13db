"""From a layout to a named device mesh, and all that must hold before one is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gridformer.config import LayoutConfig, RunConfig, any_of, divisors
from gridformer.errors import ConfigError

if TYPE_CHECKING:
    from gridformer.comm import Axes

MESH_AXES = ("pp", "dp", "row", "col")  # outermost first: ranks of one node differ in `col`


def build_axes(layout: LayoutConfig, device_type: str) -> Axes:
    """The axes of this process. Needs a process group of layout.n_processes ranks, if more than 1.

    Ranks are numbered with `col` innermost and `pp` outermost (Narayanan et al. 2021).
    """
    from gridformer.comm import Axes

    if layout.n_processes == 1:
        return Axes()
    from torch.distributed.device_mesh import init_device_mesh

    shape = (layout.pp, layout.dp, layout.rows, layout.cols)
    return Axes.of(init_device_mesh(device_type, shape, mesh_dim_names=MESH_AXES))


def check(run: RunConfig) -> None:
    """Raise ConfigError with every reason why this model and batch cannot run under this layout.

    Each names values that would work, and taking one of them makes no new problem.
    """
    problems = _shape_problems(run)
    for axis in ("rows", "cols"):
        size = getattr(run.layout, axis)
        for key, value in _cut_over(axis, run).items():
            if value % size:
                problems.append(
                    f"{key}={value} does not divide over layout.{axis}={size}: use "
                    f"{_remedies(key, value, axis, run)}"
                )
    problems += _batch_problems(run)
    problems += _length_problems(run)
    if problems:
        raise ConfigError(problems)


def _cut_over(axis: str, run: RunConfig) -> dict[str, int]:
    """What a scheme cuts over an axis of the grid: each of these must divide by its size."""
    model = run.model
    cut: dict[str, int] = {}
    if axis == "cols" and run.layout.scheme in ("megatron", "optimus"):
        cut |= {"model.n_heads": model.n_heads, "model.ffn_size": model.ffn_size}
    if run.layout.scheme == "optimus":
        cut |= {"model.ffn_size": model.ffn_size, "model.hidden_size": model.hidden_size}
    if axis == "cols" and _cuts_sequence(run):
        cut |= {"data.seq_len": run.seq_len}
    return cut


def _remedies(key: str, value: int, axis: str, run: RunConfig) -> str:
    """Sizes of the axis, and values of the key, that fit everything else as it is."""
    layout, model = run.layout, run.model
    over_axis = list(_cut_over(axis, run).values())
    replica_batch = run.train.global_batch // (layout.dp * run.train.micro_batches)
    if axis == "rows" and replica_batch:
        over_axis.append(replica_batch)
    largest = max(16, 2 * getattr(layout, axis))
    sizes = [size for size in divisors(math.gcd(*over_axis)) if size <= largest]
    remedies = [f"layout.{axis}={any_of(sizes)}"]

    grid = math.lcm(layout.rows if layout.scheme == "optimus" else 1, layout.cols)
    if key == "model.n_heads":  # must also divide hidden_size
        fitting = [n for n in divisors(model.hidden_size) if n % layout.cols == 0]
        nearest = sorted(sorted(fitting, key=lambda n: abs(n - value))[:2])
    elif key == "model.hidden_size":
        nearest = _multiples_around(value, math.lcm(grid, model.n_heads))
    elif key == "model.ffn_size":
        nearest = _multiples_around(value, grid)
    else:
        nearest = [s for s in _multiples_around(value, grid) if s <= model.max_seq_len]
    if nearest:
        remedies.append(f"{key}={any_of(nearest)}")
    return ", or ".join(remedies)


def _multiples_around(value: int, factor: int) -> list[int]:
    below = value // factor * factor
    return [multiple for multiple in (below, below + factor) if multiple]


def _cuts_sequence(run: RunConfig) -> bool:
    return run.layout.scheme == "megatron" and run.layout.sequence_parallel


def _shape_problems(run: RunConfig) -> list[str]:
    layout, problems = run.layout, []
    if layout.pp > 1:
        problems.append(f"layout.pp={layout.pp}: pipelines are not in this release; use pp=1")
    if layout.scheme == "single" and (layout.rows, layout.cols) != (1, 1):
        problems.append(
            f"layout.scheme=single is a 1x1 grid, not {layout.rows}x{layout.cols}: use rows=1 and "
            "cols=1 (dp adds replicas), or scheme=megatron or scheme=optimus"
        )
    if layout.scheme == "megatron" and layout.rows != 1:
        widths = divisors(math.gcd(*_cut_over("cols", run).values()))
        width = max(width for width in widths if width <= layout.rows * layout.cols)
        problems.append(
            f"layout.rows={layout.rows}: megatron cuts one way; use rows=1 and cols={width}, or "
            "scheme=optimus"
        )
    if layout.sequence_parallel and layout.scheme != "megatron":
        problems.append(
            f"layout.sequence_parallel belongs to scheme=megatron, not {layout.scheme}: use "
            "sequence_parallel=false"
        )
    return problems


def _batch_problems(run: RunConfig) -> list[str]:
    layout, train = run.layout, run.train
    rows = layout.rows if layout.scheme == "optimus" else 1
    parts = layout.dp * rows * train.micro_batches
    if train.global_batch % parts == 0:
        return []
    factors = {
        "layout.dp": layout.dp,
        "layout.rows": rows,
        "train.micro_batches": train.micro_batches,
    }
    names = " x ".join(f"{name} ({size})" for name, size in factors.items() if size > 1)
    return [
        f"train.global_batch={train.global_batch} does not divide over {names}: use "
        f"train.global_batch={any_of(_multiples_around(train.global_batch, parts))}"
    ]


def _length_problems(run: RunConfig) -> list[str]:
    longest = run.model.max_seq_len
    if run.seq_len <= longest:
        return []
    fitting = longest // run.layout.cols * run.layout.cols if _cuts_sequence(run) else longest
    shorter = f"data.seq_len={fitting}, or " if fitting else ""
    return [
        f"data.seq_len={run.seq_len} is longer than model.max_seq_len={longest}: use {shorter}"
        f"model.max_seq_len={run.seq_len}"
    ]
