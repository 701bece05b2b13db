"""Layouts for multi-rank tests, written as in a run file, and their names."""

from typing import Any

from gridformer.config import LayoutConfig

Layout = dict[str, Any]

GRIDS: list[Layout] = [
    {"scheme": "single"},
    {"scheme": "megatron", "cols": 2},
    {"scheme": "megatron", "cols": 4},
    {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    {"scheme": "megatron_2d", "rows": 3, "cols": 2},
    {"scheme": "megatron_2d", "rows": 4, "cols": 1},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 1, "cols": 4},
    {"scheme": "optimus", "rows": 4, "cols": 1},
    {"scheme": "optimus", "rows": 2, "cols": 3},
    {"scheme": "optimus", "rows": 3, "cols": 3},
]


def n_of(layout: Layout) -> int:
    return LayoutConfig(**layout).n_processes


def name_of(layout: Layout) -> str:
    sequence = "-sp" if layout.get("sequence_parallel") else ""
    grid = f"{layout.get('rows', 1)}x{layout.get('cols', 1)}"
    kept = f"keep_{layout['keep_gathered']}" if "keep_gathered" in layout else ""
    stays = f"{layout['stationary']}_stays" if "stationary" in layout else ""
    branches = f"-{layout['branches']}_branches" if "branches" in layout else ""
    how = "".join(f"-{word}" for word in (layout.get("schedule", ""), stays, kept) if word)
    return f"{layout['scheme']}{sequence}-{grid}-dp{layout.get('dp', 1)}{how}{branches}"


# Every kind of SUPER section, with common layers everywhere or on the first sub-grid.
KINDS: list[Layout] = [
    {"common": common, "attention": attention, "feed_forward": feed_forward}
    for common in ("all", "first")
    for attention in ("inside", "outside")
    for feed_forward in ("branched", "common")
]


def subgraph(branches: int, dp: int = 1, **how: Any) -> Layout:
    return {"scheme": "subgraph", "branches": branches, "dp": dp, **how}


def short(case: Any) -> str:
    """Return a short name, such as `4x2-first-outside` or `micro_batches_3`."""
    if not isinstance(case, dict):
        return str(case)
    if "scheme" not in case:
        return "-".join(f"{name}_{value}" for name, value in case.items())
    words = [value for name, value in case.items() if name not in ("scheme", "branches", "dp")]
    return "-".join(map(str, [f"{case['branches']}x{case['dp']}", *words]))


def in_branches(name: str, layout: Layout) -> bool:
    """Return whether branches shard a parameter; biases that close a section are common."""
    parts: tuple[str, ...] = ()
    if layout.get("attention", "inside") == "inside":
        parts += ("attention.qkv.", "attention.out.weight")
    if layout.get("feed_forward", "branched") == "branched":
        parts += ("mlp.up.", "mlp.down.weight")
    return any(part in name for part in parts)
