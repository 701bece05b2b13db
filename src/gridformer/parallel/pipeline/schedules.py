"""The order in which the ranks of a pipeline run stages and micro-batches, and what they send.

Stage i is on rank i mod pp, so several stages per rank are interleaved. The schedules:

    gpipe         all forward passes, then all backward passes (Huang et al. 2019)
    1f1b          as many forward passes as fill the stages behind it, then one forward and one
                  backward in turn (Narayanan et al. 2019): at most pp micro-batches are in flight
    interleaved   1f1b with several stages per rank: a round of micro-batches through the first
                  stage of the rank, then through the second (Narayanan et al. 2021, section 2.2)
    zb_h1         1f1b whose backward passes leave the gradients of weights to weight passes: rank i
                  is i micro-batches late with these, so that pp micro-batches are in flight on each
                  rank, and they fill the time at the end (Qi et al. 2023, section 2.1)

The first three are the orders of torch.distributed.pipelining. They are implemented here because
torch has them inside classes that need process groups and modules, and because the list that torch
keeps of its 1F1B order counts the micro-batches of the last rank from 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from gridformer.config import PipelineOrder

Kind = Literal["forward", "backward", "weight"]
PASSES: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """The forward, backward or weight pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro: int


@lru_cache(maxsize=64)
def actions_of(pipeline: PipelineOrder, pp: int, k: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each rank, in order.

    `interleaved` works in rounds of about pp micro-batches, all of the same size, so m must be a
    multiple of the number of rounds, see `rounds`. The layout's checks ensure this.
    """
    assert k == 1 or pipeline == "interleaved", "the others have one stage a rank"
    assert m % rounds(pp, m) == 0 or pipeline != "interleaved", "layout.check was not called"
    size = m // rounds(pp, m) if k > 1 else m
    ahead = {
        "gpipe": lambda rank: m,
        "1f1b": lambda rank: pp - 1 - rank,
        "zb_h1": lambda rank: pp - 1 - rank,
        "interleaved": lambda rank: (k - 1) * size + 2 * (pp - 1 - rank),
    }[pipeline]
    orders = [_of_rank(rank, min(ahead(rank), k * m), pp, k, m, size) for rank in range(pp)]
    if pipeline == "zb_h1":
        return tuple(_with_weight_passes(order, rank) for rank, order in enumerate(orders))
    return tuple(orders)


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


def forwards(orders: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """Returns the forward passes of the orders, for evaluation."""
    return tuple(tuple(a for a in order if a.kind == "forward") for order in orders)


def reading_action(action: Action, n_stages: int) -> Action | None:
    """Returns the action on another rank that reads the result of `action`; None if none does."""
    if action.kind == "weight":
        return None
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
