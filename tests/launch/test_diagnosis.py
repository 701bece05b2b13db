"""Why a run hangs, from what its ranks have told, without any processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gridformer.comm import progress, progress_file
from gridformer.comm.progress_file import (
    COLLECTIVE,
    RECEIVE,
    SEND,
    Lane,
    Message,
    State,
    WaitingMessage,
)
from gridformer.launch.hang import diagnose_hang
from gridformer.launch.hang_report import RankReport, Verdict, ranks_in_words, reports
from gridformer.mesh.axes import Axis

SUM = Message("all_reduce", "col", "leave", 64)


def lane(
    ranks: tuple[int, ...],
    started: int,
    kind: str = COLLECTIVE,
    peer: int = -1,
    what: Message = SUM,
) -> Lane:
    group = f"of {ranks}"
    return Lane(group, kind, peer, ranks, started, started, {started: what})


def rank(number: int, *lanes: Lane, waits: bool = False, **more: object) -> RankReport:
    """Return what is known of a rank, which may wait for the last message of its first lane."""
    wait = None
    if waits:
        first = lanes[0]
        wait = WaitingMessage(first, first.started, first.recent[first.started], 5.0)
    state = State(100 + number, 7, wait, lanes, 0.1, (), 0.1)
    return replace(RankReport(number, "answers", state), **more)  # type: ignore[arg-type]


def verdict(*ranks: RankReport, first: int = 0) -> Verdict:
    return diagnose_hang({seen.rank: seen for seen in ranks}, first)


def test_who_holds_up_whom_is_followed_to_its_end() -> None:
    """Rank 0 waits for 1 in a row, 1 for 3 in a column, and 3 computes."""
    found = verdict(
        rank(0, lane((0, 1), 5), waits=True),
        rank(1, lane((1, 3), 9), lane((0, 1), 4), waits=True),
        rank(2, lane((2, 3), 5), lane((0, 2), 8), waits=True),
        rank(3, lane((1, 3), 8), lane((2, 3), 4), moved=3, cpu=0.9),
    )
    assert (found.kind, found.culprits) == ("slow", (3,))
    assert "rank 3 used 90% of a core, and its stack changed 3 times" in found.reason
    assert (found.witness, found.arrived, found.missing) == (1, (1,), (3,))


def test_a_rank_that_does_nothing_is_stuck() -> None:
    found = verdict(rank(0, lane((0, 1), 5), waits=True), rank(1, lane((0, 1), 4)))
    assert (found.kind, found.culprits) == ("stuck", (1,))


@pytest.mark.parametrize("status", ["stopped", "dead", "silent"])
def test_a_rank_that_cannot_answer_comes_first(status: str) -> None:
    """Also if it had arrived: rank 0 waits for 1, which is in another collective with rank 2."""
    found = verdict(
        rank(0, lane((0, 1), 5), waits=True),
        rank(1, lane((0, 1), 4), status=status),
        rank(2, lane((1, 2), 3), waits=True),
    )
    assert (found.kind, found.culprits) == (status, (1,))


def test_a_rank_of_a_machine_that_is_gone() -> None:
    found = verdict(rank(0, lane((0, 1), 5), waits=True), RankReport(1, "silent"))
    assert (found.kind, found.culprits) == ("silent", (1,))
    assert "out of reach" in found.reason


def test_another_message_with_the_same_number() -> None:
    other = Message("all_reduce", "col", "enter", 64)
    found = verdict(
        rank(0, lane((0, 1, 2), 5), waits=True),
        rank(1, lane((0, 1, 2), 5, what=other), waits=True),
        rank(2, lane((0, 1, 2), 5), waits=True),
    )
    assert (found.kind, found.culprits) == ("diverged", (0, 1))
    assert 'label "leave", 64 elements on ranks 0 and 2, but' in found.reason


def test_a_message_of_another_size() -> None:
    sent = Message("send", "pp", "forward", 32)
    awaited = Message("recv", "pp", "backward", 64)  # labels of the two ends may differ
    found = verdict(
        rank(0, lane((0, 1), 3, RECEIVE, 1, awaited), waits=True),
        rank(1, lane((0, 1), 3, SEND, 0, sent), waits=True),
    )
    assert found.kind == "diverged"
    assert "32 elements on rank 1" in found.reason
    same = replace(sent, size=64)
    found = verdict(
        rank(0, lane((0, 1), 3, RECEIVE, 1, awaited), waits=True),
        rank(1, lane((0, 1), 3, SEND, 0, same), waits=True),
    )
    assert found.kind == "late"


def test_a_message_before_the_one_that_is_awaited_differs() -> None:
    """Also over NCCL, where nobody is known to wait for one of two ranks' messages."""
    ours, theirs = lane((0, 1), 5), lane((0, 1), 5)
    other = replace(theirs, recent={4: replace(SUM, label="enter"), 5: SUM})
    found = verdict(
        rank(0, replace(ours, recent={4: SUM, 5: SUM}), waits=True), rank(1, other, waits=True)
    )
    assert (found.kind, found.culprits) == ("diverged", (0, 1))
    assert "number 4 of ranks 0 and 1" in found.reason
    sent, awaited = Message("send", "pp", "a", 32), Message("recv", "pp", "b", 64)
    found = queued(
        rank(0, lane((0, 1), 3, RECEIVE, 1, awaited)), rank(1, lane((0, 1), 3, SEND, 0, sent))
    )
    assert (found.kind, found.culprits) == ("diverged", (0, 1))


