"""Large runs: which ranks stand for all, and what is found although few are traced."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gridformer import comm
from gridformer.check import Report, check_step, simulate
from gridformer.check.report import sample_ranks
from gridformer.comm import Pending, collectives
from gridformer.mesh import Axis
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.pipeline import stages_of
from gridformer.record import Part, Place, Start, Wait
from gridformer.record.itineraries import alike_stages
from tests.support.fake_gpu import InProcess
from tests.support.large import gpt_175b
from tests.support.multirank.memory import a_run

HERE = Place("a.py", 1, "f")


def test_few_of_4096_ranks_stand_for_all() -> None:
    run = gpt_175b()
    first, middle, last, *others = sample_ranks(run, decide_run(run))
    assert [first, middle, last] == [[0], [256 * stage for stage in range(1, 15)], [3840]]
    assert others[:3] == [[7], [56], [192]], "last along col, row and dp on the first stage"
    assert others[3:] == [[3847], [3896], [4032]]


def test_a_stage_before_the_last_reader_of_memory_is_not_like_others() -> None:
    """The head alone is the last stage. So the stage before it sends no encoder's output on."""
    model = {"family": "t5", "n_layers": 3, "n_decoder_layers": 4, "vocab_size": 4096}
    run = a_run({"pp": 8, "micro_batches": 8}, model, {"loss_chunk_tokens": 0})
    decisions = decide_run(run)
    stages = stages_of(run.model, 8, decisions.choices.work)
    assert [[*stage] for stage in stages[-3:]] == [[7], [8], [9]], "a layer, a layer, the head"
    assert alike_stages(run, decisions) == [[0], [1, 2], [3], [4, 5], [6], [7]]


def test_up_to_16_ranks_are_traced_one_by_one() -> None:
    run = a_run({"scheme": "megatron", "cols": 2, "pp": 2}, {}, {"global_batch": 2})
    assert sample_ranks(run, decide_run(run)) == [[0], [1], [2], [3]]


def test_ranks_that_are_not_traced_are_left_out() -> None:
    ranks, sizes = (0, 1, 2, 3), ((0, 1, 2, 3), (0, 5, 6, 7))
    parts = tuple(Part(what, peer, 2, "float32") for what in ("send", "recv") for peer in (1, 3))
    calls = [
        Start(0, "all_reduce", "g", ranks, HERE, size=4),
        Start(1, "p2p", "g", ranks, HERE, parts=parts),
        Start(2, "all_to_all", "g", ranks, HERE, pieces=sizes),
    ]
    back = tuple(Part(what, 0, 2, "float32") for what in ("recv", "send"))
    for received, wrong in ((3, 0), (4, 1)):
        pieces = (7, 0, 0, 0), (received, 0, 0, 0)
        theirs = [calls[0], calls[1]._replace(parts=back), calls[2]._replace(pieces=pieces)]
        outcome = simulate({0: [*calls, Wait(2, HERE)], 3: theirs})
        assert outcome.ended == {0, 3}
        assert [one.different for one in outcome.mismatches] == [(3,)] * wrong


def checked(layout: dict[str, Any], wrong: int = -1) -> Report:
    """Check a small run as if it were a large one.

    Args:
        wrong: A rank that sends more than others in a collective over col.
    """
    run = a_run(layout, {"n_layers": 1, "max_seq_len": 8}, {"global_batch": 12})
    real = collectives.start_all_reduce

    def started(x: Tensor, axis: Axis, *rest: Any, **more: Any) -> Pending:
        if axis.name == "col" and torch.distributed.get_rank() == wrong:
            return Pending(real(torch.cat((x, x)), axis, *rest, **more).wait()[: len(x)])
        return real(x, axis, *rest, **more)

    with (
        patch.object(collectives, "start_all_reduce", started),
        patch.object(comm, "start_all_reduce", started),
    ):
        return check_step(run, most=1)


def test_a_sample_finds_what_its_last_rank_does(gpu: InProcess) -> None:
    layout = {"scheme": "megatron", "cols": 2, "dp": 3}
    right: Report = gpu(checked, layout)
    assert right.ok
    assert right.traced == [0, 1, 4]
    (problem,) = gpu(checked, layout, 1).problems
    assert (problem.kind, problem.ranks) == ("size", (0, 1))
