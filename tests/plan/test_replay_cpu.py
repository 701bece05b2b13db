"""The replay of processes that share cores and links, compared with times computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest

from gridformer.plan.replay import Await, Item, Run, Send, Spent, StuckError
from gridformer.plan.replay_cpu import replay_cpu
from gridformer.record import Part, Place, Start

HERE = Place("a.py", 1, "f")


def kernel(seconds: float, launches: int = 1) -> Run:
    return Run(seconds, launches, "products", "mm", "", "forward")


def message(number: int, seconds: float, cpu: float | None, axis: str = "col") -> Send:
    """A collective over an axis; `cpu` is None if it stays within a node."""
    start = Start(number, "all_reduce", f"group of {axis}", (0, 1), HERE, axis)
    return Send(number, start, seconds, "forward", cpu)


def wait(number: int) -> Await:
    return Await(number, "forward")


def replayed(
    programs: Sequence[Sequence[Item]], n: int, cores: float, launch_s: float = 0.0
) -> list[Spent]:
    """Replays programs, each of which equally many of n processes have."""
    ranks = dict(enumerate(programs))
    weights = dict.fromkeys(ranks, n / len(ranks))
    return replay_cpu(ranks, launch_s, n, cores, weights)


def one(items: list[Item], launch_s: float = 0.0, n: int = 4, cores: float = 4) -> Spent:
    """Returns what one of n equal processes does."""
    (spent,) = replayed([items], n, cores, launch_s)
    return spent


def test_a_kernel_ends_before_the_next_thing_begins() -> None:
    spent = one([kernel(1.0)] * 10, launch_s=5.0)
    assert (spent.end, spent.launches, spent.work["products"]) == pytest.approx((60.0, 50.0, 10.0))


@pytest.mark.parametrize(("cores", "end"), [(8, 4.0), (6, 4.0 + 2 / 3), (4, 6.0), (2, 6.0)])
def test_a_message_in_a_node_takes_cores_from_kernels(cores: float, end: float) -> None:
    """Four processes compute for 4 s and send for 2 s, in eight threads while they do both."""
    work: list[Item] = [message(1, 2.0, None), kernel(4.0), wait(1)]
    assert one(work, cores=cores).end == pytest.approx(end)


def test_messages_between_nodes_leave_the_cores_to_kernels() -> None:
    spent = one([message(1, 4.0, 0.0), kernel(4.0), wait(1)])
    assert (spent.end, spent.exposed["col"]) == pytest.approx((4.0, 0.0))
    spent = one([message(1, 4.0, 1.0), kernel(4.0), wait(1)])
    assert (spent.end, spent.messages["col"]) == pytest.approx((5.0, 4.0))


def test_messages_of_two_axes_share_the_link_of_a_node() -> None:
    both: list[Item] = [message(1, 5.0, 0.0), message(2, 3.0, 0.0, "row"), wait(2), wait(1)]
    spent = one(both)
    assert (spent.messages["row"], spent.end) == pytest.approx((6.0, 8.0))
    assert spent.exposed == pytest.approx({"row": 6.0, "col": 2.0})
    inside: list[Item] = [message(1, 5.0, 0.0), message(2, 3.0, None, "row"), wait(2), wait(1)]
    assert one(inside).end == pytest.approx(5.0)


def test_a_group_has_two_messages_under_way_at_most() -> None:
    three: list[Item] = [message(i, 2.0, 0.0) for i in range(3)]
    spent = one([*three, wait(0), wait(2)])
    assert (spent.exposed["col"], spent.end, spent.bubble) == pytest.approx((6.0, 6.0, 0.0))


def test_who_comes_late_lets_others_wait() -> None:
    programs: list[list[Item]] = [[kernel(s), message(1, 2.0, 0.0), wait(1)] for s in (1.0, 4.0)]
    early, late = replayed(programs, 2, math.inf)
    assert (early.end, early.bubble, early.exposed["col"]) == pytest.approx((6.0, 3.0, 2.0))
    assert (late.end, late.bubble, late.exposed["col"]) == pytest.approx((6.0, 0.0, 2.0))


def test_a_process_has_the_cores_of_those_that_wait_but_one_at_most() -> None:
    """Kernels were measured with 4 processes on 2 cores, each of which had half a core."""
    programs = [[kernel(seconds)] for seconds in (4.0, 2.0, 2.0, 3.0)]
    ends = [spent.end for spent in replayed(programs, 4, 2)]
    assert ends == pytest.approx([3.0, 2.0, 2.0, 2.5])


def test_programs_that_wait_for_each_other_are_refused() -> None:
    first: list[Item] = [message(1, 1.0, None), wait(1), message(2, 1.0, None, "row"), wait(2)]
    second: list[Item] = [message(2, 1.0, None, "row"), wait(2), message(1, 1.0, None), wait(1)]
    with pytest.raises(StuckError):
        replayed([first, second], 2, 2)


def p2p(number: int, what: Literal["send", "recv"], peer: int) -> Send:
    parts = (Part(what, peer, 10, "float32"),)
    return Send(
        number, Start(number, "p2p", "pp", (0, 1), HERE, "pp", parts=parts), 3.0, "forward", 0.0
    )


def test_the_two_directions_of_a_link_do_not_disturb_each_other() -> None:
    def end(*ways: Literal["send", "recv"]) -> float:
        other: dict[str, Literal["send", "recv"]] = {"send": "recv", "recv": "send"}
        first = [p2p(i, way, 1) for i, way in enumerate(ways)]
        second = [p2p(i, other[way], 0) for i, way in enumerate(ways)]
        waits = [wait(i) for i in range(len(ways))]
        programs: list[list[Item]] = [[*first, *waits], [*second, *waits]]
        return max(spent.end for spent in replayed(programs, 2, 2))

    assert end("send") == end("send", "recv") == pytest.approx(3.0)
    assert end("send", "send") == pytest.approx(6.0)
