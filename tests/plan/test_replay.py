"""The replays in time, compared with small programs whose times are computed by hand."""

import math
from collections.abc import Sequence
from typing import Literal

import pytest

from gridformer.config import LayoutConfig
from gridformer.parallel.pipeline.schedules import actions_of
from gridformer.plan.replay import Await, Item, ReadBack, Run, Send, Spent, StuckError, replay
from gridformer.plan.replay_cpu import replay_cpu
from gridformer.record import Part, Place, Start

HERE = Place("a.py", 1, "f")


def kernel(seconds: float, launches: int = 1) -> Run:
    return Run(seconds, launches, "products", "mm", "", "forward")


def message(number: int, seconds: float, axis: str = "col", cpu: float | None = None) -> Send:
    """A collective over an axis; on a CPU `cpu` is None if it stays within a node."""
    start = Start(number, "all_reduce", f"group of {axis}", (0, 1), HERE, axis)
    return Send(number, start, seconds, "forward", cpu)


def wait(number: int) -> Await:
    return Await(number, "forward")


def one(items: list[Item], launch_s: float = 0.0) -> Spent:
    (spent,) = replay({0: items}, launch_s)
    return spent


def on_cpus(
    programs: Sequence[Sequence[Item]], n: int, cores: float, launch_s: float = 0.0
) -> list[Spent]:
    """Replays programs, each of which equally many of n processes have."""
    ranks = dict(enumerate(programs))
    weights = dict.fromkeys(ranks, n / len(ranks))
    return replay_cpu(ranks, launch_s, n, cores, weights)


def one_of_four(items: list[Item], launch_s: float = 0.0, cores: float = 4) -> Spent:
    """Returns what one of four equal processes on a CPU does."""
    (spent,) = on_cpus([items], 4, cores, launch_s)
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
    other: list[Item] = [message(1, 5.0), message(2, 5.0, "row"), wait(1), wait(2)]
    assert (one(same).end, one(other).end) == (10.0, 5.0)
    second = one([message(1, 5.0), message(2, 5.0), wait(2)])
    assert (second.exposed["col"], second.bubble) == (10.0, 0.0), "no rank came late to it"


def test_a_message_begins_when_what_was_launched_before_is_done() -> None:
    assert one([kernel(3.0), message(1, 5.0), wait(1)]).end == 8.0


@pytest.mark.parametrize("on_cpu", [False, True])
def test_who_comes_late_lets_others_wait(on_cpu: bool) -> None:
    cpu = 0.0 if on_cpu else None
    programs: list[list[Item]] = [
        [kernel(s), message(1, 2.0, cpu=cpu), wait(1)] for s in (1.0, 4.0)
    ]
    both = on_cpus(programs, 2, math.inf) if on_cpu else replay(dict(enumerate(programs)), 0.0)
    early, late = both
    assert (early.end, early.bubble, early.exposed["col"]) == pytest.approx((6.0, 3.0, 2.0))
    assert (late.end, late.bubble, late.exposed["col"]) == pytest.approx((6.0, 0.0, 2.0))


@pytest.mark.parametrize(("behind", "kind"), [(3.0, "bubble"), (1.0, "exposed")])
def test_a_timeline_names_a_wait_after_what_takes_most_of_it(behind: float, kind: str) -> None:
    """A message of 2 s travels when the other rank has come to it."""
    programs: dict[int, list[Item]] = {
        rank: [kernel(seconds), message(1, 2.0), wait(1)]
        for rank, seconds in enumerate((1.0, 1.0 + behind))
    }
    early, late = (
        [(one.kind, one.start, one.end) for one in spent.intervals if one.name == "waits for col"]
        for spent in replay(programs, 0.0, timeline=True)
    )
    assert early == [(kind, 1.0, 3.0 + behind)]
    assert late == [("exposed", 1.0 + behind, 3.0 + behind)]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_programs_that_wait_for_each_other_are_refused(on_cpu: bool) -> None:
    first: list[Item] = [message(1, 1.0), wait(1), message(2, 1.0, "row"), wait(2)]
    second: list[Item] = [message(2, 1.0, "row"), wait(2), message(1, 1.0), wait(1)]
    with pytest.raises(StuckError):
        on_cpus([first, second], 2, 2) if on_cpu else replay({0: first, 1: second}, 0.0)


def pipeline(p: int, m: int, travel_s: float) -> dict[int, list[Item]]:
    """Return 1F1B with passes of 1 and 2 seconds; each direction has a group of its own."""
    programs = {}
    for rank, actions in enumerate(actions_of(LayoutConfig(pp=p, pipeline="1f1b"), m)):
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


