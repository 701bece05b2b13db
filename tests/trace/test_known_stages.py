"""Stages that one rank of a pipeline has run serve other ranks, event by event."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.pipeline import Executor
from gridformer.trace import trace_rank
from gridformer.trace.alike import trace_runs
from gridformer.trace.events import Member, Place, Start, Trace, Wait
from gridformer.trace.known_stages import KnownStage, KnownStages
from gridformer.trace.recorded_pass import RecordedPass
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.traces import MEGATRON, OPTIMUS, Single, numbered, run_of, without_modules

PIPELINE = {"pp": 4, "micro_batches": 8, "stages_per_rank": 2}
FSDP = {"dp": 2, "dp_mode": "fsdp"}
# A layout, training settings and the model.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({**PIPELINE}, {"dtype": "bfloat16"}, {"dropout": 0.1}),
    ({**MEGATRON, **PIPELINE, **FSDP}, {"recompute": "full"}, {"dropout": 0.1}),
    # All stages of the encoder share a table, whose gradient begins in the last one of a rank.
    ({**PIPELINE, "stages_per_rank": 3}, {}, {"family": "t5", "n_decoder_layers": 12}),
    ({**OPTIMUS, "cols": 2, **PIPELINE}, {}, {"family": "llama"}),
    ({"scheme": "subgraph", "branches": 2, **PIPELINE}, {}, {}),
    ({**PIPELINE, "dp": 2, "dp_mode": "zero1"}, {"recompute": "selective"}, {}),
    ({**PIPELINE, "dp": 2, "micro_batches": 1}, {"dtype": "bfloat16"}, {"dropout": 0.1}),
    ({**PIPELINE, "dp": 2, "dp_mode": "zero1", "micro_batches": 1}, {}, {"family": "llama"}),
]

Passes = list[tuple[str, int, int]]


def stages_run(run: RunConfig) -> tuple[list[tuple[list[Single], list[Single]]], list[Passes]]:
    """Return the events of each stage's rank, complete and with known stages, and which passes ran.

    The ranks in the middle come first, because the others have stages of their own besides.
    """
    torch.set_num_threads(1)
    decisions, layout = decide_run(run), run.layout
    size = layout.n_processes // layout.pp
    ranks = [size, 2 * size, 0, 3 * size]
    known, found = KnownStages(), []
    ran: list[Passes] = []

    def noting(executor: Executor, action: Any, *more: Any) -> Any:
        ran[-1].append(tuple(action))
        return real(executor, action, *more)

    real = Executor.forward
    for rank in ranks:
        whole = trace_rank(run, rank, decisions, kernels=True)
        ran.append([])
        with patch.object(Executor, "forward", noting):
            ((trace,),) = trace_runs([run], [rank], decisions, True, known=known)
        found.append((numbered(whole), numbered(trace)))
    return found, ran


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case in (CASES[0], CASES[2]), CASES), ids=str
)
def test_known_stages_do_what_they_would_have_done(gpu: InProcess, case: Any) -> None:
    layout, train, model = case
    found, ran = gpu(stages_run, run_of(layout, train, **model))
    for whole, known in found:
        assert without_modules(whole) == without_modules(known)
    assert len(ran[1]) < len(ran[0]), "the second rank has a stage that the first one has"


def test_only_stages_that_are_not_known_are_run(gpu: InProcess) -> None:
    """Only the first and the last stage of all differ from the other ones."""
    _, (first, second, begin, end) = gpu(stages_run, run_of(PIPELINE, {}))
    assert {stage for _, stage, _ in first} == {1, 5}, "forward on one, and backward on the other"
    assert second == []
    assert {stage for _, stage, _ in begin} == {0}
    assert {stage for _, stage, _ in end} == {7}


HERE = Place("here.py", 1, "f")
START, WAIT = Start(1, "all_reduce", "g", (0, 1), HERE), Wait(1, HERE)
FIRST = Trace(0, own=[Member("g", "dp", (0, 1))])
SECOND = Trace(2, own=[Member("h", "dp", (2, 3))])


def on_another_rank(*events: Any, there: Trace = SECOND) -> KnownStage | None:
    """Return what another rank knows of a stage with one pass, which does this."""
    known = KnownStages()
    known.add("stage", KnownStage(FIRST, {("forward", ""): RecordedPass(events)}, []))
    assert known.on("another stage", there) is None
    return known.on("stage", there)


def test_messages_of_a_known_stage_are_in_the_groups_of_the_other_rank() -> None:
    found = on_another_rank(START, WAIT)
    assert found is not None
    start, wait = found.passes["forward", ""].events
    assert isinstance(start, Start)
    assert isinstance(wait, Wait)
    assert (start.group, start.ranks, start.op) == ("h", (2, 3), "all_reduce")
    assert start.number == wait.number != 1, "the rank has a message 1 of its own"


def test_passes_that_wait_for_others_are_not_known() -> None:
    assert on_another_rank(WAIT) is None
    assert on_another_rank(START) is None


def test_a_stage_is_not_known_to_a_rank_without_its_group() -> None:
    assert on_another_rank(START, WAIT, there=Trace(2)) is None
