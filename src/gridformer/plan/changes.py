"""The single changes of a layout that advice compares: settings, batches, and axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.registry import SPECS, spec_of
from gridformer.parallel.scheme import LayoutAxis
from gridformer.plan.settings import changed, neighbors

AXES: tuple[LayoutAxis, ...] = ("rows", "cols", "branches")
# What an arrangement is made of, besides the scheme; see `SchemeSpec.arrangements`.
_ARRANGED = (*AXES, "sequence_parallel", "common", "dp", "pp")


def single_changes(run: RunConfig) -> Iterator[tuple[Mapping[str, Any], RunConfig]]:
    """Yields valid runs that differ in one thing, with the change.

    That is a setting, a larger batch, or devices that are moved between two axes. All of them are
    on arrangements that a search tries, too.
    """
    yield from neighbors(run)
    batch = run.train.global_batch * 2
    for settings in (
        {"train.global_batch": batch},
        {"train.global_batch": batch, "layout.micro_batches": run.layout.micro_batches * 2},
    ):
        other = changed(run, settings)
        if other is not None:
            yield settings, other
    axes = (*spec_of(run.layout).axes, "dp", "pp")
    for more in axes:
        for less in axes:
            size = getattr(run.layout, less)
            if more == less or size % 2:
                continue
            moved = _moved(run.layout, more, less)
            other = changed(run, moved)
            if other is not None and _searched(other.layout):
                yield moved, other


def arrangement(layout: LayoutConfig) -> tuple[Any, ...]:
    """Returns how a layout arranges the devices; two layouts may have the same arrangement."""
    return (layout.scheme, *(getattr(layout, key) for key in _ARRANGED))


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
        moved |= {"layout.dp_mode": "replicate", "layout.reshard": "layer"}
    if sizes["pp"] == 1:
        moved["layout.stages_per_rank"] = 1
    same = layout.model_dump()
    return {key: v for key, v in moved.items() if same[key.removeprefix("layout.")] != v}


def _searched(layout: LayoutConfig) -> bool:
    """Whether a search tries this arrangement of the devices."""
    grid = layout.n_processes // (layout.dp * layout.pp)
    return any(
        all(getattr(layout, key) == value for key, value in one.items())
        for one in SPECS[layout.scheme].arrangements(grid)
    )
