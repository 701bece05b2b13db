"""What is traced once and repeated is what would have been traced, event by event."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.comm.p2p import P2PChannel
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.stage_io import StageIO
from gridformer.parallel.validation import check_layout
from gridformer.plan.fewer_rounds import without_rounds
from gridformer.trace import Start, alike, chunks, trace_rank
from gridformer.trace.events import Kernel, Read
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run
from tests.support.traces import MEGATRON, OPTIMUS, Single, numbered, run_of, without_modules

IN_BACKWARD = {"update": "in_backward", "clip_by": "layer", "recompute": "full"}
# A layout, training settings, and ranks whose stages have equal layers.
CASES: list[tuple[dict[str, Any], dict[str, Any], list[int]]] = [
    ({**MEGATRON, "pp": 6, "micro_batches": 9}, {}, [2, 4, 6, 8]),
    ({**OPTIMUS, "pp": 4, "micro_batches": 8, "dp": 2}, {"recompute": "full"}, [4, 8]),
    ({"pp": 4, "micro_batches": 6}, {}, [1, 2]),
    ({**OPTIMUS, "cols": 2, "schedule": "pipelined", "pp": 4, "micro_batches": 8}, {}, [5, 9]),
    ({**OPTIMUS, "scheme": "megatron_2d", "pp": 4, "micro_batches": 8}, {}, [2, 4]),
    ({"pp": 4, "micro_batches": 8, "dp": 2, "dp_mode": "fsdp"}, {}, [2, 4]),
    ({"pp": 4, "micro_batches": 8, "dp": 2, "dp_mode": "zero1"}, {}, [3, 5]),
    ({"pp": 4, "micro_batches": 9, "pipeline": "gpipe"}, {"dtype": "bfloat16"}, [1, 2]),
    ({**MEGATRON, "pp": 4, "micro_batches": 12, "stages_per_rank": 2}, {}, [2, 4]),
    # Ranks with several stages that are equal, of which one is run.
    (
        {**MEGATRON, "pp": 4, "micro_batches": 8, "stages_per_rank": 3, "dp": 2},
        {"dtype": "bfloat16"},
        [4, 8],
    ),
    (
        {"pp": 4, "micro_batches": 8, "stages_per_rank": 3, "dp": 2, "dp_mode": "fsdp"},
        {"dtype": "bfloat16", "recompute": "full"},
        [2, 4],
    ),
    (
        {"pp": 4, "micro_batches": 4, "stages_per_rank": 3, "dp": 2, "dp_mode": "zero1"},
        {},
        [2, 4],
    ),
    # A single micro-batch is the first and the last one.
    (
        {**MEGATRON, "pp": 4, "micro_batches": 1, "stages_per_rank": 3, "dp": 2},
        {"dtype": "bfloat16"},
        [4, 8],
    ),
    (
        {"pp": 4, "micro_batches": 1, "stages_per_rank": 3, "dp": 2, "dp_mode": "fsdp"},
        {"dtype": "bfloat16", "recompute": "full"},
        [2, 4],
    ),
    (
        {"pp": 4, "micro_batches": 1, "stages_per_rank": 3, "dp": 2, "dp_mode": "zero1"},
        {},
        [2, 4],
    ),
    (
        {**OPTIMUS, "cols": 2, "pp": 4, "micro_batches": 1, "stages_per_rank": 2},
        {"recompute": "selective"},
        [4, 8],
    ),
    (
        {**MEGATRON, "sequence_parallel": True, "pp": 4, "micro_batches": 8},
        {**IN_BACKWARD},
        [3, 5],
    ),
    (
        {"scheme": "subgraph", "branches": 2, "common": "first", "pp": 4, "micro_batches": 8},
        {},
        [3, 5],
    ),
]
QUICK = CASES[2]


def compared(
    run: RunConfig, ranks: list[int], kernels: bool
) -> list[tuple[list[Single], list[Single]]]:
    """Return the events of ranks, traced one by one, and those that follow from the first rank."""
    torch.set_num_threads(1)
    decisions = decide_run(run)
    with patch.object(alike, "play", wraps=alike.play) as play:
        repeated = alike.trace_alike(run, ranks, decisions, kernels)
    assert play.call_count == 1, "only the first rank is run"
    whole = [trace_rank(run, rank, decisions, kernels=kernels) for rank in ranks]
    return [(numbered(one), numbered(other)) for one, other in zip(whole, repeated)]


@pytest.mark.parametrize("kernels", [False, pytest.param(True, id="with kernels")])
@pytest.mark.parametrize("case", full_unless(lambda case: case is QUICK, CASES), ids=str)
def test_repeated_passes_are_those_that_are_run(gpu: InProcess, case: Any, kernels: bool) -> None:
    layout, train, ranks = case
    for whole, repeated in gpu(compared, run_of(layout, train), ranks, kernels):
        assert without_modules(whole) == without_modules(repeated)


def evaluated(run: RunConfig, ranks: list[int]) -> list[tuple[list[Single], list[Single]]]:
    """Return what `compared` does, for the forward passes of a batch."""
    torch.set_num_threads(1)
    decisions = decide_run(run)
    with patch.object(alike, "play", wraps=alike.play) as play:
        (repeated,) = alike.trace_runs([run], ranks, decisions, True, training=False)
    assert play.call_count == 1, "only the first rank is run"
    whole = [trace_rank(run, rank, decisions, kernels=True, training=False) for rank in ranks]
    return [
        (without_modules(numbered(one)), without_modules(numbered(other)))
        for one, other in zip(whole, repeated)
    ]


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case in (QUICK, CASES[9]), CASES), ids=str
)
def test_forward_passes_of_an_evaluation_are_repeated(gpu: InProcess, case: Any) -> None:
    layout, train, ranks = case
    for whole, repeated in gpu(evaluated, run_of(layout, train), ranks):
        assert without_counts(whole) == without_counts(repeated)


def test_the_last_stage_of_an_evaluation_repeats_chunks_of_the_loss(gpu: InProcess) -> None:
    run = run_of({"pp": 2, "micro_batches": 4}, {"loss_chunk_tokens": 4}, max_seq_len=16)
    ((whole, repeated),) = gpu(evaluated, run, [1])
    assert without_counts(whole) == without_counts(repeated)
    again = gpu(chunks_repeated, run)
    assert again > 1, "there are equal chunks"


def chunks_repeated(run: RunConfig) -> int:
    """Return how often the last rank repeats a chunk in an evaluation."""
    torch.set_num_threads(1)
    with patch.object(chunks, "_again", wraps=chunks._again) as again:
        alike.trace_runs([run], [1], decide_run(run), True, training=False)
    return again.call_count


def passes_run(run: RunConfig, rank: int) -> list[tuple[str, int, int]]:
    """Return the passes of a rank that run: their direction, stage and micro-batch."""
    torch.set_num_threads(1)
    found: list[tuple[str, int, int]] = []

    def noting(real: Any) -> Any:
        def run_pass(executor: Executor, action: Any, *more: Any) -> Any:
            found.append(tuple(action))
            return real(executor, action, *more)

        return run_pass

    with (
        patch.object(Executor, "forward", noting(Executor.forward)),
        patch.object(Executor, "backward", noting(Executor.backward)),
    ):
        alike.trace_alike(run, [rank], decide_run(run), kernels=True)
    return found


def test_of_equal_stages_and_micro_batches_few_are_run(gpu: InProcess) -> None:
    """The second rank has stages 1, 4 and 7, which have two layers each."""
    run = run_of({"pp": 3, "micro_batches": 9, "stages_per_rank": 3, "dp": 2}, {})
    found = sorted(gpu(passes_run, run, 2))
    both = [(7, 0), (7, 1)]
    assert found == [
        *(("backward", *one) for one in both),
        *(("forward", *one) for one in [(1, 0), (1, 1), *both]),
    ]


def test_of_equal_stages_with_a_single_micro_batch_few_are_run(gpu: InProcess) -> None:
    """The first one runs forward, and the last one both ways; their sums begin all the same."""
    run = run_of({"pp": 3, "micro_batches": 1, "stages_per_rank": 3, "dp": 2}, {})
    found = sorted(gpu(passes_run, run, 2))
    assert found == [("backward", 7, 0), ("forward", 1, 0), ("forward", 7, 0)]


def calls(run: RunConfig, owner: type, name: str, ranks: list[int]) -> list[int]:
    """Return how often a method of messages runs for the first rank, and for all."""
    torch.set_num_threads(1)
    found, real = [], getattr(owner, name)
    for some in (ranks[:1], ranks):
        with patch.object(owner, name, autospec=True, side_effect=real) as method:
            alike.trace_alike(run, some, decide_run(run), kernels=True)
        found.append(method.call_count)
    return found


def test_equal_messages_of_passes_that_are_not_run_are_sent_once(gpu: InProcess) -> None:
    run = run_of({"pp": 5, "micro_batches": 8}, {})
    one, three = gpu(calls, run, P2PChannel, "send", [1, 2, 3])
    assert one == 4 + 2, "the rank that is run sends two micro-batches, and one for the others"
    assert three - one == 4, "each other rank sends one of either kind"


def test_slices_are_gathered_once_on_each_rank(gpu: InProcess) -> None:
    """Activations and gradients have equal shapes, so one gather shows what all of them do."""
    run = run_of({**MEGATRON, "pp": 5, "micro_batches": 8}, {})
    one, three = gpu(calls, run, StageIO, "fill", [2, 4, 6])
    assert (one, three) == (1, 3)


def with_fewer(run: RunConfig, ranks: list[int]) -> list[tuple[list[Single], list[Single]]]:
    """Return the events of ranks with fewer micro-batches, traced alone and after all of them."""
    torch.set_num_threads(1)
    decisions, fewer = decide_run(run), without_rounds(run, 1)
    with patch.object(alike, "play", wraps=alike.play) as play:
        _, repeated = alike.trace_runs([run, fewer], ranks, decisions, kernels=True)
    assert play.call_count == 1, "passes are recorded once for all"
    whole = [trace_rank(fewer, rank, decisions, kernels=True) for rank in ranks]
    return [
        (without_modules(numbered(one)), without_modules(numbered(other)))
        for one, other in zip(whole, repeated)
    ]


# With three rounds of micro-batches, so that those with two have the same passes. In bfloat16 FSDP
# casts eight small parts once more before the passes of a model's second step.
FEWER: list[tuple[dict[str, Any], dict[str, Any], list[int]]] = [
    ({**layout, "micro_batches": 3 * layout["pp"]}, train, ranks)
    for layout, train, ranks in CASES
    if layout.get("dp_mode") != "fsdp" or "dtype" not in train
]


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case in (FEWER[2], FEWER[5]), FEWER), ids=str
)
def test_a_step_with_fewer_micro_batches_has_the_same_passes(gpu: InProcess, case: Any) -> None:
    layout, train, ranks = case
    for whole, repeated in gpu(with_fewer, run_of(layout, train), ranks):
        assert without_counts(whole) == without_counts(repeated)


def test_the_stamps_of_dropout_are_copied_before_the_first_pass_of_a_micro_batch(
    gpu: InProcess,
) -> None:
    layout = {"pp": 4, "micro_batches": 12, "stages_per_rank": 2}
    run = run_of(layout, {}, dropout=0.1)
    for whole, repeated in gpu(compared, run, [1, 2], True):
        copies = [event for event in whole if isinstance(event, Kernel) and event.kind == "copy"]
        assert len(copies) >= 12
        assert without_modules(whole) == without_modules(repeated)
    for whole, repeated in gpu(with_fewer, run, [1, 2]):
        assert without_counts(whole) == without_counts(repeated)


def test_a_pass_waits_for_what_the_last_one_has_gathered_in_advance(gpu: InProcess) -> None:
    """The last pass of each kind has begun to gather the first weights of the next one."""
    layout = {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2, "micro_batches": 12}
    run = run_of({**layout, "dp": 2, "dp_mode": "zero1"}, {}, family="bert")
    ((whole, repeated),) = gpu(compared, run, [8], True)
    assert any(event.label == "product" for event in whole if isinstance(event, Start))
    assert without_modules(whole) == without_modules(repeated)
    ((whole, repeated),) = gpu(with_fewer, run, [8])
    assert without_counts(whole) == without_counts(repeated)


def without_counts(events: list[Single]) -> list[Single]:
    """Return the events without how many products were launched before the host reads."""
    return [event._replace(products=0) if isinstance(event, Read) else event for event in events]


def of_chunks(layout: dict[str, Any], tokens: int) -> tuple[list[Single], list[Single], int]:
    """Return the events of the last rank, traced as a whole and with equal chunks once."""
    torch.set_num_threads(1)
    model = {"n_layers": 2 * layout.get("pp", 1), "max_seq_len": 16}
    n_rows = 2 * layout.get("dp", 1)
    run = a_run(layout, model, {"global_batch": n_rows, "loss_chunk_tokens": tokens})
    check_layout(run)
    rank = run.layout.n_processes - 1
    found = [trace_rank(run, rank, repeat=once, kernels=True) for once in (False, True)]
    ran = [0]
    real = chunks._again

    def counted(*args: Any) -> Any:
        ran[0] += 1
        return real(*args)

    with patch.object(chunks, "_again", counted):
        trace_rank(run, rank, repeat=True, kernels=True)
    return numbered(found[0]), numbered(found[1]), ran[0]


@pytest.mark.parametrize(
    "layout",
    [{"scheme": "megatron", "cols": 2, "sequence_parallel": True}]
    + [
        pytest.param(layout, marks=pytest.mark.full)
        for layout in ({"pp": 2}, {"scheme": "optimus", "rows": 2, "cols": 2}, {"dp": 2})
    ],
)
def test_equal_chunks_of_the_loss_are_those_that_are_run(gpu: InProcess, layout: Any) -> None:
    whole, repeated, n_repeated = gpu(of_chunks, layout, 4)
    assert n_repeated, "there are equal chunks"
    assert whole == repeated
