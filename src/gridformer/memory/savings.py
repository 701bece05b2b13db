"""The settings that save memory, in the order in which a run that does not fit tries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gridformer.config import RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import replica_work
from gridformer.parallel.fixes import Changes, with_changes
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import violations


def cheapest_first(run: RunConfig) -> Iterator[Changes]:
    """Yields settings that save memory, the least slowdown first, the mildest value first."""
    layout, train = run.layout, run.train
    if train.saves_meanwhile and not on_gpu(run):
        yield {"train.async_save": False}
    if train.loss_chunk_tokens == 0 or train.loss_chunk_tokens > 256:
        yield {"train.loss_chunk_tokens": 256}
    choices = decide(run.model, layout, replica_work(run))
    if choices.work.itemsize == 2 and choices.cast_once:
        yield {"train.cast": "use"}
    free, slower = spec_of(layout).savings(layout)
    yield from free
    if layout.dp > 1 and layout.dp_mode == "replicate":
        yield {"layout.dp_mode": "zero1"}
    if choices.reshard == "step":
        yield {"layout.reshard": "layer"}
    if train.recompute == "none":
        yield {"train.recompute": "selective"}
    if train.update == "after_backward" and layout.micro_batches == 1:
        by_layer = {"train.clip_by": "layer"} if train.clip_norm else {}
        yield {"train.update": "in_backward"} | by_layer
    for factor in (2, 4, 8, 16):
        yield {"layout.micro_batches": layout.micro_batches * factor}
    yield from slower
    if layout.dp > 1 and layout.dp_mode != "fsdp":
        yield {"layout.dp_mode": "fsdp"}
    if train.recompute != "full":
        yield {"train.recompute": "full"}
    if train.offload == "none" and on_gpu(run):
        yield {"train.offload": "optimizer"}


def smaller_batches(run: RunConfig) -> Iterator[Changes]:
    """Yields smaller global batches, the largest first."""
    batch = run.train.global_batch // 2
    while batch:
        yield {"train.global_batch": batch}
        batch //= 2


def valid_change(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with other values, or None if they make it invalid.

    Args:
        run: The run.
        changes: Values by dotted key, such as `layout.pp`.
    """
    other = with_changes(run, changes)
    return None if other is None or violations(other) else other
