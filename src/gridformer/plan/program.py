"""Turns traces into programs: kernels and messages with their times on a cluster.

Parts of a trace that depend on no other rank become one item each. The time of such a part follows
from two of its replays. The compute stream ends at the latest of all chains of things that wait for
each other, and each chain begins where the stream is at first or where the host is: so the end is
max(stream + a, host + b), where a is found with a host that is far ahead, and b with a stream that
is idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gridformer.cluster.costs import Costs, KernelWork, MeshGroups, MessageTime
from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.plan.replay import Await, Block, Item, Phase, ReadBack, Run, Send, replay
from gridformer.record.events import Event, Kernel, Passed, Read, Start, Trace, Wait

_FAR = 1e4  # seconds; more than any pass takes
_LAYER = re.compile(r"(^|\.)(\w*layers|\w*blocks)\.\d+(\.|$)")
_PIPELINE = "pipeline"  # the label of messages between stages
_PARTS = {
    "product": "products",
    "attention": "attention",
    "memory": "memory_bound",
    "copy": "memory_bound",
}


class OnlyLayers:
    """Selects what belongs to the layers of a transformer, and the messages between its stages."""

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def keeps(self, event: Start | Wait | Kernel | Read) -> bool:
        """Returns whether an event counts. Ask for the events of a rank in order."""
        if isinstance(event, Wait):
            return event.number in self._kept
        inside = _LAYER.search(event.place.module) is not None
        if isinstance(event, Start):
            inside = inside or event.label == _PIPELINE
            if inside:
                self._kept.add(event.number)
        elif isinstance(event, Kernel):
            inside = inside and not event.update
        return inside


class EventTimes:
    """The times of the events of a run's traces.

    Attributes:
        dtypes: The types of the products and of attention that have been timed.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, decisions: Decisions) -> None:
        self.costs, self.tf32, self.dtypes = Costs(cluster), run.train.tf32, set[str]()
        mesh = mesh_ranks(run.layout, decisions.block).numpy()
        self.groups = MeshGroups(mesh, cluster)
        # By the id of a kernel, which is kept, and whether all passes are over.
        self._runs: dict[tuple[int, bool], tuple[Run, Kernel]] = {}
        # By the ids of a message's parts and pieces, which are kept in the message.
        self._starts: dict[Any, tuple[tuple[float, float | None], Start]] = {}

    def items(
        self, events: Iterable[Event], rank: int, only: OnlyLayers | None, last: bool = False
    ) -> list[Item]:
        """Returns the items of some events of a rank; passes among them are left out.

        `only` may leave out what is not in layers; `last` says that all passes are over.
        """
        items: list[Item] = []
        for event in events:
            if isinstance(event, Passed) or (only is not None and not only.keeps(event)):
                continue
            if isinstance(event, Kernel):
                known = self._runs.get((id(event), last))
                if known is None:
                    known = self._runs[id(event), last] = self._run(event, last), event
                items.append(known[0])
                continue
            phase = _phase_of(event, last)
            if isinstance(event, Start):
                seconds, cpu = self.start_s(event, rank)
                items.append(Send(event.number, event, seconds, phase, cpu))
            elif isinstance(event, Wait):
                items.append(Await(event.number, phase))
            else:
                items.append(ReadBack())
        return items

    def _run(self, kernel: Kernel, last: bool) -> Run:
        # Backward passes copy nothing but the moments of what they update.
        moments = kernel.kind == "copy" and kernel.place.backward
        part = "update" if kernel.update or moments else _PARTS[kernel.kind]
        module, phase = kernel.place.module, _phase_of(kernel, last)
        return Run(self.kernel_s(kernel), kernel.launches, part, kernel.op, module, phase)

    def kernel_s(self, kernel: Kernel) -> float:
        """Returns the seconds that a kernel takes on the device."""
        dtype = kernel.dtype
        if dtype == "float32" and self.tf32 and kernel.kind != "memory":
            dtype = "tf32"
        if kernel.kind in ("product", "attention"):
            self.dtypes.add(dtype)
        how = kernel.shape, kernel.op, kernel.order
        return self.costs.kernel_s(KernelWork(kernel.kind, kernel.flop, kernel.bytes, dtype, *how))

    def start_s(self, start: Start, rank: int) -> tuple[float, float | None]:
        """Returns the seconds that a message of a rank takes, and `Send.cpu`."""
        same = id(start.parts), id(start.pieces), start.op, start.group, start.size, start.dtype
        key = *same, rank
        if key not in self._starts:
            seconds, cpu = self._start(start, rank)
            hidden = self.costs.on_cpu and cpu < seconds
            self._starts[key] = (seconds, cpu if hidden else None), start
        return self._starts[key][0]

    def _start(self, start: Start, rank: int) -> MessageTime:
        n = len(start.ranks)
        if start.op == "p2p":
            # Messages in one direction share the rank's link, and the two directions do not.
            sums = {"send": [0.0, 0.0], "recv": [0.0, 0.0]}
            for part in start.parts:
                there = self.groups.places((rank, part.peer))
                one = self.costs.message("send", part.size * _itemsize(part.dtype), there)
                sums[part.what] = [a + b for a, b in zip(sums[part.what], one)]
            return MessageTime(*map(max, zip(*sums.values())))
        n_bytes = float(start.size * _itemsize(start.dtype) if start.dtype else 4)
        op: Any = "all_reduce" if start.op == "barrier" else start.op
        if op == "all_gather":
            n_bytes *= n
        elif op == "all_to_all" and start.pieces is not None:
            # A rank's own piece, which may be left out, is taken for as large as others.
            own = start.ranks.index(rank)
            moved = max(sum(one) - one[own] for one in start.pieces)
            n_bytes = moved * _itemsize(start.dtype) * n / max(1, n - 1)
        return self.costs.message(op, n_bytes, self.groups.places(tuple(start.ranks)))


