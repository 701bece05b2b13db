"""Why a run hangs, from what its ranks have told, without any processes."""

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
from gridformer.launch.hang_report import RankReport, Verdict, all_ranks, ranks_in_words, reports
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


def verdict(*ranks: RankReport, first: int = 0, queued: bool = False) -> Verdict:
    return diagnose_hang({seen.rank: seen for seen in ranks}, first, queued=queued)


BOTH, LEAVE, ENTER = (0, 1), SUM, replace(SUM, label="enter")
SENT, AWAITED = Message("send", "pp", "forward", 32), Message("recv", "pp", "backward", 64)
# The reports of the ranks, the kind, the culprits, and a part of the reason.
Hang = tuple[list[RankReport], str, tuple[int, ...], str]
HANGS: dict[str, Hang] = {
    "it does nothing": (
        [rank(0, lane(BOTH, 5), waits=True), rank(1, lane(BOTH, 4))], "stuck", (1,), "",
    ),
    # Also if it had arrived: rank 0 waits for 1, which is in another collective with rank 2.
    **{
        status: (
            [
                rank(0, lane(BOTH, 5), waits=True),
                rank(1, lane(BOTH, 4), status=status),
                rank(2, lane((1, 2), 3), waits=True),
            ],
            status, (1,), "",
        )
        for status in ("stopped", "dead", "silent")
    },
    "its machine is gone": (
        [rank(0, lane(BOTH, 5), waits=True), RankReport(1, "silent")],
        "silent", (1,), "out of reach",
    ),
    "another message with the same number": (
        [
            rank(0, lane((0, 1, 2), 5), waits=True),
            rank(1, lane((0, 1, 2), 5, what=ENTER), waits=True),
            rank(2, lane((0, 1, 2), 5), waits=True),
        ],
        "diverged", (0, 1), 'label "leave", 64 elements on ranks 0 and 2, but',
    ),
    "a message of another size": (
        [
            rank(0, lane(BOTH, 3, RECEIVE, 1, AWAITED), waits=True),
            rank(1, lane(BOTH, 3, SEND, 0, SENT), waits=True),
        ],
        "diverged", (0, 1), "32 elements on rank 1",
    ),
    "labels of the two ends may differ": (
        [
            rank(0, lane(BOTH, 3, RECEIVE, 1, AWAITED), waits=True),
            rank(1, lane(BOTH, 3, SEND, 0, replace(SENT, size=64)), waits=True),
        ],
        "late", (), "",
    ),
    "a message before the one that is awaited": (
        [
            rank(0, replace(lane(BOTH, 5), recent={4: LEAVE, 5: SUM}), waits=True),
            rank(1, replace(lane(BOTH, 5), recent={4: ENTER, 5: SUM}), waits=True),
        ],
        "diverged", (0, 1), "number 4 of ranks 0 and 1",
    ),
    "a circle of different collectives": (
        [
            rank(0, lane((0, 1), 2), lane((0, 2), 1), waits=True),
            rank(1, lane((1, 2), 2), lane((0, 1), 1), waits=True),
            rank(2, lane((0, 2), 2), lane((1, 2), 1), waits=True),
        ],
        "diverged", (0, 1, 2), "rank 1 waits for rank 2",
    ),
}  # fmt: skip
# Over NCCL, where nobody waits in a message.
QUEUED: dict[str, Hang] = {
    "a message before the one that is awaited": (
        [rank(0, lane(BOTH, 3, RECEIVE, 1, AWAITED)), rank(1, lane(BOTH, 3, SEND, 0, SENT))],
        "diverged", (0, 1), "",
    ),
    # Rank 3 of a grid is in Python; 1 is behind because of it, and 0 because of 1.
    "it has started fewer messages": (
        [
            rank(0, lane((0, 1), 5), lane((0, 2), 5)),
            rank(1, lane((0, 1), 4), lane((1, 3), 9)),
            rank(2, lane((2, 3), 5), lane((0, 2), 5)),
            rank(3, lane((1, 3), 8), lane((2, 3), 5)),
        ],
        "stuck", (3,), "(pid 103) has started 8 of the 9 messages that rank 1 of its group has "
        "started, so not all_reduce on axis col",
    ),
    "a stage has not begun to receive": (
        [rank(0, lane(BOTH, 3, SEND, 1)), rank(1, lane(BOTH, 2, RECEIVE, 0))], "stuck", (1,), "",
    ),
    "slow": ([rank(0, lane(BOTH, 5)), rank(1, lane(BOTH, 4), moved=2)], "slow", (1,), ""),
    **{
        status: (
            [rank(0, lane(BOTH, 5)), rank(1, lane(BOTH, 4), status=status)], status, (1,), "",
        )
        for status in ("silent", "stopped")
    },
    "GPUs do not finish": (
        [rank(0, lane(BOTH, 5)), rank(1, lane(BOTH, 5))], "late", (), "a GPU does not finish one",
    ),
    "another size": (
        [rank(0, lane(BOTH, 5)), rank(1, lane(BOTH, 5, what=replace(SUM, size=32)))],
        "diverged", (0, 1), "64 elements on rank 0, but all_reduce on axis col",
    ),
}  # fmt: skip


@pytest.mark.parametrize("queued", [False, True])
def test_why_it_hangs(queued: bool) -> None:
    for name, (ranks, kind, culprits, reason) in (QUEUED if queued else HANGS).items():
        found = verdict(*ranks, queued=queued)
        assert (found.kind, found.culprits) == (kind, culprits), name
        assert reason in found.reason, name


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


def test_what_is_told_survives_the_way() -> None:
    one = rank(3, lane((1, 3), 8), lane((2, 3), 4, SEND, 2), waits=True, threads={"a": ("b",)})
    one = replace(one, neighbors=(rank(1, status="stopped"), RankReport(2, "dead")))
    assert reports().validate_json(reports().dump_json(one)) == one


def test_what_a_rank_says_of_itself_counts_more_than_what_others_say() -> None:
    dead = RankReport(2, "dead")
    told = {0: replace(rank(0), neighbors=(rank(1, status="stopped"), dead)), 1: rank(1, moved=3)}
    assert all_ranks(told, 4) == {**told, 2: dead, 3: RankReport(3, "silent")}


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
