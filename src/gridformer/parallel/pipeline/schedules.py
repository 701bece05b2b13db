"""The order in which the ranks of a pipeline run stages and micro-batches, and what they send.

Stage i is on rank i mod pp, so several stages per rank are interleaved. The schedules:

    gpipe         all forward passes, then all backward passes (Huang et al. 2019)
    1f1b          as many forward passes as fill the stages behind it, then one forward and one
                  backward in turn (Narayanan et al. 2019): at most pp micro-batches are in flight
    interleaved   1f1b with several stages per rank: a round of micro-batches through the first
                  stage of the rank, then through the second (Narayanan et al. 2021, section 2.2)

These are the orders of torch.distributed.pipelining. They are implemented here because torch has
them inside classes that need process groups and modules, and because the list that torch keeps of
its 1F1B order counts the micro-batches of the last rank from 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from gridformer.config import PipelineOrder

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int


@lru_cache(maxsize=64)
def actions_of(pipeline: PipelineOrder, pp: int, k: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each rank, in order.

    `interleaved` works in rounds of about pp micro-batches, all of the same size, so m must be a
    multiple of the number of rounds, see `rounds`. The layout's checks ensure this.
    """
    assert k == 1 or pipeline == "interleaved", "gpipe and 1f1b have one stage a rank"
    assert m % rounds(pp, m) == 0 or pipeline != "interleaved", "layout.check was not called"
    size = m // rounds(pp, m) if k > 1 else m
    ahead = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: pp - 1 - rank,
        "interleaved": lambda rank: (k - 1) * size + 2 * (pp - 1 - rank),
    }[pipeline]
    return tuple(_of_rank(rank, min(ahead(rank), k * m), pp, k, m, size) for rank in range(pp))


def rounds(pp: int, m: int) -> int:
    """Returns the number of rounds in which `interleaved` runs m micro-batches on pp ranks."""
    return max(1, m // pp)


def _of_rank(rank: int, ahead: int, pp: int, k: int, m: int, size: int) -> tuple[Action, ...]:
    """Runs `ahead` forwards, then forwards and backwards in turn, then the remaining backwards."""
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def take(kind: Kind, number: int) -> Action:
        local = number // size % k
        stage = (local if kind == "forward" else k - 1 - local) * pp + rank
        micro = done[kind, stage]
        done[kind, stage] += 1
        return Action(kind, stage, micro)

    actions = [take("forward", number) for number in range(ahead)]
    for number in range(k * m):
        if ahead + number < k * m:
            actions.append(take("forward", ahead + number))
        actions.append(take("backward", number))
    return tuple(actions)


def forwards(orders: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """Returns the orders without their backward passes, for evaluation."""
    return tuple(tuple(a for a in order if a.kind == "forward") for order in orders)


def reading_action(action: Action, n_stages: int) -> Action | None:
    """Returns the action on another rank that reads the result of `action`; None at the ends."""
    there = action.stage + (1 if action.kind == "forward" else -1)
    return Action(action.kind, there, action.micro) if 0 <= there < n_stages else None


@dataclass(frozen=True)
class Itinerary:
    """The actions of one rank and its messages, each identified by the action that reads it.

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
    def of(orders: tuple[tuple[Action, ...], ...], rank: int, n_stages: int) -> Itinerary:
        """Derives the messages of `rank` from the orders of all ranks."""
        pp = len(orders)
        sends = {
            action: (reader, reader.stage % pp)
            for action in orders[rank]
            if (reader := reading_action(action, n_stages))
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
                if peer != rank and reader is not None and reader.stage % pp == rank:
                    coming.append(reader)
                    taken[reader] = tuple(read)
                    read = []
            if coming:
                arrivals[peer] = tuple(coming)
        return Itinerary(orders[rank], sends, arrivals, taken)
