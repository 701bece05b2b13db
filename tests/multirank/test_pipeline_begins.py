"""What a rank of a pipeline does while it waits for its first micro-batch."""

from __future__ import annotations

import pytest

from gridformer.comm import record_messages
from gridformer.models.blocks import copy_of
from gridformer.parallel.pipeline import Event
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import SINGLE, Layout, read_of, settings_of


def gathers_before_the_first_input(layout: Layout) -> list[int]:
    """Return how many gathers of a later stage have started when its first input is there."""
    built, axes, stepper = settings_of(layout, 4)
    gathers: list[int] = []
    with record_messages() as recorder:

        def note(event: Event) -> None:
            if event.kind == "recv":
                gathers.append(recorder.count("parameters").total())

        stepper.passes.on_action = note
        stepper(0, read_of(built, 0))
    return gathers[:1] if axes.pp.index else []


@pytest.mark.parametrize(("reshard", "layers"), [("step", 2), ("layer", 1)])
def test_stages_gather_while_they_wait_for_their_first_input(
    pool: WorkerPool, reshard: str, layers: int
) -> None:
    """They have nothing else to do then; afterwards each gather would delay all later stages."""
    layout = {**SINGLE, "dp_mode": "fsdp", "reshard": reshard, "pp": 2, "micro_batches": 2}
    found = pool.run(4, gathers_before_the_first_input, layout)
    assert sorted(found) == [[], [], [1 + layers], [1 + layers]]  # 1 for all outside layers


def casts_before_the_first_input(layout: Layout) -> tuple[int, int]:
    """Return how many weights of a later stage are cast when its first input is there, and all."""
    built, axes, stepper = settings_of(layout, 4, "bfloat16", vocab_size=97)
    copies = [copy for p in built.parameters() if (copy := copy_of(p)) is not None]
    made: list[int] = []

    def note(event: Event) -> None:
        if event.kind == "recv":
            made.append(sum(copy.value is not None for copy in copies))

    stepper.passes.on_action = note
    stepper(0, read_of(built, 0))
    return (made[0], len(copies)) if axes.pp.index else (0, 0)


CASES: list[Layout] = [
    {"scheme": "single", "pp": 2, "micro_batches": 2},
    {"scheme": "subgraph", "branches": 2, "pp": 2, "micro_batches": 2},
]


@pytest.mark.parametrize("layout", full_unless(lambda one: one is CASES[0], CASES))
def test_stages_cast_weights_while_they_wait_for_their_first_input(
    pool: WorkerPool, layout: Layout
) -> None:
    found = pool.run(2 * layout.get("branches", 1), casts_before_the_first_input, layout)
    later = [one for one in found if one != (0, 0)]
    assert len(later) == len(found) // 2
    for made, copies in later:
        assert made == copies > 8
