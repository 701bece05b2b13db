"""Small runs whose traces are compared, and their events in a form in which they can be."""

from __future__ import annotations

from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.validation import check_layout
from gridformer.record import Start, Trace, Wait
from gridformer.record.events import Kernel, Read
from tests.support.multirank.memory import a_run

MEGATRON = {"scheme": "megatron", "cols": 2}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 1}
Single = Start | Wait | Kernel | Read


def run_of(layout: dict[str, Any], train: dict[str, Any], **model: Any) -> RunConfig:
    n_rows = layout["micro_batches"] * layout.get("dp", 1) * layout.get("rows", 1) * 2
    n_layers = 2 * layout["pp"] * layout.get("stages_per_rank", 1)
    model = {"n_layers": n_layers, "max_seq_len": 8, **model}
    run = a_run(layout, model, {"global_batch": n_rows, "loss_chunk_tokens": 0, **train})
    check_layout(run)
    return run


def numbered(trace: Trace) -> list[Single]:
    """Return the events with messages numbered in their order."""
    assert trace.complete, trace.troubles
    numbers: dict[int, int] = {}
    for event in trace.unfolded():
        if isinstance(event, Start):
            numbers[event.number] = len(numbers)
    return [
        event._replace(number=numbers[event.number]) if isinstance(event, Start | Wait) else event
        for event in trace.unfolded()
    ]


def comparable(trace: Trace) -> list[Single]:
    """Return the events without names of modules and groups."""
    purposes = {member.name: member.purpose for member in trace.own}

    def plain(event: Single) -> Single:
        if isinstance(event, Start):
            return event._replace(group=purposes.get(event.group, event.group.partition(" [")[0]))
        return event

    return without_modules([plain(event) for event in numbered(trace)])


def without_modules(events: list[Single]) -> list[Single]:
    """Return the events without the names of modules, whose layers have other numbers elsewhere."""
    return [event._replace(place=event.place._replace(module="")) for event in events]
