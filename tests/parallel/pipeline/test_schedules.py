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


@pytest.mark.parametrize("case", CASES)
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


def simulated(case: Case, forward: float = 1.0, backward: float = 2.0) -> list[list[Event]]:
    """Each rank runs its next action once its input is there; messages take no time."""
    order, pp, k, m = case
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
            clock[rank] = done[action] = start + (forward if action.kind == "forward" else backward)
            events[rank].append(Event(*action, start, clock[rank]))
            place[rank] += 1
        assert place != before, "the order is deadlocked"
    return events


@pytest.mark.parametrize("case", CASES)
def test_idle_time_is_that_of_the_paper(case: Case) -> None:
    """Idle time is (pp-1)/(mk) of the ideal time with k stages per rank (Narayanan et al. 2021)."""
    _, pp, k, m = case
    assert idle_fraction(simulated(case)) == pytest.approx((pp - 1) / (k * m))


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
        for kind in ("forward", "backward")
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
            assert coming == {a for a in plan.actions if a.stage != edge[a.kind]}
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
