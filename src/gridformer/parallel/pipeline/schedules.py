"""The order in which the ranks of a pipeline run stages and micro-batches, and what they send.

`LayoutConfig.stage_ranks` says which rank holds a stage. The schedules:

    gpipe         all forward passes, then all backward passes (Huang et al. 2019)
    1f1b          as many forward passes as fill the stages behind it, then one forward and one
                  backward in turn (Narayanan et al. 2019): at most pp micro-batches are in flight
    interleaved   1f1b with several stages per rank: a round of micro-batches through the first
                  stage of the rank, then through the second (Narayanan et al. 2021, section 2.2)
    zb_h1         1f1b whose backward passes leave the gradients of weights to weight passes: rank i
                  is i micro-batches late with these, so that pp micro-batches are in flight on each
                  rank, and they fill the time at the end (Qi et al. 2023, section 2.1)
    zbv           the same with two stages per rank, there and back, so that the backward pass of a
                  micro-batch begins where its forward pass did: each rank holds pp micro-batches,
                  and waits half as long (ZB-V; Qi et al. 2023, section 6, and 2024)

The first three are the orders of torch.distributed.pipelining. They are implemented here because
torch has them inside classes that need process groups and modules, and because the list that torch
keeps of its 1F1B order counts the micro-batches of the last rank from 1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from gridformer.config import LayoutConfig

Kind = Literal["forward", "backward", "weight"]
PASSES: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """The forward, backward or weight pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int


@lru_cache(maxsize=64)
def actions_of(layout: LayoutConfig, m: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each rank for m micro-batches, in order.

    `interleaved` works in rounds of about pp micro-batches, all of the same size, so m must be a
    multiple of the number of rounds, see `rounds`. The layout's checks ensure this.
    """
    pipeline, pp, k = layout.pipeline_order, layout.pp, layout.stages_per_rank
    stages = [layout.stages_on(rank) for rank in range(pp)]
    if pipeline == "zbv":
        return tuple(_there_and_back(rank, stages[rank], pp, m) for rank in range(pp))
    assert k == 1 or pipeline == "interleaved", "the others have one stage a rank"
    assert m % rounds(pp, m) == 0 or pipeline != "interleaved", "layout.check was not called"
    size = m // rounds(pp, m) if k > 1 else m
    ahead = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: pp - 1 - rank,
        "zb_h1": lambda rank: pp - 1 - rank,
        "interleaved": lambda rank: (k - 1) * size + 2 * (pp - 1 - rank),
    }[pipeline]
    orders = [_of_rank(mine, min(ahead(rank), k * m), m, size) for rank, mine in enumerate(stages)]
    if pipeline == "zb_h1":
        return tuple(_with_weight_passes(order, rank) for rank, order in enumerate(orders))
    return tuple(orders)


def rounds(pp: int, m: int) -> int:
    """Returns the number of rounds in which `interleaved` runs m micro-batches on pp ranks."""
    return max(1, m // pp)


def _of_rank(stages: Sequence[int], ahead: int, m: int, size: int) -> tuple[Action, ...]:
    """Runs `ahead` forwards, then forwards and backwards in turn, then the remaining backwards."""
    k = len(stages)
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def take(kind: Kind, number: int) -> Action:
        local = number // size % k
        stage = stages[local if kind == "forward" else k - 1 - local]
        micro = done[kind, stage]
        done[kind, stage] += 1
        return Action(kind, stage, micro)

    actions = [take("forward", number) for number in range(ahead)]
    for number in range(k * m):
        if ahead + number < k * m:
            actions.append(take("forward", ahead + number))
        actions.append(take("backward", number))
    return tuple(actions)


def _with_weight_passes(order: tuple[Action, ...], late: int) -> tuple[Action, ...]:
    """Adds a weight pass after each backward pass, for the one that was `late` passes before it."""
    actions: list[Action] = []
    left: list[Action] = []
    for action in order:
        actions.append(action)
        if action.kind == "backward":
            left.append(action._replace(kind="weight"))
            if len(left) > late:
                actions.append(left.pop(0))
    return (*actions, *left)


def _there_and_back(rank: int, stages: Sequence[int], pp: int, m: int) -> tuple[Action, ...]:
    """Returns the order of a rank with zbv, from counts of passes of its stages 0 and 1.

    In the middle a rank runs all six passes in turn, each with its input at hand. Before and behind
    it, ranks nearer to the first stage run more passes of stage 0, which the others wait for.
    """
    after = pp - rank
    phases = [
        ("F0", 2 * after - 1),
        ("F1 F0", rank),
        ("F1 B1 W1", after),
        ("F0 B0 W0 F1 B1 W1", max(m, 2 * pp - 1) - pp),
        ("B0 B1", rank),
        ("B0 W0", after),
        ("W1", rank),
        ("W0", rank),
    ]
    kinds = {kind[0].upper(): kind for kind in PASSES}
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    words = [word for passes, times in phases for word in passes.split() * times]
    actions = [Action(kinds[w[0]], stages[int(w[1])], next(numbers[w])) for w in words]
    return tuple(action for action in actions if action.micro < m)  # with few, others are left out


def forwards(orders: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """Returns the forward passes of the orders, for evaluation."""
    return tuple(tuple(a for a in order if a.kind == "forward") for order in orders)


def reading_action(action: Action, n_stages: int) -> Action | None:
    """Returns the action that reads the result of `action`; None if none does."""
    if action.kind == "weight":
        return None
    there = action.stage + (1 if action.kind == "forward" else -1)
    return Action(action.kind, there, action.micro) if 0 <= there < n_stages else None


@dataclass(frozen=True)
class Itinerary:
    """The actions of one rank and its messages, each identified by the action that reads it.

    What two of its own stages pass to each other is no message.

    Attributes:
        actions: The actions of the rank, in order.
        sends: For each action that sends, its message and the destination rank.
        arrivals: For each sending rank, its messages in the order in which it sends them. Messages
            between two ranks have no tags on some backends and must be received in this order.
        taken: For each arriving message, the messages of this rank that its sender read before it
            sent, so that these have certainly been delivered.
    """

    actions: tuple[Action, ...]
    sends: dict[Action, tuple[Action, int]] = field(default_factory=dict)
    arrivals: dict[int, tuple[Action, ...]] = field(default_factory=dict)
    taken: dict[Action, tuple[Action, ...]] = field(default_factory=dict)

    @staticmethod
    def of(orders: tuple[tuple[Action, ...], ...], rank: int, layout: LayoutConfig) -> Itinerary:
        """Derives the messages of `rank` from the orders of all ranks."""
        pp, on, n_stages = layout.pp, layout.stage_ranks, layout.n_stages
        sends = {
            action: (reader, on[reader.stage])
            for action in orders[rank]
            if (reader := reading_action(action, n_stages)) and on[reader.stage] != rank
        }
        mine = dict(sends.values())
        arrivals: dict[int, tuple[Action, ...]] = {}
        taken: dict[Action, tuple[Action, ...]] = {}
        for peer in sorted({(rank - 1) % pp, (rank + 1) % pp}):  # the others send it nothing
            coming, read = [], []
            for action in orders[peer]:
                if mine.get(action) == peer:
                    read.append(action)
                reader = reading_action(action, n_stages)
                if peer != rank and reader is not None and on[reader.stage] == rank:
                    coming.append(reader)
                    taken[reader] = tuple(read)
                    read = []
            if coming:
                arrivals[peer] = tuple(coming)
        return Itinerary(orders[rank], sends, arrivals, taken)
