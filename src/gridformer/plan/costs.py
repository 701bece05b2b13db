"""The times of the kernels and messages of a trace on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gridformer.cluster.file import Cluster
from gridformer.cluster.kernels import KernelWork, kernel_s
from gridformer.cluster.messages import MessageWork, like_messages, message_cpu_s, message_s
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.plan.program import Await, Item, OnlyLayers, Phase, ReadBack, Run, Send
from gridformer.trace.events import Event, Kernel, Passed, Read, Start, Trace, Wait

_PARTS = {
    "product": "products",
    "attention": "attention",
    "memory": "memory_bound",
    "copy": "memory_bound",
}
_SecondsOf = Callable[[Cluster, MessageWork], float]
_FLOATS = ("float16", "bfloat16", "float32", "float64")


_Places = list[tuple[tuple[int, ...], int]]  # of each group its ranks, and `MessageWork.sharers`
_Along = tuple[tuple[int, tuple[int, ...]], ...]  # dimensions of the mesh, and places in each


class Costs:
    """Computes times once for each kind of kernel and message.

    Args:
        run: The run.
        cluster: The cluster.
        decisions: The result of `decide_run`.
        n_devices: How many devices take part in messages of all ranks; 0 means those of the run.
            For a pipeline that stands for a deeper one it is the number of the deeper one.
    """

    def __init__(
        self, run: RunConfig, cluster: Cluster, decisions: Decisions, n_devices: int = 0
    ) -> None:
        self.cluster, self.tf32, self.n_devices = cluster, run.train.tf32, n_devices
        self.mesh: Tensor = mesh_ranks(run.layout, decisions.block)
        self.on_cpu = cluster.device.kind == "cpu"
        self._place = {int(r): i for i, r in enumerate(self.mesh.flatten().tolist())}
        self._kernels: dict[Any, float] = {}
        # By the id of a kernel, which is kept, and whether all passes are over.
        self._runs: dict[tuple[int, bool], tuple[Run, Kernel]] = {}
        self._messages: dict[Any, tuple[float, float | None]] = {}
        # The same by the ids of a message's parts and pieces, which are kept in the message.
        self._starts: dict[Any, tuple[tuple[float, float | None], Start]] = {}
        self._groups: dict[tuple[int, ...], _Places] = {}  # by ranks
        self._alike: dict[_Along, _Places] = {}  # of all groups that are alike

    def items(
        self, events: Iterable[Event], rank: int, only: OnlyLayers | None, last: bool = False
    ) -> list[Item]:
        """Returns what a replay needs of some events of a rank.

        Args:
            events: The events, among which there is no pass.
            rank: The rank.
            only: Leaves out what is not in layers; None leaves out nothing.
            last: Whether all passes are over.
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
        key = kernel.op, kernel.kind, kernel.shape, kernel.dtype, kernel.bytes, kernel.order
        if key not in self._kernels:
            dtype = kernel.dtype
            if dtype == "float32" and self.tf32 and kernel.kind != "memory":
                dtype = "tf32"
            more = {"op": kernel.op, "order": kernel.order}
            known = {name: more[name] for name in more if name in KernelWork._fields}
            work = KernelWork(kernel.kind, kernel.flop, kernel.bytes, dtype, kernel.shape, **known)
            self._kernels[key] = kernel_s(self.cluster, work)
        return self._kernels[key]

    def start_s(self, start: Start, rank: int) -> tuple[float, float | None]:
        """Returns the seconds that a message takes, and `Send.cpu`.

        Messages posted together travel together.

        Args:
            start: The message.
            rank: The rank that starts it.
        """
        same = id(start.parts), id(start.pieces), start.op, start.group, start.size, start.dtype
        again = *same, rank
        known = self._starts.get(again)
        if known is not None:
            return known[0]
        parts = tuple((part.what, part.peer, part.size, part.dtype) for part in start.parts)
        sender = rank if parts else None  # which link a part takes depends on both of its ends
        key = start.op, start.group, start.size, start.dtype, parts, start.pieces, sender
        if key not in self._messages:
            found = self._start_s(start, rank, message_s)
            cpu = self._start_s(start, rank, message_cpu_s) if self.on_cpu else found
            self._messages[key] = found, cpu if cpu < found else None
        self._starts[again] = self._messages[key], start
        return self._messages[key]

    def _start_s(self, start: Start, rank: int, seconds_of: _SecondsOf) -> float:
        n = len(start.ranks)
        if start.op == "p2p":
            # Messages in one direction share the rank's link, and the two directions do not.
            sums = {"send": 0.0, "recv": 0.0}
            for part in start.parts:
                n_bytes = part.size * size_of(part.dtype)
                sums[part.what] += self._message_s("send", n_bytes, (rank, part.peer), seconds_of)
            return max(sums.values())
        n_bytes = start.size * size_of(start.dtype) if start.dtype else 4
        op = "all_reduce" if start.op == "barrier" else start.op
        if op == "all_gather":
            n_bytes *= n
        elif op == "all_to_all" and start.pieces is not None:
            n_bytes = sum(start.pieces[0]) * size_of(start.dtype)
        return self._message_s(op, n_bytes, start.ranks, seconds_of)

    def _message_s(
        self, op: Any, n_bytes: float, ranks: Sequence[int], seconds_of: _SecondsOf
    ) -> float:
        """The slowest of all groups like this one counts, because others wait for it."""
        found = self._places(tuple(ranks))
        return max(
            seconds_of(self.cluster, MessageWork(op, n_bytes, members, sharers))
            for members, sharers in found
        )

    def _places(self, ranks: tuple[int, ...]) -> _Places:
        """Returns groups like this one that lie differently, and `MessageWork.sharers` of each."""
        if self.n_devices and len(ranks) == self.mesh.numel():
            return [(tuple(range(self.n_devices)), 1)]
        if ranks not in self._groups:
            along = self._along(ranks)
            if along not in self._alike:
                self._alike[along] = self._different(self._groups_along(along))
            self._groups[ranks] = self._alike[along]
        return self._groups[ranks]

    def _different(self, like: list[list[int]]) -> _Places:
        places = np.array(like)
        sizes = [level.size for level in self.cluster.levels]
        units = np.stack([places // size for size in sizes], 1)
        lies = units - units[:, :, :1]
        different: dict[bytes, tuple[int, ...]] = {}
        for group, how in zip(like, lies):
            different.setdefault(how.tobytes(), tuple(group))
        return [(group, like_messages(self.cluster, group, like)) for group in different.values()]

    def like_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """Returns the groups that have the same places along some axes, and any place in others."""
        return self._groups_along(self._along(ranks))

    def _along(self, ranks: Sequence[int]) -> _Along:
        """Returns the dimensions of the mesh in which ranks differ, and their places in each."""
        places = [*zip(*(self._unravel(self._place[rank]) for rank in ranks))]
        return tuple((d, at) for d, at in enumerate(places) if len({*at}) > 1)

    def _groups_along(self, along: _Along) -> list[list[int]]:
        shape, varying = self.mesh.shape, [d for d, _ in along]
        fixed = [d for d in range(len(shape)) if d not in varying]
        view = self.mesh.permute(*fixed, *varying).reshape(
            math.prod(shape[d] for d in fixed), *(shape[d] for d in varying)
        )
        index: list[Any] = [torch.tensor(at) for _, at in along]
        whole: Any = slice(None)
        found: list[list[int]] = view[(whole, *index)].tolist()
        return found

    def _unravel(self, place: int) -> list[int]:
        found = []
        for size in reversed(self.mesh.shape):
            place, rest = divmod(place, size)
            found.append(rest)
        return found[::-1]


def _phase_of(event: Start | Wait | Kernel | Read, last: bool) -> Phase:
    """Returns the phase of the step to which something belongs; `last` if all passes are over."""
    return "update" if last else "backward" if event.place.backward else "forward"


def size_of(dtype: str) -> int:
    """Returns the bytes of an element of a type, such as `float32`."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def kernels_of(trace: Trace) -> Iterator[Kernel]:
    """Yields the kernels of a trace, those of equal passes once."""
    seen: set[int] = set()
    for event in trace.events:
        if isinstance(event, Kernel):
            yield event
        elif isinstance(event, Passed) and id(event.events) not in seen:
            seen.add(id(event.events))
            yield from (one for one in event.events if isinstance(one, Kernel))


def dtypes_without_peak(traces: Sequence[Trace], cluster: Cluster, tf32: bool) -> list[str]:
    """Returns the types of products for which a cluster states no peak rate.

    Args:
        traces: Traces of the ranks, whose products count.
        cluster: The cluster.
        tf32: Whether products in float32 run as TF32, which has a peak of its own.
    """
    found = {
        "tf32" if event.dtype == "float32" and tf32 else event.dtype
        for trace in traces
        for event in kernels_of(trace)
        if event.kind in ("product", "attention")
    }
    return sorted(found - set(cluster.device.peak_tflops))