def test_a_kernel_ends_before_the_next_thing_begins() -> None:
    spent = one_of_four([kernel(1.0)] * 10, launch_s=5.0)
    assert (spent.end, spent.launches, spent.work["products"]) == pytest.approx((60.0, 50.0, 10.0))


@pytest.mark.parametrize(("cores", "end"), [(8, 4.0), (6, 4.0 + 2 / 3), (4, 6.0), (2, 6.0)])
def test_a_message_in_a_node_takes_cores_from_kernels(cores: float, end: float) -> None:
    """Four processes compute for 4 s and send for 2 s, in eight threads while they do both."""
    work: list[Item] = [message(1, 2.0), kernel(4.0), wait(1)]
    assert one_of_four(work, cores=cores).end == pytest.approx(end)


def test_messages_between_nodes_leave_the_cores_to_kernels() -> None:
    spent = one_of_four([message(1, 4.0, cpu=0.0), kernel(4.0), wait(1)])
    assert (spent.end, spent.exposed["col"]) == pytest.approx((4.0, 0.0))
    spent = one_of_four([message(1, 4.0, cpu=1.0), kernel(4.0), wait(1)])
    assert (spent.end, spent.messages["col"]) == pytest.approx((5.0, 4.0))


def test_messages_of_two_axes_share_the_link_of_a_node() -> None:
    both: list[Item] = [message(1, 5.0, cpu=0.0), message(2, 3.0, "row", 0.0), wait(2), wait(1)]
    spent = one_of_four(both)
    assert (spent.messages["row"], spent.end) == pytest.approx((6.0, 8.0))
    assert spent.exposed == pytest.approx({"row": 6.0, "col": 2.0})
    inside: list[Item] = [message(1, 5.0, cpu=0.0), message(2, 3.0, "row"), wait(2), wait(1)]
    assert one_of_four(inside).end == pytest.approx(5.0)


def test_a_group_has_two_messages_under_way_at_most() -> None:
    three: list[Item] = [message(i, 2.0, cpu=0.0) for i in range(3)]
    spent = one_of_four([*three, wait(0), wait(2)])
    assert (spent.exposed["col"], spent.end, spent.bubble) == pytest.approx((6.0, 6.0, 0.0))


def test_a_process_has_the_cores_of_those_that_wait_but_one_at_most() -> None:
    """Kernels were measured with 4 processes on 2 cores, each of which had half a core."""
    programs = [[kernel(seconds)] for seconds in (4.0, 2.0, 2.0, 3.0)]
    ends = [spent.end for spent in on_cpus(programs, 4, 2)]
    assert ends == pytest.approx([3.0, 2.0, 2.0, 2.5])


def exchange(number: int, what: Literal["send", "recv"], peer: int) -> Send:
    parts = (Part(what, peer, 10, "float32"),)
    return Send(
        number, Start(number, "p2p", "pp", (0, 1), HERE, "pp", parts=parts), 3.0, "forward", 0.0
    )


def test_the_two_directions_of_a_link_do_not_disturb_each_other() -> None:
    def end(*ways: Literal["send", "recv"]) -> float:
        other: dict[str, Literal["send", "recv"]] = {"send": "recv", "recv": "send"}
        first = [exchange(i, way, 1) for i, way in enumerate(ways)]
        second = [exchange(i, other[way], 0) for i, way in enumerate(ways)]
        waits = [wait(i) for i in range(len(ways))]
        programs: list[list[Item]] = [[*first, *waits], [*second, *waits]]
        return max(spent.end for spent in on_cpus(programs, 2, 2))

    assert end("send") == end("send", "recv") == pytest.approx(3.0)
    assert end("send", "send") == pytest.approx(6.0)


def test_messages_that_are_posted_together_share_their_time_by_size() -> None:
    """A rank sends for 3 s: to the first one 10 of 30 elements, of two on the link at a time."""

    def posted(seconds: float, *parts: Part) -> list[Item]:
        start = Start(1, "p2p", "pp", (0, 1, 2), HERE, "pp", parts=parts)
        return [Send(1, start, seconds, "forward", 0.0), wait(1)]

    sends = [Part("send", peer, size, "float32") for peer, size in ((1, 10), (2, 20))]
    first = [kernel(1.0), *posted(3.0, *sends)]
    others = [posted(0.0, Part("recv", 0, size, "float32")) for size in (10, 20)]
    assert [spent.end for spent in on_cpus([first, *others], 3, 3)] == pytest.approx([4, 3, 4])
