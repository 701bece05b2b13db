"""A trace that is composed from a short step is that of the complete step, event by event."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run
from gridformer.record import Start, rank, trace_rank
from gridformer.record.events import Kernel
from gridformer.record.rank import RecordOptions, record_ranks
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.traces import MEGATRON, OPTIMUS, Single, comparable, run_of

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
    # Both neighbors of a rank are the same one.
    ({"pp": 2, "micro_batches": 6, "stages_per_rank": 3}, {}, [0]),
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
    run: RunConfig, ranks: list[int], kernels: bool = True, training: bool = True
) -> list[tuple[list[Single], list[Single]]]:
    """Return the events of ranks, each recorded completely, and those that are composed."""
    torch.set_num_threads(1)
    decisions = decide_run(run)
    how = RecordOptions("nccl", kernels, training=training, extent="all layers")
    with patch.object(rank, "record_step", wraps=rank.record_step) as record:
        composed = record_ranks(run, [ranks], decisions, how)
    assert record.call_count <= 1 + (len(ranks) > 1), "few ranks are recorded"
    found = []
    for each, one in zip(ranks, composed):
        whole = trace_rank(run, each, decisions, kernels, training=training)
        found.append((comparable(whole), comparable(one.trace)))
    return found


@pytest.mark.parametrize("kernels", [False, pytest.param(True, id="with kernels")])
@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case in (CASES[2], CASES[5], CASES[8], CASES[9]), CASES),
    ids=str,
)
def test_passes_are_put_in_the_order_of_each_rank(gpu: InProcess, case: Any, kernels: bool) -> None:
    layout, train, ranks = case
    for whole, composed in gpu(compared, run_of(layout, train), ranks, kernels):
        assert whole == composed


@pytest.mark.parametrize("case", full_unless(lambda case: case is QUICK, CASES), ids=str)
def test_forward_passes_of_an_evaluation(gpu: InProcess, case: Any) -> None:
    layout, train, ranks = case
    for whole, composed in gpu(compared, run_of(layout, train), ranks, True, False):
        assert whole == composed


WHOLE: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"pp": 1, "micro_batches": 7}, {"loss_chunk_tokens": 2}, {}),
    ({**MEGATRON, "sequence_parallel": True, "pp": 1, "micro_batches": 2}, {}, {}),
    (
        {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast", "pp": 1}
        | {"micro_batches": 5, "dp": 2},
        {"loss_chunk_tokens": 2},
        {"family": "bert"},
    ),
    (
        {"dp": 2, "dp_mode": "fsdp", "pp": 1, "micro_batches": 4},
        {"dtype": "bfloat16"},
        {"family": "llama"},
    ),
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_micro_batches_without_a_pipeline(gpu: InProcess, case: Any) -> None:
    layout, train, model = case
    run = run_of(layout, train, **{"n_layers": 2, "max_seq_len": 16, **model})
    for whole, composed in gpu(compared, run, [0]):
        assert whole == composed


def test_counters_of_dropout_are_copied_before_the_first_pass_of_a_micro_batch(
    gpu: InProcess,
) -> None:
    layout = {"pp": 4, "micro_batches": 12, "stages_per_rank": 2}
    found = gpu(compared, run_of(layout, {}, dropout=0.1), [1, 2])
    copies = [e for e in found[0][0] if isinstance(e, Kernel) and e.kind == "copy"]
    assert len(copies) >= 12
    for whole, composed in found:
        assert whole == composed


def test_a_pass_waits_for_what_the_last_one_has_gathered_in_advance(gpu: InProcess) -> None:
    """The last pass of each kind has begun to gather the first weights of the next one."""
    layout = {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2, "micro_batches": 12}
    run = run_of({**layout, "dp": 2, "dp_mode": "zero1"}, {}, family="bert")
    for whole, composed in gpu(compared, run, [8]):
        assert any(event.label == "product" for event in whole if isinstance(event, Start))
        assert whole == composed


def test_the_first_pass_of_a_stage_adds_to_gradients_of_shared_parameters(gpu: InProcess) -> None:
    """Stages of T5's decoder on one rank share a parameter."""
    layout = {"pp": 4, "micro_batches": 8, "stages_per_rank": 3}
    run = run_of(layout, {}, family="t5", n_layers=6, n_decoder_layers=18)
    for whole, composed in gpu(compared, run, [2]):
        assert whole == composed
