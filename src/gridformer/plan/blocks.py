"""Turns traces into programs, with one item for each pass that depends on no other rank.

The time of such a pass follows from two of its replays. The compute stream ends at the latest of
all chains of things that wait for each other, and each chain begins where the stream is at first or
where the host is: so the end is max(stream + a, host + b), where a is found with a host that is far
ahead, and b with a stream that is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gridformer.plan.costs import EventTimes
from gridformer.plan.program import Block, Item, OnlyLayers, Program, ReadBack, Run, Send
from gridformer.plan.replay import replay
from gridformer.trace.events import Passed, Start, Trace, Wait

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
        self._blocks: dict[int, Block | None] = {}
        self._known: dict[Any, Block] = {}

    def program(self, trace: Trace) -> Program:
        """Returns what a replay needs of a trace, which must have kernels."""
        only = OnlyLayers() if self.layers else None
        events, update = trace.events, trace.update
        items: list[Item] = []
        begun = 0  # where the events begin that have no items yet
        passes = [n for n, event in enumerate(events) if isinstance(event, Passed)]
        border = [update] if update > 0 else []
        for end in sorted({*passes, *border, len(events)}):
            items += self.costs.items(events[begun:end], trace.rank, only, end > update > 0)
            begun = end
            event = events[end] if end < len(events) else None
            if not isinstance(event, Passed):
                continue
            block = None if self.whole else self._block_of(event, trace.rank)
            if block is not None:
                items.append(block)
            else:
                items += self.costs.items(event.unfolded(), trace.rank, only, end >= update > 0)
            begun = end + 1
        return Program(trace.rank, items)

    def _block_of(self, event: Passed, rank: int) -> Block | None:
        """Returns the block of a pass; None if the pass depends on other ranks or passes."""
        key = id(event.events)
        if key not in self._blocks:
            closed = self._closed(event, rank)
            self._blocks[key] = self._block(event, rank) if closed else None
        return self._blocks[key]

    def _closed(self, event: Passed, rank: int) -> bool:
        """Whether a pass waits for what it starts, and for nothing else."""
        left: set[int] = set()
        for one in event.events:
            if isinstance(one, Start):
                if len(self._ranks.intersection(one.ranks)) > 1:
                    return False
                left.add(one.number)
            elif isinstance(one, Wait):
                if one.number not in left:
                    return False
                left.remove(one.number)
        return not left

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
        return group, start.axis, item.seconds, start.number, item.phase
    return "read" if isinstance(item, ReadBack) else item
