"""The replay accepts every program that is right by construction, and finds every fault in it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gridformer.check import simulate
from gridformer.check.problems import message_problems
from gridformer.check.simulate import Outcome
from gridformer.record import Part, Place, Start, Wait

HERE = Place("a.py", 1, "f")
GROUPS = {"world": (0, 1, 2, 3), "a": (0, 1), "b": (2, 3), "c": (1, 2), "d": (0, 2, 3), "e": (0, 1)}
Programs = dict[int, list[Start | Wait]]


class Step(NamedTuple):
    """A message in which all members of a group take part, or two of them."""

    group: str
    op: str
    size: int
    pair: tuple[int, int]  # indices in the group; of a message between two ranks
    later: bool  # whether ranks wait for it only at the end


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(sorted(GROUPS)),
        st.sampled_from(["all_reduce", "broadcast", "p2p", "ring"]),
        st.integers(1, 3),
        st.sampled_from([(0, 1), (1, 0)]),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def programs_of(steps: Sequence[Step]) -> Programs:
    """Return what each rank does so that all messages are carried out in the order of the steps."""
    found: Programs = {rank: [] for rank in range(4)}
    late: Programs = {rank: [] for rank in range(4)}
    for number, step in enumerate(steps):
        for rank, call in calls_of(step, number).items():
            found[rank].append(call)
            (late if step.later else found)[rank].append(Wait(number, HERE))
    return {rank: found[rank] + late[rank] for rank in found}


def calls_of(step: Step, number: int) -> dict[int, Start]:
    members = GROUPS[step.group]
    call = Start(number, step.op, step.group, members, HERE, size=step.size, dtype="float32")
    if step.op in ("all_reduce", "broadcast"):
        return dict.fromkeys(members, call)
    call = call._replace(op="p2p", size=0)
    n = len(members)
    if step.op == "ring":  # every member sends to the next, and posts both messages together
        return {
            rank: call._replace(
                parts=(
                    Part("send", members[(i + 1) % n], step.size, "float32"),
                    Part("recv", members[(i - 1) % n], step.size, "float32"),
                )
            )
            for i, rank in enumerate(members)
        }
    source, to = (members[i] for i in step.pair)
    return {
        source: call._replace(parts=(Part("send", to, step.size, "float32"),)),
        to: call._replace(parts=(Part("recv", source, step.size, "float32"),)),
    }


def fits(outcome: Outcome) -> bool:
    return not outcome.mismatches and not outcome.stops and outcome.ended == set(range(4))


@given(STEPS)
def test_what_is_right_by_construction_is_accepted(steps: list[Step]) -> None:
    assert fits(simulate(programs_of(steps)))


@given(STEPS, st.data())
def test_a_message_left_out_by_one_rank_is_found(steps: list[Step], data: st.DataObject) -> None:
    programs = programs_of(steps)
    rank = data.draw(st.sampled_from([rank for rank in programs if programs[rank]]))
    starts = [event for event in programs[rank] if isinstance(event, Start)]
    number = data.draw(st.sampled_from(starts)).number
    programs[rank] = [event for event in programs[rank] if event.number != number]
    assert not fits(simulate(programs))


@given(STEPS, st.data())
def test_messages_that_one_rank_swaps_are_found(steps: list[Step], data: st.DataObject) -> None:
    """Two different messages of a group in the other order never fit."""
    programs = programs_of(steps)
    pairs = [
        (rank, i, j)
        for rank, events in programs.items()
        for i, one in enumerate(events)
        for j, other in enumerate(events[:i])
        if isinstance(one, Start) and isinstance(other, Start) and one.group == other.group
        if (one.op, one.size, one.parts) != (other.op, other.size, other.parts)
        # Messages of different pairs of ranks pass each other only if nobody waits.
        if one.op != "p2p" and other.op != "p2p"
    ]
    assume(pairs)
    rank, i, j = data.draw(st.sampled_from(pairs))
    events = programs[rank]
    events[i], events[j] = (
        events[j]._replace(number=events[i].number),
        events[i]._replace(number=events[j].number),
    )
    assert not fits(simulate(programs))


@given(STEPS, st.data())
def test_a_circle_of_two_groups_is_found(steps: list[Step], data: st.DataObject) -> None:
    """Two ranks that wait for two messages in opposite orders wait forever."""
    programs = programs_of(steps)
    n = len(steps)
    for rank in (0, 1):
        first, second = ("a", "e") if rank else ("e", "a")
        for number, group in ((n, first), (n + 1, second)):
            call = Start(number, "all_reduce", group, (0, 1), HERE, size=1, dtype="float32")
            programs[rank] += [call, Wait(number, HERE)]
    outcome = simulate(programs)
    assert not fits(outcome)
    assert {stop.rank: stop.missing for stop in outcome.stops} == {0: (1,), 1: (0,)}


@given(STEPS, st.permutations(range(4)))
@settings(max_examples=30)
def test_the_result_does_not_depend_on_who_goes_first(steps: list[Step], order: list[int]) -> None:
    programs = programs_of(steps)
    programs[1] = programs[1][1:]  # a rank that waits for a message which it has not started
    events = [event for event in programs[1] if isinstance(event, Start)]
    numbers = {event.number for event in events}
    programs[1] = [event for event in programs[1] if event.number in numbers]
    one, other = simulate(programs), simulate({rank: programs[rank] for rank in order})
    assert one.ended == other.ended
    assert {s.rank: s.call for s in one.stops} == {s.rank: s.call for s in other.stops}


def start(number: int, **more: object) -> Start:
    given_: dict[str, object] = {"op": "all_reduce", "size": 4, "dtype": "float32", **more}
    return Start(number, group="g", ranks=(0, 1), place=HERE, **given_)  # type: ignore[arg-type]


def test_sizes_types_and_operations_must_be_equal() -> None:
    for more in ({"size": 5}, {"dtype": "float16"}, {"how": "max"}):
        outcome = simulate({0: [start(0)], 1: [start(0, **more)]})
        assert [m.different for m in outcome.mismatches] == [(1,)]
        assert not outcome.stops, "the replay goes on as if they fitted"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("received", [(5, "float32"), (4, "bfloat16"), (4, "float32")])
def test_what_is_sent_between_two_ranks_must_be_what_is_received(
    received: tuple[int, str], order: tuple[int, int]
) -> None:
    parts = Part("send", 1, 4, "float32"), Part("recv", 0, *received)
    calls = [start(0, op="p2p", size=0, parts=(part,)) for part in parts]
    outcome = simulate({rank: [calls[rank], Wait(0, HERE)] for rank in order})
    found = [(set(one.calls), one.order) for one in outcome.mismatches]
    assert found == [({0, 1}, False)] * (received != (4, "float32"))
    assert fits_two(outcome), "the replay goes on as if they fitted"


def test_different_collectives_end_the_replay_of_their_group() -> None:
    outcome = simulate({0: [start(0), Wait(0, HERE)], 1: [start(0, op="broadcast")]})
    assert outcome.mismatches[0].order
    assert [stop.rank for stop in outcome.stops] == [0, 1]


def test_what_is_sent_in_an_all_to_all_must_be_what_is_received() -> None:
    def run(pieces: tuple[tuple[int, ...], tuple[int, ...]]) -> Outcome:
        mine = start(0, op="all_to_all", pieces=((0, 3), (0, 5)))
        return simulate({0: [mine], 1: [start(0, op="all_to_all", pieces=pieces)]})

    assert not run(((5, 0), (3, 0))).mismatches
    assert run(((4, 0), (3, 0))).mismatches
    assert run(((5, 0), (2, 0))).mismatches


def test_one_queue_for_a_group() -> None:
    """A receive that is posted early blocks a send of the same group, but not of another one."""

    def programs(one: str, other: str) -> Programs:
        found: Programs = {}
        for rank in (0, 1):
            part = Part("recv", 1 - rank, 4, "float32")
            early = Start(0, "p2p", one if rank else other, (0, 1), HERE, parts=(part,))
            late = early._replace(
                number=1, group=other if rank else one, parts=(part._replace(what="send"),)
            )
            found[rank] = [early, late, Wait(0, HERE), Wait(1, HERE)]
        return found

    assert not fits_two(simulate(programs("g", "g")))
    assert fits_two(simulate(programs("up", "down")))


def fits_two(outcome: Outcome) -> bool:
    return not outcome.stops and outcome.ended == {0, 1}


def test_a_circle_is_told_without_who_waits_for_it() -> None:
    """Ranks 1 and 2 receive before they send to each other, and rank 0 waits for rank 1."""

    def call(
        number: int, group: str, what: Literal["send", "recv"], peer: int
    ) -> list[Start | Wait]:
        parts = (Part(what, peer, 1, "float32"),)
        return [Start(number, "p2p", group, GROUPS[group], HERE, parts=parts), Wait(number, HERE)]

    outcome = simulate(
        {
            0: call(0, "a", "recv", 1),
            1: [*call(0, "c", "recv", 2), *call(1, "c", "send", 2), *call(2, "a", "send", 0)],
            2: [*call(0, "c", "recv", 1), *call(1, "c", "send", 1)],
        }
    )
    (problem,) = message_problems(outcome)
    assert (problem.kind, problem.ranks) == ("deadlock", (1, 2))