def test_ranks_that_wait_in_a_circle() -> None:
    """Ranks 0, 1 and 2 each wait for the next one, in different collectives."""
    found = verdict(
        rank(0, lane((0, 1), 2), lane((0, 2), 1), waits=True),
        rank(1, lane((1, 2), 2), lane((0, 1), 1), waits=True),
        rank(2, lane((0, 2), 2), lane((1, 2), 1), waits=True),
    )
    assert (found.kind, found.culprits) == ("diverged", (0, 1, 2))
    assert "rank 1 waits for rank 2" in found.reason


def test_what_is_told_survives_the_way() -> None:
    one = rank(3, lane((1, 3), 8), lane((2, 3), 4, SEND, 2), waits=True, threads={"a": ("b",)})
    one = replace(one, neighbors=(rank(1, status="stopped"), RankReport(2, "dead")))
    assert reports().validate_json(reports().dump_json(one)) == one


def test_the_file_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process writes is what another reads, for every kind of wait."""
    monkeypatch.setattr(Axis, "ranks", property(lambda axis: tuple(range(4, 4 + axis.size))))
    mine = progress.Progress(tmp_path / "progress")
    axis = Axis("pp", 3)

    def state() -> State:
        found = progress_file.read(tmp_path / "progress")
        assert found is not None
        return found

    assert state().wait is None
    monkeypatch.setattr(progress, "active", mine)
    progress.at_step(12)
    for size in range(20):
        mine.posted("all_reduce", axis, "leave", size, -1, None).end()
    later = mine.posted("all_gather", axis, "enter", 99, -1, None)
    later.started()
    received = mine.posted("recv", axis, "forward", 7, 2, None)
    wait = state().wait
    assert wait is not None
    assert (wait.lane.kind, wait.lane.peer, wait.number) == (RECEIVE, 6, 1)
    received.end()
    assert state().wait is None
    later.wait()
    wait = state().wait
    assert wait is not None
    assert (wait.message, wait.number) == (Message("all_gather", "pp", "enter", 99), 21)
    found = next(one for one in state().lanes if one.kind == COLLECTIVE)
    assert (found.started, found.ended, found.ranks) == (21, 20, (4, 5, 6))
    assert found.recent[20] == Message("all_reduce", "pp", "leave", 19)
    assert state().step == 12
    calls = ('  File "a", line 1, in b\n    here\n', '  File "c", line 2, in d\n')
    mine.put_stack("".join(calls))
    assert state().stack == calls
    assert progress_file.read(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"x" * 100)
    assert progress_file.read(tmp_path / "short") is None


def test_many_ranks_in_words() -> None:
    assert ranks_in_words([]) == "no rank"
    assert ranks_in_words([4]) == "rank 4"
    assert ranks_in_words([0, 1, 5]) == "ranks 0, 1 and 5"
    assert ranks_in_words(range(100)).endswith("11 and 88 more")


def queued(*ranks: RankReport, first: int = 0) -> Verdict:
    """Diagnose a run over NCCL, where nobody waits in a message."""
    return diagnose_hang({seen.rank: seen for seen in ranks}, first, queued=True)


def test_over_nccl_the_rank_that_has_started_fewer_messages_is_found() -> None:
    """Rank 3 of a grid is in Python; 1 is behind because of it, and 0 because of 1."""
    found = queued(
        rank(0, lane((0, 1), 5), lane((0, 2), 5)),
        rank(1, lane((0, 1), 4), lane((1, 3), 9)),
        rank(2, lane((2, 3), 5), lane((0, 2), 5)),
        rank(3, lane((1, 3), 8), lane((2, 3), 5)),
    )
    assert (found.kind, found.culprits) == ("stuck", (3,))
    assert "rank 3 (pid 103) has started 8 of the 9 messages that rank 1" in found.reason
    assert "so not all_reduce on axis col" in found.reason
    slow = queued(rank(0, lane((0, 1), 5)), rank(1, lane((0, 1), 4), moved=2))
    assert (slow.kind, slow.culprits) == ("slow", (1,))
    silent = queued(rank(0, lane((0, 1), 5)), rank(1, lane((0, 1), 4), status="silent"))
    assert (silent.kind, silent.culprits) == ("silent", (1,))
    stopped = queued(rank(0, lane((0, 1), 5)), rank(1, lane((0, 1), 4), status="stopped"))
    assert (stopped.kind, stopped.culprits) == ("stopped", (1,))


def test_over_nccl_a_stage_that_has_not_begun_to_receive_is_found() -> None:
    found = queued(rank(0, lane((0, 1), 3, SEND, 1)), rank(1, lane((0, 1), 2, RECEIVE, 0)), first=1)
    assert (found.kind, found.culprits) == ("stuck", (1,))


def test_over_nccl_nobody_is_blamed_for_what_gpus_do_not_finish() -> None:
    found = queued(rank(0, lane((0, 1), 5)), rank(1, lane((0, 1), 5)))
    assert (found.kind, found.culprits) == ("late", ())
    assert "a GPU does not finish one" in found.reason


def test_over_nccl_different_messages_are_found() -> None:
    other = replace(SUM, size=32)
    found = queued(rank(0, lane((0, 1), 5)), rank(1, lane((0, 1), 5, what=other)))
    assert (found.kind, found.culprits) == ("diverged", (0, 1))
    assert "64 elements on rank 0, but all_reduce on axis col" in found.reason
