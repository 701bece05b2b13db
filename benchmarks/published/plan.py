"""Which layouts run on which emulated machine."""

from __future__ import annotations

from typing import Any

from benchmarks.published.cases import Layout, Machine

_GRID = {"scheme": "optimus", "rows": 4, "cols": 4}
_PAPER = {"schedule": "broadcast", "stationary": "output", "keep_gathered": "none"}


def _megatron(cols: int, **more: Any) -> dict[str, Any]:
    return {"scheme": "megatron", "cols": cols, **more}


def _optimus(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    return {"scheme": "optimus", "rows": rows, "cols": cols, **more}


def _sub_graph(branches: int, dp: int = 1, **more: Any) -> dict[str, Any]:
    return {"scheme": "subgraph", "branches": branches, "dp": dp, **more}


def _pipeline(pp: int, cols: int, micro_batches: int, **more: Any) -> dict[str, Any]:
    if cols == 1:
        return {"pp": pp, "micro_batches": micro_batches, **more}
    return _megatron(cols, pp=pp, micro_batches=micro_batches, **more)


# The machines, by what is measured on them besides all layouts together.
GRIDS, OVERALL, SMALL = Machine(4, 4, 100), Machine(4, 2, 100), Machine(2, 2, 50)
WIDE, TWO_NODES, ONE_NODE = Machine(8, 2, 200), Machine(2, 4, 200), Machine(1, 4, 0)
RACKS = Machine(8, 2, 200, racks=4, trunk_mbit=100)

# Optimus against Megatron, as in the paper's weak scaling.
STEM = Layout("megatron 1x16, recomputed", "stem", _megatron(16), "full", 32, True)
STEM_PAPER = Layout(
    "optimus 4x4 as in the paper, recomputed", "stem", {**_GRID, **_PAPER}, "full", 32, True
)
STEM_AUTO = Layout("optimus 4x4, recomputed", "stem", _GRID, "full", 32, True)
_STEMS = (STEM, STEM_PAPER, STEM_AUTO)
GRID_AWARE = Layout("optimus 4x4", "GPT-2", _GRID)
GRID_PLAIN = Layout("optimus 4x4, ranks in order", "GPT-2", _GRID, nodes_known=False)

# Data parallelism against sub-graphs, one sequence a process.
BRANCHED = ("Transformer", "T5")


def sub_graphs(model: str, n: int) -> dict[str, Layout]:
    """Returns data parallelism and sub-graphs on n processes, by the names in the tables."""
    found = {
        "data parallel": Layout(f"dp {n}", model, {"dp": n}, batch=n),
        "2-way D&SP": Layout(f"2-way D&SP, dp {n // 2}", model, _sub_graph(2, n // 2), batch=n),
        "4-way D&SP": Layout(f"4-way D&SP, dp {n // 4}", model, _sub_graph(4, n // 4), batch=n),
        "4-way cSub": Layout(
            f"4-way cSub, dp {n // 4}", model, _sub_graph(4, n // 4, common="first"), batch=n
        ),
    }
    if n == 4:  # a dp of 1 need not be said
        found = {name: _without_dp_1(one) for name, one in found.items()}
    return found


def _without_dp_1(layout: Layout) -> Layout:
    title = layout.title.removesuffix(", dp 1")
    return Layout(title, layout.model, layout.layout, batch=layout.batch)


def contiguous(model: str, n: int) -> Layout:
    """Returns 4-way D&SP on n processes with the members of a sub-grid next to each other."""
    layout = _sub_graph(4, n // 4, order="contiguous")
    return Layout(f"4-way D&SP, dp {n // 4}, contiguous", model, layout, batch=n)


# Tensor and pipeline parallelism: pp x tp.
SWEEP = {
    f"{pp} x {tp}": Layout(f"megatron {pp} x {tp}", "deep", _pipeline(pp, tp, 8), batch=32)
    for pp, tp in ((1, 8), (2, 4), (4, 2), (8, 1))
}
WHOLE, SLICED = (
    Layout(
        f"megatron 2 x 4, 2 stages a rank, {title}",
        "deep",
        _pipeline(2, 4, 4, stages_per_rank=2, scatter_gather=sliced),
        batch=32,
    )
    for sliced, title in ((False, "whole tensors"), (True, "scatter/gather"))
)
# Micro-batches of four sequences, so that a step with more of them differs in nothing else.
BUBBLES = {
    m: Layout(f"megatron 2 x 4, {m} micro-batches", "GPT-2", _pipeline(2, 4, m), batch=4 * m)
    for m in (2, 8)
}

# Three levels of links.
_IN_RACKS = _optimus(4, 2, dp=2)
RACK_GRIDS = {
    "contiguous": Layout("optimus 4x2, dp 2, contiguous", "GPT-2", _IN_RACKS, nodes_known=False),
    "nodes": Layout("optimus 4x2, dp 2, nodes known", "GPT-2", _IN_RACKS, racks_known=False),
    "racks": Layout("optimus 4x2, dp 2, nodes and racks known", "GPT-2", _IN_RACKS),
}

PLAN: dict[Machine, tuple[Layout, ...]] = {
    GRIDS: (
        *_STEMS,
        Layout("megatron 1x16", "GPT-2", _megatron(16)),
        Layout("megatron 1x16, sequence parallel", "GPT-2", _megatron(16, sequence_parallel=True)),
        GRID_AWARE,
        GRID_PLAIN,
        Layout("megatron_2d 4x4", "GPT-2", {**_GRID, "scheme": "megatron_2d"}),
        Layout("megatron 1x4, dp 4", "GPT-2", _megatron(4, dp=4)),
        Layout("optimus 2x2, dp 4", "GPT-2", _optimus(2, 2, dp=4)),
        Layout("megatron 1x4, pp 4", "GPT-2", _megatron(4, pp=4, micro_batches=4)),
        Layout("megatron 1x8, dp 2", "GPT-2", _megatron(8, dp=2)),
        Layout("dp 16", "GPT-2", {"dp": 16}),
        Layout("fsdp 16", "GPT-2", {"dp": 16, "dp_mode": "fsdp"}),
    ),
    OVERALL: (
        Layout("megatron 1x8", "T5", _megatron(8)),
        Layout("megatron 1x2, dp 4", "T5", _megatron(2, dp=4)),
        Layout("optimus 2x2, dp 2", "T5", _optimus(2, 2, dp=2)),
        Layout("subgraph, 2 branches, dp 4", "T5", _sub_graph(2, 4)),
        Layout("dp 8", "T5", {"dp": 8}),
        Layout("megatron 1x8", "GPT-2", _megatron(8)),
        Layout("optimus 2x4", "GPT-2", _optimus(2, 4)),
        Layout("megatron 1x2, pp 4", "GPT-2", _megatron(2, pp=4, micro_batches=4)),
        *BUBBLES.values(),
    ),
    SMALL: (
        Layout("megatron 1x4", "Transformer", _megatron(4)),
        Layout("megatron 1x2, dp 2", "Transformer", _megatron(2, dp=2)),
        Layout("optimus 2x2", "Transformer", _optimus(2, 2)),
        Layout("subgraph, 4 branches", "Transformer", _sub_graph(4)),
        Layout("subgraph, 2 branches, dp 2", "Transformer", _sub_graph(2, 2)),
        Layout("dp 4", "Transformer", {"dp": 4}),
    ),
    WIDE: (*_STEMS, sub_graphs("T5", 16)["4-way D&SP"], contiguous("T5", 16)),
    TWO_NODES: (
        *(one for model in BRANCHED for one in sub_graphs(model, 8).values()),
        *(contiguous(model, 8) for model in BRANCHED),
        *SWEEP.values(),
        WHOLE,
        SLICED,
    ),
    ONE_NODE: tuple(one for model in BRANCHED for one in sub_graphs(model, 4).values()),
    RACKS: (*RACK_GRIDS.values(), sub_graphs("T5", 16)["4-way D&SP"], contiguous("T5", 16)),
}
QUICK: dict[Machine, tuple[Layout, ...]] = {
    Machine(2, 1, 200): (
        Layout("megatron 1x2", "GPT-2", _megatron(2), forward_too=True),
        Layout("dp 2", "GPT-2", {"dp": 2}),
    )
}
