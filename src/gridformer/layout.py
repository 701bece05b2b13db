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
    """Raise ConfigError with every reason why this model and batch cannot run under this layout."""
    layout, model = run.layout, run.model
    rows, cols = layout.rows, layout.cols
    problems = _shape_problems(layout)
    if layout.scheme in ("megatron", "optimus"):
        problems += _divides("model.n_heads", model.n_heads, "layout.cols", cols)
        problems += _divides("model.ffn_size", model.ffn_size, "layout.cols", cols)
    if layout.scheme == "optimus":
        problems += _divides("model.hidden_size", model.hidden_size, "layout.cols", cols)
        problems += _divides("model.hidden_size", model.hidden_size, "layout.rows", rows)
        problems += _divides("model.ffn_size", model.ffn_size, "layout.rows", rows)
    if layout.scheme == "megatron" and layout.sequence_parallel:
        problems += _divides("data.seq_len", run.seq_len, "layout.cols", cols)
    problems += _batch_problems(run)
    if run.seq_len > model.max_seq_len:
        problems.append(
            f"data.seq_len={run.seq_len} is longer than model.max_seq_len={model.max_seq_len}: "
            f"use data.seq_len={model.max_seq_len} or less, or raise model.max_seq_len"
        )
    if problems:
        raise ConfigError(problems)


def _shape_problems(layout: LayoutConfig) -> list[str]:
    problems = []
    if layout.pp > 1:
        problems.append(f"layout.pp={layout.pp}: pipelines are not in this release; use pp=1")
    if layout.scheme == "single" and (layout.rows, layout.cols) != (1, 1):
        problems.append(
            f"layout.scheme=single is a 1x1 grid, not {layout.rows}x{layout.cols}: use rows=1 and "
            "cols=1 (dp adds replicas), or scheme=megatron or scheme=optimus"
        )
    if layout.scheme == "megatron" and layout.rows != 1:
        problems.append(
            f"layout.rows={layout.rows}: megatron cuts one way; use rows=1 and "
            f"cols={layout.rows * layout.cols}, or scheme=optimus"
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
    below = train.global_batch // parts * parts
    options = [b for b in (below, below + parts) if b]
    factors = {
        "layout.dp": layout.dp,
        "layout.rows": rows,
        "train.micro_batches": train.micro_batches,
    }
    names = " x ".join(f"{name} ({size})" for name, size in factors.items() if size > 1)
    return [
        f"train.global_batch={train.global_batch} does not divide over {names}: use "
        f"train.global_batch={any_of(options)}"
    ]


def _divides(what: str, value: int, axis: str, size: int) -> list[str]:
    """A sentence unless `size` divides `value`, with the sizes and the nearest value that would."""
    if value % size == 0:
        return []
    below = value // size * size
    nearest = [v for v in (below, below + size) if v]
    fitting = [d for d in divisors(value) if d <= max(size * 2, 16)]
    return [
        f"{what}={value} does not divide over {axis}={size}: use {axis}={any_of(fitting)}, or "
        f"{what}={any_of(nearest)}"
    ]


def padded_vocabulary(vocab_size: int, layout: LayoutConfig) -> int:
    """The vocabulary that a layout computes with: the next multiple of lcm(rows, cols)."""
    multiple = math.lcm(layout.rows, layout.cols)
    return -(-vocab_size // multiple) * multiple
