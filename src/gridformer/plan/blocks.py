"""Turns traces into programs, with one item for each part that depends on no other rank.

The time of such a part follows from two of its replays. The compute stream ends at the latest of
all chains of things that wait for each other, and each chain begins where the stream is at first or
where the host is: so the end is max(stream + a, host + b), where a is found with a host that is far
ahead, and b with a stream that is idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from gridformer.plan.costs import EventTimes
from gridformer.plan.program import (
    Await,
    Block,
    Item,
    OnlyLayers,
    Program,
    ReadBack,
    Run,
    Send,
)
from gridformer.plan.replay import replay
from gridformer.record.events import Event, Passed, Start, Trace

_FAR = 1e4  # seconds; more than any pass takes


class Programs:
    """Makes the programs of ranks.

    Args:
        costs: The times of kernels and messages.
        traces: The traces of all ranks that are replayed.
        launch_s: Seconds of a launch.
        layers: Whether only transformer layers count.
        whole: Whether passes are replayed kernel by kernel, as they must be on a CPU.
    """

    def __init__(
        self,
        costs: EventTimes,
        traces: Sequence[Trace],
        launch_s: float,
        layers: bool = False,
        whole: bool = False,
    ) -> None:
        self.costs, self.launch_s, self.layers, self.whole = costs, launch_s, layers, whole
        self._ranks = {trace.rank for trace in traces}
        self._parts: dict[tuple[int, bool], list[Item]] = {}
        self._known: dict[Any, Block] = {}

    def program(self, trace: Trace) -> Program:
        """Returns what a replay needs of a trace, which must have kernels."""
        only = OnlyLayers() if self.layers else None
        items: list[Item] = []
        singles: list[Event] = []
        for number, event in enumerate(trace.events):
            last = number >= trace.update > 0
            if isinstance(event, Passed) or number == trace.update:
                items += self.costs.items(singles, trace.rank, only, number > trace.update > 0)
                singles = []
            if not isinstance(event, Passed):
                singles.append(event)
            elif only is not None and not event.closed:
                items += self.costs.items(event.unfolded(), trace.rank, only, last)
            else:
                items += self._passed(event, trace.rank, last)
        items += self.costs.items(singles, trace.rank, only, trace.update > 0)
        return Program(trace.rank, items)

    def _passed(self, event: Passed, rank: int, last: bool) -> list[Item]:
        """Returns the items of some parts, among which are blocks for what depends on nothing."""
        key = id(event.events), last
        if key not in self._parts:
            self._parts[key] = self._items(event, rank, last)
        return [
            Send(event.number(item.number), *item[1:])
            if type(item) is Send
            else Await(event.number(item.number), item.phase)
            if type(item) is Await
            else item
            for item in self._parts[key]
        ]

    def _items(self, event: Passed, rank: int, last: bool) -> list[Item]:
        if self._closed(event) and not self.whole:
            return [self._block(event, rank)]
        found: list[Item] = []
        for nested, some in itertools.groupby(event.events, lambda one: isinstance(one, Passed)):
            if nested:
                found += [item for one in some for item in self._passed(one, rank, last)]  # type: ignore[arg-type]
            else:
                found += self.costs.items(some, rank, None, last)
        return found

    def _closed(self, event: Passed) -> bool:
        """Whether parts wait for what they start, and for nothing else, and for no other rank."""
        starts = (one for one in event.events if isinstance(one, Start))
        return event.closed and all(len(self._ranks.intersection(one.ranks)) < 2 for one in starts)

    def _block(self, event: Passed, rank: int) -> Block:
        items = self.costs.items(event.events, rank, OnlyLayers() if self.layers else None)
        groups: dict[str, int] = {}
        key = tuple(_time_of(item, groups) for item in items)
        if key not in self._known:
            program = Program(rank, items)
            (ahead,) = replay([program], self.launch_s, begins=(-_FAR, 0.0))
            (behind,) = replay([program], self.launch_s, begins=(0.0, -_FAR))
            launches = ahead.n_launches
            whole = sum(ahead.phases.values()) or 1.0
            self._known[key] = Block(
                "pass",
                ahead.end,
                behind.end,
                self.launch_s * launches,
                launches,
                ahead,
                behind,
                {phase: seconds / whole for phase, seconds in ahead.phases.items()},
            )
        return self._known[key]


def _time_of(item: Item, groups: dict[str, int]) -> Any:
    """Returns what is equal for items that take the same time in the same way.

    Args:
        item: The item.
        groups: Numbers of the groups so far. Which groups of an axis they are makes no difference,
            but the messages of one group wait for each other.
    """
    if isinstance(item, Run):
        return item.seconds, item.launches, item.part, item.phase
    if isinstance(item, Send):
        start = item.start
        group = groups.setdefault(start.group, len(groups))
        return group, start.axis, item.seconds, item.number, item.phase
    return "read" if isinstance(item, ReadBack) else item
