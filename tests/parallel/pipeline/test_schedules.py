"""Orders of micro-batches equal torch's, and their simulated time equals the formulas."""

import itertools
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import PipelineOrder
from gridformer.parallel.pipeline import schedules
from gridformer.parallel.pipeline.timeline import Event, idle_fraction

TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
Case = tuple[PipelineOrder, int, int, int]
CASES: list[Case] = [
    (order, pp, k, m)
    for order in get_args(PipelineOrder)
    for pp, m in [(2, 2), (2, 6), (3, 3), (4, 8), (4, 12)]
    for k in ((2, 3) if order == "interleaved" else (1,))
]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in TORCH])
def test_orders_are_those_of_torch(case: Case) -> None:
    """Torch's list for the last rank's 1F1B is left out, because it is wrong.

    That list counts micro-batches from 1, beyond the last one; torch's schedule does not use it.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    order, pp, k, m = case
    words = {"F": "forward", "B": "backward"}
    listed = get_schedule_ops(TORCH[order], pp, m, k)
    for rank, (mine, theirs) in enumerate(zip(schedules.actions_of(order, pp, k, m), listed)):
        found = [
            schedules.Action(words[a.computation_type.value], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
            for a in theirs
            if a is not None and a.computation_type.value in words
        ]
        if order == "1f1b" and rank == pp - 1:
            found = [a._replace(micro=a.micro - (a.kind == "forward")) for a in found]
        assert [*mine] == found, rank


def simulated(case: Case, seconds: dict[str, float] | None = None) -> list[list[Event]]:
    """Each rank runs its next action once its input is there; messages take no time."""
    order, pp, k, m = case
    seconds = seconds or {"forward": 1.0, "backward": 1.0 if order == "zb_h1" else 2.0, "weight": 1}
    orders = schedules.actions_of(order, pp, k, m)
    done: dict[schedules.Action, float] = {}
    clock, place = [0.0] * pp, [0] * pp
    events: list[list[Event]] = [[] for _ in orders]
    read_by = {schedules.reading_action(a, pp * k): a for a in itertools.chain(*orders)}
    while any(place[rank] < len(orders[rank]) for rank in range(pp)):
        before = [*place]
        for rank in range(pp):
            if place[rank] == len(orders[rank]):
                continue
            action = orders[rank][place[rank]]
            source = read_by.get(action)
            if source is not None and source not in done:
                continue
            start = max(clock[rank], done[source] if source else 0.0)
            clock[rank] = done[action] = start + seconds[action.kind]
            events[rank].append(Event(*action, start, clock[rank]))
            place[rank] += 1
        assert place != before, "the order is deadlocked"
    return events


@pytest.mark.parametrize("case", CASES)
def test_idle_time_is_that_of_the_paper(case: Case) -> None:
    """Idle time is (pp-1)/(mk) of the ideal time with k stages per rank (Narayanan et al. 2021).

    That of ZB-H1 is a third of it if all passes take equal times.
    """
    order, pp, k, m = case
    part = 3 if order == "zb_h1" else 1
    assert idle_fraction(simulated(case)) == pytest.approx((pp - 1) / (part * k * m))


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (3, 7), (4, 8), (8, 16)])
def test_idle_time_of_zero_bubble_is_that_of_the_paper(pp: int, m: int) -> None:
    """Qi et al. 2023, table 2: (pp-1) (T_F + T_B - T_W)."""
    seconds = {"forward": 1.0, "backward": 1.25, "weight": 0.875}
    every = sum(seconds.values()) * m
    idle = idle_fraction(simulated(("zb_h1", pp, 1, m), seconds)) * every
    assert idle == pytest.approx((pp - 1) * (1.0 + 1.25 - 0.875))


def test_weight_passes_come_later_on_later_ranks() -> None:
    words = [
        " ".join(f"{action.kind[0].upper()}{action.micro}" for action in order)
        for order in schedules.actions_of("zb_h1", 4, 1, 6)
    ]
    assert words == [
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5",
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5",
        "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5",
    ]


@given(pp=st.integers(2, 6), m=st.integers(1, 14))
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(pp: int, m: int) -> None:
    for order in schedules.actions_of("zb_h1", pp, 1, m):
        begun, left = set[int](), set[int]()
        for action in order:
            if action.kind == "forward":
                begun.add(action.micro)
                assert len(begun) + len(left) <= pp
            elif action.kind == "backward":
                begun.remove(action.micro)
                left.add(action.micro)
            else:
                left.remove(action.micro)
        assert not begun | left, "every weight pass follows its backward pass"


@settings(max_examples=150)
@given(
    order=st.sampled_from(get_args(PipelineOrder)),
    pp=st.integers(2, 5),
    k=st.integers(2, 3),
    m=st.integers(1, 12),
)
def test_every_order_ends_and_its_messages_match(
    order: PipelineOrder, pp: int, k: int, m: int
) -> None:
    k = k if order == "interleaved" else 1
    if order == "interleaved" and m % max(1, m // pp):
        with pytest.raises(AssertionError):
            schedules.actions_of(order, pp, k, m)
        return
    simulated((order, pp, k, m))
    orders = schedules.actions_of(order, pp, k, m)
    every = {
        schedules.Action(kind, stage, micro)
        for kind in schedules.PASSES
        if kind != "weight" or order == "zb_h1"
        for stage in range(pp * k)
        for micro in range(m)
    }
    assert sorted(itertools.chain(*orders)) == sorted(every)
    for listed in (orders, schedules.forwards(orders)):
        plans = [schedules.Itinerary.of(listed, rank, pp * k) for rank in range(pp)]
        for rank, plan in enumerate(plans):
            assert all(action.stage % pp == rank for action in plan.actions)
            coming = {a for messages in plan.arrivals.values() for a in messages}
            edge = {"forward": 0, "backward": pp * k - 1}
            passes = [a for a in plan.actions if a.kind != "weight"]
            assert coming == {a for a in passes if a.stage != edge[a.kind]}
            for peer, messages in plan.arrivals.items():
                sent = [message for message, to in plans[peer].sends.values() if to == rank]
                assert [*messages] == sent, "in the order in which they are sent"
            for message, through in plan.taken.items():
                sender = plans[message.stage % pp]  # this rank is the sender
                assert sender is plan
                for mine in through:  # the peer reads these before it sends the message
                    peer_plan = plans[mine.stage % pp]
                    made = next(a for a, (b, _) in peer_plan.sends.items() if b == message)
                    assert peer_plan.actions.index(mine) <= peer_plan.actions.index(made)
