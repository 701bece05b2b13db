"""In which order the ranks of a pipeline go through stages and micro-batches, and what they send.

Stage i lies on rank i mod pp, so that several stages a rank interleave. A rank does

    gpipe         all forwards, then all backwards (Huang et al. 2019)
    1f1b          as many forwards as fill the stages behind it, then one forward, one backward
                  (Narayanan et al. 2019): no more than pp micro-batches are under way at once
    interleaved   the same with several stages a rank: a round of micro-batches through the first,
                  then through the second (Narayanan et al. 2021, section 2.2)

These are the orders of torch.distributed.pipelining. They are written out here because torch has
them inside of classes that need process groups and modules, and the list that it keeps of its 1F1B
counts the last rank's micro-batches from 1.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from gridformer.config import PipelineOrder

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One micro-batch's pass through one stage."""

    kind: Kind
    stage: int
    micro: int


@lru_cache(maxsize=64)
def actions_of(pipeline: PipelineOrder, pp: int, k: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """By rank, what it does with k stages and m micro-batches.

    `interleaved` goes in rounds of about pp micro-batches, all of one size: m must be a multiple of
    their number, see `rounds`.
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
    """Of an interleaved order."""
    return max(1, m // pp)


def _of_rank(rank: int, ahead: int, pp: int, k: int, m: int, size: int) -> tuple[Action, ...]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    done: dict[tuple[Kind, int], int] = defaultdict(int)

    def take(kind: Kind, number: int) -> Action:
        local = number // size % k
        stage = (local if kind == "forward" else k - 1 - local) * pp + rank
        micro = done[kind, stage]
        done[kind, stage] += 1
        return Action(kind, stage, micro)

    found = [take("forward", number) for number in range(ahead)]
    for number in range(k * m):
        if ahead + number < k * m:
            found.append(take("forward", ahead + number))
        found.append(take("backward", number))
    return tuple(found)


def forwards(orders: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """The same without the backward passes: of an evaluation."""
    return tuple(tuple(a for a in order if a.kind == "forward") for order in orders)


def reader_of(action: Action, n_stages: int) -> Action | None:
    """The action that reads what an action makes, which is on another rank; None at the ends."""
    there = action.stage + (1 if action.kind == "forward" else -1)
    return Action(action.kind, there, action.micro) if 0 <= there < n_stages else None


@dataclass(frozen=True)
class Itinerary:
    """One rank's actions, and its messages. A message is named after the action that reads it.

    sends: by action, the message that it makes and where it goes. arrivals: by rank, the messages
    that come from it, in the order in which it sends them: where messages between two ranks have no
    tags, they must be received in that order. taken: by message that arrives, those of this rank
    which its sender had read before, so that they are certainly through.
    """

    actions: tuple[Action, ...]
    sends: dict[Action, tuple[Action, int]] = field(default_factory=dict)
    arrivals: dict[int, tuple[Action, ...]] = field(default_factory=dict)
    taken: dict[Action, tuple[Action, ...]] = field(default_factory=dict)

    @staticmethod
    def of(orders: tuple[tuple[Action, ...], ...], rank: int, n_stages: int) -> Itinerary:
        pp = len(orders)
        sends = {
            action: (reader, reader.stage % pp)
            for action in orders[rank]
            if (reader := reader_of(action, n_stages))
        }
        mine = dict(sends.values())
        arrivals: dict[int, tuple[Action, ...]] = {}
        taken: dict[Action, tuple[Action, ...]] = {}
        for peer in range(pp):
            coming, read = [], []
            for action in orders[peer]:
                if mine.get(action) == peer:
                    read.append(action)
                reader = reader_of(action, n_stages)
                if peer != rank and reader is not None and reader.stage % pp == rank:
                    coming.append(reader)
                    taken[reader] = tuple(read)
                    read = []
            if coming:
                arrivals[peer] = tuple(coming)
        return Itinerary(orders[rank], sends, arrivals, taken)
