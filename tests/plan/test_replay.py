"""The replay in time, compared with small programs whose times are computed by hand."""

from __future__ import annotations

from typing import Literal

import pytest

from gridformer.parallel.pipeline.schedules import actions_of
from gridformer.plan.replay import Await, Item, ReadBack, Run, Send, Spent, StuckError, replay
from gridformer.record import Part, Place, Start

HERE = Place("a.py", 1, "f")


def kernel(seconds: float, launches: int = 1) -> Run:
    return Run(seconds, launches, "products", "mm", "", "forward")


def message(number: int, seconds: float, group: str = "g", ranks: tuple[int, ...] = (0, 1)) -> Send:
    return Send(number, Start(number, "all_reduce", group, ranks, HERE, "col"), seconds, "forward")


def wait(number: int) -> Await:
    return Await(number, "forward")


def one(items: list[Item], launch_s: float = 0.0) -> Spent:
    (spent,) = replay({0: items}, launch_s)
    return spent


def test_a_device_that_is_faster_than_its_host_waits_for_it() -> None:
    spent = one([kernel(1.0)] * 10, launch_s=5.0)
    assert (spent.end, spent.launches, spent.work["products"]) == (51.0, 41.0, 10.0)


def test_a_host_that_is_faster_runs_ahead_until_it_reads_back() -> None:
    spent = one([kernel(10.0)] * 10, launch_s=1.0)
    assert (spent.end, spent.launches) == (101.0, 1.0)
    spent = one([kernel(10.0), ReadBack(), kernel(10.0)], launch_s=1.0)
    assert (spent.end, spent.launches) == (22.0, 2.0)


def test_a_message_travels_while_the_device_computes() -> None:
    spent = one([message(1, 5.0), kernel(3.0), wait(1), kernel(1.0)])
    assert (spent.end, spent.exposed["col"], spent.messages["col"]) == (6.0, 2.0, 5.0)
    assert one([message(1, 5.0), kernel(7.0), wait(1)]).exposed["col"] == 0.0


def test_messages_of_a_group_travel_one_after_the_other() -> None:
    same: list[Item] = [message(1, 5.0), message(2, 5.0), wait(1), wait(2)]
    other: list[Item] = [message(1, 5.0), message(2, 5.0, "h"), wait(1), wait(2)]
    assert (one(same).end, one(other).end) == (10.0, 5.0)


def test_a_message_begins_when_what_was_launched_before_is_done() -> None:
    assert one([kernel(3.0), message(1, 5.0), wait(1)]).end == 8.0


def test_who_comes_late_lets_others_wait() -> None:
    early, late = replay(
        {rank: [kernel(s), message(1, 2.0), wait(1)] for rank, s in enumerate((1.0, 4.0))}, 0.0
    )
    assert (early.end, early.bubble, early.exposed["col"]) == (6.0, 3.0, 2.0)
    assert (late.end, late.bubble, late.exposed["col"]) == (6.0, 0.0, 2.0)


def test_programs_that_wait_for_each_other_are_refused() -> None:
    first: list[Item] = [message(1, 1.0), wait(1), message(2, 1.0, "h"), wait(2)]
    second: list[Item] = [message(2, 1.0, "h"), wait(2), message(1, 1.0), wait(1)]
    with pytest.raises(StuckError):
        replay({0: first, 1: second}, 0.0)


def pipeline(p: int, m: int, travel_s: float) -> dict[int, list[Item]]:
    """Return 1F1B with passes of 1 and 2 seconds; each direction has a group of its own."""
    programs = {}
    for rank, actions in enumerate(actions_of("1f1b", p, 1, m)):
        items: list[Item] = []
        for action in actions:
            forward = action.kind == "forward"
            source, target = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            if 0 <= source < p:
                start = p2p(len(items), "recv", action.kind, rank, source)
                items += [Send(start.number, start, travel_s, "forward"), wait(start.number)]
            items.append(kernel(1.0 if forward else 2.0))
            if 0 <= target < p:
                start = p2p(len(items), "send", action.kind, rank, target)
                items.append(Send(start.number, start, travel_s, "forward"))
        programs[rank] = items
    return programs


def p2p(number: int, what: Literal["send", "recv"], kind: str, here: int, peer: int) -> Start:
    pair = min(here, peer), max(here, peer)
    parts = (Part(what, peer, 1, "float32"),)
    return Start(number, "p2p", f"{kind} {pair}", pair, HERE, "pp", parts=parts)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (3, 7)])
def test_the_bubble_of_a_pipeline_is_that_of_the_paper(p: int, m: int) -> None:
    """Narayanan et al. 2021, section 2.2.1: (p - 1) / m of the time of the work."""
    last, *others = reversed(replay(pipeline(p, m, 0.0), 0.0))
    for spent in (last, *others):
        assert spent.work["products"] == 3.0 * m
    assert max(spent.end for spent in (last, *others)) == 3.0 * (m + p - 1)
    assert others[-1].bubble == 3.0 * (p - 1), "the first rank ends last"


def test_messages_between_stages_lengthen_the_pipeline() -> None:
    ends = [max(s.end for s in replay(pipeline(2, 1, travel), 0.0)) for travel in (0.0, 0.5)]
    assert ends == [6.0, 7.0], "one forward, and one backward"


def test_messages_to_ranks_without_a_program_take_their_time() -> None:
    start = Start(1, "p2p", "g", (0, 7), HERE, "pp", parts=(Part("send", 7, 1, "float32"),))
    assert one([Send(start.number, start, 2.0, "forward"), wait(1)]).end == 2.0
