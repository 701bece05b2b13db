"""The settings of a layout that a search changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import violations

STAGES_PER_RANK = (1, 2, 3, 4, 6, 8, 12)


def neighbors(run: RunConfig) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yields valid runs that differ in one setting, with the change."""
    for changes in _single_changes(run):
        other = changed(run, changes)
        if other is not None and other != run:
            yield changes, other


def _single_changes(run: RunConfig) -> Iterator[dict[str, Any]]:
    layout = run.layout
    at_most = run.train.global_batch // spec_of(layout).batch_parts(layout)
    sizes = divisors(at_most)
    here = sizes.index(layout.micro_batches) if layout.micro_batches in sizes else 0
    for place in (here - 2, here - 1, here + 1, here + 2):
        if 0 <= place < len(sizes):
            yield {"layout.micro_batches": sizes[place]}
    for recompute in ("none", "selective", "full"):
        yield {"train.recompute": recompute}
    if spec_of(layout).replicas(layout) > 1:
        for mode in ("replicate", "zero1", "fsdp"):
            yield {"layout.dp_mode": mode, "layout.reshard": "layer"}
        yield {"layout.dp_mode": "fsdp", "layout.reshard": "step"}
        if layout.dp_mode != "fsdp" and run.train.recompute == "full":
            # Neither of the two may fit by itself.
            yield {"layout.dp_mode": "fsdp", "train.recompute": "selective"}
    if layout.pp > 1:
        for k in STAGES_PER_RANK:
            yield {"layout.stages_per_rank": k}
    spec = spec_of(layout)
    if layout.n_processes > 1 and layout.devices_per_node and spec.node_blocks:
        yield {"layout.devices_per_node": 0, "layout.nodes_per_rack": 0}
    if "order" in spec.keys:
        yield from ({"layout.order": order} for order in ("topology", "contiguous"))


def modes(layout: LayoutConfig) -> list[dict[str, Any]]:
    """Returns the modes of replicas; each takes less memory than the one before it."""
    modes = ["replicate"]
    if spec_of(layout).replicas(layout) > 1:
        modes += ["zero1", "fsdp"]
    return [{"layout.dp_mode": mode} for mode in modes]


def micro_batches(run: RunConfig) -> list[int]:
    """Returns a few numbers of micro-batches, the smallest first."""
    layout = run.layout
    sizes = divisors(run.train.global_batch // spec_of(layout).batch_parts(layout))
    if layout.pp > 1:
        enough = [m for m in sizes if m >= 2 * layout.pp] or sizes[-1:]
        return list(dict.fromkeys((enough[0], sizes[-1])))
    return list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def changed(run: RunConfig, changes: dict[str, Any]) -> RunConfig | None:
    """Returns the run with some values changed, or None if that is not valid.

    Args:
        run: The run, which is not changed.
        changes: Values by dotted key, such as `layout.pp`.
    """
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
    return None if violations(other) else other
