"""The times of the kernels and messages of a trace on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gridformer.cluster.costs import Costs, MeshGroups, MessageTime
from gridformer.cluster.file import Cluster
from gridformer.cluster.kernels import KernelWork
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.plan.program import Await, Item, OnlyLayers, Phase, ReadBack, Run, Send
from gridformer.record.events import Event, Kernel, Passed, Read, Start, Trace, Wait

_PARTS = {
    "product": "products",
    "attention": "attention",
    "memory": "memory_bound",
    "copy": "memory_bound",
}


class EventTimes:
    """The times of the events of a run's traces.

    Args:
        run: The run.
        cluster: The cluster.
        decisions: The result of `decide_run`.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, decisions: Decisions) -> None:
        self.cluster, self.tf32 = cluster, run.train.tf32
        self.costs, self.on_cpu = Costs(cluster), cluster.device.kind == "cpu"
        mesh = mesh_ranks(run.layout, decisions.block).numpy()
        self.groups = MeshGroups(mesh, cluster)
        # By the id of a kernel, which is kept, and whether all passes are over.
        self._runs: dict[tuple[int, bool], tuple[Run, Kernel]] = {}
        # By the ids of a message's parts and pieces, which are kept in the message.
        self._starts: dict[Any, tuple[tuple[float, float | None], Start]] = {}

    def items(
        self, events: Iterable[Event], rank: int, only: OnlyLayers | None, last: bool = False
    ) -> list[Item]:
        """Returns what a replay needs of some events of a rank, among which there is no pass.

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
            elif isinstance(event, Read):
                items.append(ReadBack(phase))
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
        how = kernel.shape, kernel.op, kernel.order
        return self.costs.kernel_s(KernelWork(kernel.kind, kernel.flop, kernel.bytes, dtype, *how))

    def start_s(self, start: Start, rank: int) -> tuple[float, float | None]:
        """Returns the seconds that a message of a rank takes, and `Send.cpu`.

        Messages posted together travel together.
        """
        same = id(start.parts), id(start.pieces), start.op, start.group, start.size, start.dtype
        key = *same, rank
        if key not in self._starts:
            seconds, cpu = self._start(start, rank)
            self._starts[key] = (seconds, cpu if self.on_cpu and cpu < seconds else None), start
        return self._starts[key][0]

    def _start(self, start: Start, rank: int) -> MessageTime:
        n = len(start.ranks)
        if start.op == "p2p":
            # Messages in one direction share the rank's link, and the two directions do not.
            sums = {"send": [0.0, 0.0], "recv": [0.0, 0.0]}
            for part in start.parts:
                there = self.groups.places((rank, part.peer))
                one = self.costs.message("send", part.size * size_of(part.dtype), there)
                sums[part.what] = [a + b for a, b in zip(sums[part.what], one)]
            return MessageTime(*map(max, zip(*sums.values())))
        n_bytes = start.size * size_of(start.dtype) if start.dtype else 4
        op: Any = "all_reduce" if start.op == "barrier" else start.op
        if op == "all_gather":
            n_bytes *= n
        elif op == "all_to_all" and start.pieces is not None:
            n_bytes = sum(start.pieces[0]) * size_of(start.dtype)
        return self.costs.message(op, n_bytes, self.groups.places(tuple(start.ranks)))


def _phase_of(event: Start | Wait | Kernel | Read, last: bool) -> Phase:
    """Returns the phase of the step to which something belongs; `last` if all passes are over."""
    return "update" if last else "backward" if event.place.backward else "forward"


def size_of(dtype: str) -> int:
    """Returns the bytes of an element of a type, such as `float32`."""
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def kernels_of(trace: Trace) -> Iterator[Kernel]:
    """Yields the kernels of a trace, those of equal passes once."""
    seen: set[int] = set()

    def kernels(events: Iterable[Event]) -> Iterator[Kernel]:
        for event in events:
            if isinstance(event, Kernel):
                yield event
            elif isinstance(event, Passed) and id(event.events) not in seen:
                seen.add(id(event.events))
                yield from kernels(event.events)

    return kernels(trace.events)


def dtypes_without_peak(traces: Sequence[Trace], cluster: Cluster, tf32: bool) -> list[str]:
    """Returns the types of products in traces for which a cluster states no peak rate."""
    dtypes = {
        "tf32" if event.dtype == "float32" and tf32 else event.dtype
        for trace in traces
        for event in kernels_of(trace)
        if event.kind in ("product", "attention")
    }
    return sorted(dtypes - set(cluster.device.peak_tflops))