def _phase_of(event: Start | Wait | Kernel | Read, last: bool) -> Phase:
    return "update" if last else "backward" if event.place.backward else "forward"


def _itemsize(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


class Programs:
    """Makes the programs of ranks, of which `traces` are replayed together.

    With `whole` passes are replayed kernel by kernel, as they must be on a CPU.
    """

    def __init__(
        self,
        times: EventTimes,
        traces: Sequence[Trace],
        launch_s: float,
        layers_only: bool = False,
        whole: bool = False,
    ) -> None:
        self.times, self.launch_s, self.whole = times, launch_s, whole
        self.layers_only, self._ranks = layers_only, {trace.rank for trace in traces}
        self._parts: dict[tuple[int, bool], list[Item]] = {}
        self._known: dict[Any, Block] = {}

    def program(self, trace: Trace) -> list[Item]:
        """Returns what the rank of a trace does, in order."""
        only = OnlyLayers() if self.layers_only else None
        items: list[Item] = []
        singles: list[Event] = []
        for number, event in enumerate(trace.events):
            last = number >= trace.update > 0
            if isinstance(event, Passed) or number == trace.update:
                items += self.times.items(singles, trace.rank, only, number > trace.update > 0)
                singles = []
            if not isinstance(event, Passed):
                singles.append(event)
            elif only is not None and not event.closed:
                items += self.times.items(event.unfolded(), trace.rank, only, last)
            else:
                items += self._passed(event, trace.rank, last)
        return items + self.times.items(singles, trace.rank, only, trace.update > 0)

    def _passed(self, event: Passed, rank: int, last: bool) -> list[Item]:
        """Returns the items of a part, which is one block if it depends on no other rank."""
        key = id(event.events), last
        if key not in self._parts:
            starts = (one for one in event.events if isinstance(one, Start))
            alone = all(len(self._ranks.intersection(one.ranks)) < 2 for one in starts)
            block = event.closed and alone and not self.whole
            self._parts[key] = (
                [self._block(event, rank)]
                if block
                else self.times.items(event.events, rank, None, last)
            )
        return [
            Send(event.number(item.number), *item[1:])
            if type(item) is Send
            else Await(event.number(item.number), item.phase)
            if type(item) is Await
            else item
            for item in self._parts[key]
        ]

    def _block(self, event: Passed, rank: int) -> Block:
        items = self.times.items(event.events, rank, OnlyLayers() if self.layers_only else None)
        # Which groups of an axis send makes no difference, but those of one wait for each other.
        groups: dict[str, int] = {}
        key = tuple(
            (groups.setdefault(one.start.group, len(groups)), one.start.axis, one[0], *one[2:])
            if isinstance(one, Send)
            else one
            for one in items
        )
        if key not in self._known:
            (ahead,) = replay({rank: items}, self.launch_s, begins=(-_FAR, 0.0))
            (behind,) = replay({rank: items}, self.launch_s, begins=(0.0, -_FAR))
            self._known[key] = Block(ahead, behind)
        return self._known[key]
