"""Orders of micro-batches equal torch's, and their simulated time equals the formulas."""

import itertools
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, PipelineOrder
from gridformer.parallel.pipeline import schedules
from gridformer.parallel.pipeline.schedules import Action
from gridformer.parallel.pipeline.timeline import Event, idle_fraction

TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
STAGES = {"interleaved": (2, 3), "zbv": (2,)}  # those that a rank has
SPLIT = ("zb_h1", "zbv")
Case = tuple[PipelineOrder, int, int, int]
CASES: list[Case] = [
    (order, pp, k, m)
    for order in get_args(PipelineOrder)
    for pp, m in [(2, 2), (2, 6), (3, 3), (4, 8), (4, 12)]
    for k in STAGES.get(order, (1,))
]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in TORCH])
def test_orders_are_those_of_torch(case: Case) -> None:
    """Torch's list for the last rank's 1F1B is left out, because it is wrong.

    That list counts micro-batches from 1, beyond the last one; torch's schedule does not use it.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    order, pp, k, m = case
    words = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
    listed = get_schedule_ops(TORCH[order], pp, m, k)
    for rank, (mine, theirs) in enumerate(zip(actions_of(*case), listed)):
        found = [
            Action(words[a.computation_type.value], a.stage_index, a.microbatch_index)  # type: ignore[arg-type]
            for a in theirs
            if a is not None and a.computation_type.value in words
        ]
        if order == "1f1b" and rank == pp - 1:
            found = [a._replace(micro=a.micro - (a.kind == "forward")) for a in found]
        assert [*mine] == found, rank


def layout_of(order: PipelineOrder, pp: int, k: int, m: int) -> LayoutConfig:
    return LayoutConfig(pp=pp, stages_per_rank=k, pipeline=order, micro_batches=m)


def actions_of(order: PipelineOrder, pp: int, k: int, m: int) -> tuple[tuple[Action, ...], ...]:
    return schedules.actions_of(layout_of(order, pp, k, m), m)


def simulated(case: Case, seconds: dict[str, float] | None = None) -> list[list[Event]]:
    """Each rank runs its next action once its input is there; messages take no time."""
    order, pp, k, _ = case
    seconds = seconds or {"forward": 1.0, "backward": 1.0 if order in SPLIT else 2.0, "weight": 1}
    orders = actions_of(*case)
    done: dict[Action, float] = {}
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

    That of ZB-H1 is a third of it if all passes take equal times, and so is that of ZB-V with
    enough micro-batches.
    """
    order, pp, k, m = case
    found = idle_fraction(simulated(case))
    assert found == pytest.approx(layout_of(*case).ideal_idle)
    if order != "zbv" or 2 * m >= 3 * pp - 1:
        assert found == pytest.approx((pp - 1) / ((3 if order in SPLIT else 1) * k * m))


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
        for order in actions_of("zb_h1", 4, 1, 6)
    ]
    assert words == [
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5",
        "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5",
        "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5",
    ]


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (3, 5), (4, 12), (8, 32)])
@pytest.mark.parametrize("backward_s", [1.0, 1.3, 2.0])
def test_idle_time_of_zbv_is_a_pass_of_a_stage_per_rank(pp: int, m: int, backward_s: float) -> None:
    """It does not grow with the number of micro-batches, whichever kind of pass is the longest."""
    seconds = {"forward": 1.0, "backward": backward_s, "weight": 1.0}
    every = sum(seconds.values()) * 2 * m
    idle = idle_fraction(simulated(("zbv", pp, 2, m), seconds)) * every
    assert idle == pytest.approx((pp - 1) * backward_s)


@given(order=st.sampled_from(SPLIT), pp=st.integers(2, 6), m=st.integers(1, 14))
def test_zero_bubble_holds_no_more_than_the_first_rank_of_1f1b(
    order: PipelineOrder, pp: int, m: int
) -> None:
    k = 2 if order == "zbv" else 1  # stages of a rank, each with 1/k of its layers
    for actions in actions_of(order, pp, k, m):
        begun, left = set[tuple[int, int]](), set[tuple[int, int]]()
        for kind, *pass_ in actions:
            stage, micro = pass_
            if kind == "forward":
                begun.add((stage, micro))
                assert len(begun) + len(left) <= k * pp
            elif kind == "backward":
                begun.remove((stage, micro))
                left.add((stage, micro))
            else:
                left.remove((stage, micro))
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
    k = k if order == "interleaved" else STAGES.get(order, (1,))[0]
    layout = layout_of(order, pp, k, m)
    if order == "interleaved" and m % max(1, m // pp):
        with pytest.raises(AssertionError):
            actions_of(order, pp, k, m)
        return
    simulated((order, pp, k, m))
    orders = actions_of(order, pp, k, m)
    every = {
        Action(kind, stage, micro)
        for kind in schedules.PASSES
        if kind != "weight" or order in SPLIT
        for stage in range(pp * k)
        for micro in range(m)
    }
    assert sorted(itertools.chain(*orders)) == sorted(every)
    there = layout.stage_ranks
    for listed in (orders, schedules.forwards(orders)):
        plans = [schedules.Itinerary.of(listed, rank, layout) for rank in range(pp)]
        for rank, plan in enumerate(plans):
            assert all(there[action.stage] == rank for action in plan.actions)
            coming = {a for messages in plan.arrivals.values() for a in messages}
            edge = {"forward": 0, "backward": pp * k - 1}
            passes = [a for a in plan.actions if a.kind != "weight"]
            from_here = {("forward", pp), ("backward", pp - 1)} if order == "zbv" else set()
            own = {a for a in passes if rank == pp - 1 and a[:2] in from_here}
            assert coming == {a for a in passes if a.stage != edge[a.kind]} - own
            for peer, messages in plan.arrivals.items():
                sent = [message for message, to in plans[peer].sends.values() if to == rank]
                assert [*messages] == sent, "in the order in which they are sent"
            for message, through in plan.taken.items():
                sender = plans[there[message.stage]]  # this rank is the sender
                assert sender is plan
                for mine in through:  # the peer reads these before it sends the message
                    peer_plan = plans[there[mine.stage]]
                    made = next(a for a, (b, _) in peer_plan.sends.items() if b == message)
                    assert peer_plan.actions.index(mine) <= peer_plan.actions.index(made)
