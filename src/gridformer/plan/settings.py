"""The single changes of a layout: its settings, which a search tries, its batch, and its axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import LayoutAxis
from gridformer.parallel.validation import violations, with_rows_over

STAGES_PER_RANK = (1, 2, 3, 4, 6, 8, 12)
AXES: tuple[LayoutAxis, ...] = ("rows", "cols", "branches")
# What an arrangement consists of besides the scheme, as `SchemeSpec.arrangements` yields it.
_ARRANGED = (*AXES, "sequence_parallel", "stationary", "common", "dp", "pp")
Settings = Mapping[str, Any]  # values by dotted key, such as `layout.pp`
# Keys that mean something only where replicas shard.
_UNSHARDED = {"layout.reshard": "layer", "layout.shard_over": 0, "layout.gradient_sync": "step"}


def changed(run: RunConfig, changes: Settings) -> RunConfig | None:
    """Returns the run with some values changed, or None if that is not valid."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    # Values of one key at a time are valid by themselves, so nothing is validated but the rules.
    other = run.model_copy(
        update={
            name: getattr(run, name).model_copy(update=values) for name, values in sections.items()
        }
    )
    return None if violations(other) else with_rows_over(other)


def neighbors(run: RunConfig) -> Iterator[tuple[Settings, RunConfig]]:
    """Yields valid runs that differ in one setting, with the change."""
    for changes in _setting_changes(run):
        other = changed(run, changes)
        if other is not None and other != run:
            yield changes, other


