"""When the ranks of a pipeline begin and end their passes, by running through their schedule.

It takes the order of passes that the executor takes, with the seconds of a forward and of a
backward pass of each rank. A pass begins when its rank is free and its input has come. A rank sends
one message in each direction at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gridformer.config import LayoutConfig, PipelineOrder
from gridformer.parallel.pipeline.schedules import Action, actions_of, reading_action, rounds

LARGE = 64  # stages; of a pipeline with more, fewer rounds are run through


@dataclass(frozen=True)
class PassSeconds:
    """What the passes of one micro-batch through a stage take.

    Attributes:
        forward, backward: Seconds; those of the backward pass on average over micro-batches.
        gathered: Seconds in which the weights of the stage are gathered once a step.
        adds: Seconds of adding to gradients that exist already, which the first backward pass does
            not.
    """

    forward: float
    backward: float
    gathered: float = 0.0
    adds: float = 0.0

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


def pass_times(
    layout: LayoutConfig,
    stages: Sequence[PassSeconds],
    begins: Sequence[float],
    sends_s: Sequence[float],
) -> list[tuple[float, float]]:
    """Returns when each rank begins its first pass and ends its last, in seconds.

    Args:
        layout: The layout, with or without a pipeline.
        stages: What the passes of each stage take.
        begins: When each rank can begin its first pass.
        sends_s: Seconds of a message between each rank and the next; the last sends to the first
            if it has several stages.
    """
    m, pp, k = layout.micro_batches, layout.pp, layout.stages_per_rank
    if pp == 1:
        one, begin = stages[0], begins[0]
        return [(begin, begin + max(0.0, one.gathered - one.forward) + m * one.both)]
    order = layout.pipeline_order
    few = _few(order, pp, k, m)
    free = [*begins]
    began: list[float | None] = [None] * pp
    later = [stage.backward + stage.adds / m for stage in stages]  # all but the first
    takes = [[stage.forward for stage in stages], later]
    first_s = [seconds - stage.adds for seconds, stage in zip(later, stages)]
    weights = _weights_are_there(stages, begins)
    linked = [[0.0] * pp, [0.0] * pp]  # when a rank has sent its messages, by direction
    arrived: list[float] = []
    for rank, stage, kind, before, is_first, sends in _program(order, pp, k, few):
        begin = free[rank]
        if before >= 0:
            begin = max(begin, arrived[before])
        if began[rank] is None:
            began[rank] = begin
        if not is_first:
            end = begin + takes[kind][stage]
        elif kind:
            end = begin + first_s[stage]
        else:
            end = max(begin + takes[kind][stage], weights[stage])
        free[rank] = end
        if sends:
            end = linked[kind][rank] = max(end, linked[kind][rank]) + sends_s[rank - kind]
        arrived.append(end)
    busy = max(sum(stage.both for stage in stages[rank::pp]) for rank in range(pp))
    each = max(busy, k * max(sends_s if k > 1 else sends_s[:-1]))
    return [(start or 0.0, end + (m - few) * each) for start, end in zip(began, free)]


def _weights_are_there(stages: Sequence[PassSeconds], begins: Sequence[float]) -> list[float]:
    """Returns when the weights of each stage are gathered; a rank gathers one stage at a time.

    What is outside layers travels before them, and the first pass begins when it has arrived.
    """
    pp = len(begins)
    found = [stage.gathered for stage in stages]
    for i in range(pp, len(found)):
        found[i] += found[i - pp]
    return [begins[i % pp] + seconds for i, seconds in enumerate(found)]


def _few(order: PipelineOrder, pp: int, k: int, m: int) -> int:
    """Returns how many micro-batches to run; others only add their time on the slowest rank."""
    if order != "interleaved":
        return min(m, 2 * pp)
    n = rounds(pp, m)
    return m // n * min(n, 2 if pp * k <= LARGE else 1)


@lru_cache(maxsize=512)
def _program(
    order: PipelineOrder, pp: int, k: int, m: int
) -> tuple[tuple[int, int, int, int, bool, bool], ...]:
    """Returns the passes of all ranks, each after those that it waits for.

    Returns:
        For each pass its rank and stage, 0 for forward or 1 for backward, the position of the pass
        whose result it reads or -1, whether it is of the first micro-batch, and whether its result
        is sent.
    """
    orders = actions_of(order, pp, k, m)
    n_stages = pp * k
    position: dict[Action, int] = {}
    at = [0] * pp
    found: list[tuple[int, int, int, int, bool, bool]] = []
    waiting = deque(range(pp))
    while waiting:
        rank = waiting.popleft()
        while at[rank] < len(orders[rank]):
            action = orders[rank][at[rank]]
            source = _source_of(action, n_stages)
            if source is not None and source not in position:
                break
            reader = reading_action(action, n_stages)
            position[action] = len(found)
            before = -1 if source is None else position[source]
            kind = 0 if action.kind == "forward" else 1
            found.append((rank, action.stage, kind, before, action.micro == 0, reader is not None))
            at[rank] += 1
            if reader is not None:
                waiting.append(reader.stage % pp)
    assert len(found) == sum(len(one) for one in orders), "the schedule waits for itself"
    return tuple(found)


def _source_of(action: Action, n_stages: int) -> Action | None:
    """Returns the pass of another rank whose result a pass reads; None at the ends."""
    before = action.stage - 1 if action.kind == "forward" else action.stage + 1
    return action._replace(stage=before) if 0 <= before < n_stages else None