def _setting_changes(run: RunConfig) -> Iterator[Settings]:
    layout, spec = run.layout, spec_of(run.layout)
    sizes = divisors(run.train.global_batch // spec.batch_parts(layout))
    here = sizes.index(layout.micro_batches) if layout.micro_batches in sizes else 0
    for index in (here - 2, here - 1, here + 1, here + 2):
        if 0 <= index < len(sizes):
            yield {"layout.micro_batches": sizes[index]}
    compiled = run.train.compile is True  # where the result of attention is not kept
    for recompute in ("none", "selective", "full", "except_attention")[: 3 if compiled else 4]:
        yield {"train.recompute": recompute, "train.recompute_layers": 0}
    if k := run.train.recompute_layers:
        yield {"train.recompute_layers": k + -(-k // 4)}
    if spec.replicas(layout) > 1:
        for mode in ("replicate", "zero1", "fsdp"):
            yield {"layout.dp_mode": mode, **_UNSHARDED}
        yield {"layout.dp_mode": "fsdp", "layout.reshard": "step"}
        if layout.dp_mode != "replicate" and layout.micro_batches > 1:
            sync = "step" if layout.gradient_sync == "micro_batch" else "micro_batch"
            yield {"layout.gradient_sync": sync}
        # Gathers may stay inside a node.
        inside = layout.devices_per_node // (layout.n_processes // layout.dp // layout.pp)
        if layout.dp_mode == "fsdp" and 1 < inside < layout.dp and not layout.shard_over:
            yield {"layout.shard_over": inside}
        elif layout.shard_over:
            yield {"layout.shard_over": 0}
        if layout.dp_mode != "fsdp" and run.train.recompute == "full":
            # Neither of the two may fit by itself.
            plain = {"train.recompute": "selective", "train.recompute_layers": 0}
            yield {"layout.dp_mode": "fsdp", **plain}
    if (
        layout.rows > 1 == layout.sequence_rows
        and "rows_over" in spec.keys_of(layout)
        and here + 1 == len(sizes)
    ):
        # Rows that divide each sequence need no more than one of them in a micro-batch.
        every = divisors(run.train.global_batch // layout.dp)
        for m in [m for m in every if m > layout.micro_batches][:1]:
            yield {"layout.rows_over": "sequence", "layout.micro_batches": m}
    if layout.pp > 1:
        plain = {"layout.pipeline": "auto"} if layout.splits_backward else {}
        yield from ({"layout.stages_per_rank": k, **plain} for k in STAGES_PER_RANK)
        yield {"layout.stages_per_rank": 1, "layout.pipeline": "zb_h1"}
        yield {"layout.stages_per_rank": 2, "layout.pipeline": "zbv"}
    if layout.n_processes > 1 and layout.devices_per_node and spec.node_blocks:
        yield {"layout.devices_per_node": 0, "layout.nodes_per_rack": 0}
    if "order" in spec.keys:
        yield from ({"layout.order": order} for order in ("topology", "contiguous"))


def modes(layout: LayoutConfig) -> list[dict[str, Any]]:
    """Returns the modes of replicas; each takes less memory than the one before it."""
    replicated = spec_of(layout).replicas(layout) > 1
    return [{"layout.dp_mode": m} for m in ("replicate", "zero1", "fsdp")[: 3 if replicated else 1]]


def micro_batches(run: RunConfig) -> list[int]:
    """Returns a few numbers of micro-batches, the smallest first."""
    layout = run.layout
    sizes = divisors(run.train.global_batch // spec_of(layout).batch_parts(layout))
    if layout.pp > 1:
        enough = [m for m in sizes if m >= 2 * layout.pp] or sizes[-1:]
        return list(dict.fromkeys((enough[0], sizes[-1])))
    return list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def single_changes(run: RunConfig) -> Iterator[tuple[Settings, RunConfig]]:
    """Yields valid runs that differ in one thing, with the change.

    That is a setting, a larger batch, or devices that are moved between two axes. All of them are
    on arrangements that a search tries, too.
    """
    yield from neighbors(run)
    layout, batch = run.layout, {"train.global_batch": run.train.global_batch * 2}
    for settings in batch, batch | {"layout.micro_batches": layout.micro_batches * 2}:
        other = changed(run, settings)
        if other is not None:
            yield settings, other
    for more, less in permutations((*spec_of(layout).axes, "dp", "pp"), 2):
        if getattr(layout, less) % 2 == 0:
            moved = _moved(layout, more, less)
            other = changed(run, moved)
            if other is not None and _searched(other.layout):
                yield moved, other


def arrangement(layout: LayoutConfig) -> tuple[Any, ...]:
    """Returns how a layout arranges the devices; two layouts may have the same arrangement."""
    return (layout.scheme, layout.sequence_rows, *(getattr(layout, key) for key in _ARRANGED))


def _moved(layout: LayoutConfig, more: str, less: str) -> dict[str, Any]:
    """Returns the settings that make one axis twice as long and another half as long."""
    sizes = {axis: getattr(layout, axis) for axis in (*AXES, "dp", "pp")}
    sizes[more] *= 2
    sizes[less] //= 2
    moved = {f"layout.{more}": sizes[more], f"layout.{less}": sizes[less]}
    plain = LayoutConfig()
    if spec_of(layout) is not spec_of(plain) and all(sizes[axis] == 1 for axis in AXES):
        # One device has no grid: it is `single`, and keys of the scheme mean nothing to it.
        moved |= {
            f"layout.{key}": getattr(plain, key)
            for key in ("scheme", *spec_of(layout).keys)
            if getattr(layout, key) != getattr(plain, key)
        }
    if sizes["dp"] == 1 and layout.dp_mode != "replicate":
        moved |= {"layout.dp_mode": "replicate", **_UNSHARDED}
    if sizes["pp"] == 1:
        moved |= {"layout.stages_per_rank": 1, "layout.pipeline": "auto"}
    same = layout.model_dump()
    return {key: v for key, v in moved.items() if same[key.removeprefix("layout.")] != v}


def _searched(layout: LayoutConfig) -> bool:
    """Whether a search tries this arrangement of the devices."""
    grid = layout.n_processes // (layout.dp * layout.pp)
    return any(
        all(getattr(layout, key) == value for key, value in one.items())
        for one in spec_of(layout).arrangements(grid)
    )
