"""A process group that sends nothing and records every message that is handed to it.

It imitates NCCL: its messages take the paths of `gridformer.comm` that NCCL uses, and it reports
what NCCL would refuse. All ranks of a run create the same groups in the same order, so the names
that torch numbers them with are the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm.recorder import Record, Recorder
from gridformer.mesh import groups
from gridformer.record.device import NAME, Backend, fake_gpu
from gridformer.record.events import (
    Groups,
    Kernel,
    Member,
    Part,
    Place,
    Start,
    Trace,
    Trouble,
    Wait,
)
from gridformer.record.fusion import Fusion
from gridformer.record.kernels import dtype_name
from gridformer.record.place import Places


class Log:
    """Writes the trace of a rank.

    Args:
        trace: The trace.
        places: Names the places.
        kernels: Whether kernels are recorded.
        backend: The backend that is imitated.
    """

    def __init__(
        self,
        trace: Trace,
        places: Places,
        kernels: bool = False,
        backend: Backend = "nccl",
    ) -> None:
        self.trace, self.places, self.kernels = trace, places, kernels
        self.nccl = backend == "nccl"
        self.device = fake_gpu() if self.nccl else torch.device("cpu")
        self.backend = f"{backend}_trace"
        self.recorder = Recorder()  # `gridformer.comm` tells it the axis and purpose of messages
        self.n_groups = 0
        self.fusion: Fusion | None = None  # joins the kernels of compiled modules
        self._updating = False
        self._number = 0
        # The last messages to and from single ranks: what `gridformer.comm` noted, their event, and
        # their handle.
        self._posted: tuple[Record, Start, _Work] | None = None
        # One object for each kernel and place makes records small. Both are kept with it, by id.
        self._kernels: dict[tuple[int, int, bool], tuple[Kernel, Kernel, Place]] = {}

    def launch(self, work: Kernel, *call: Any) -> None:
        """Records that a kernel is launched here, by an operator with the call `Fusion.takes`."""
        place = self.places.of_kernel()
        key = id(work), id(place), self._updating
        known = self._kernels.get(key)
        if known is None:
            kernel = work._replace(place=place, update=self._updating)
            known = self._kernels[key] = kernel, work, place
        if self.fusion is None or not self.fusion.takes(known[0], *call):
            self.trace.events.append(known[0])

    def ends_kernel(self) -> None:
        """Records that what is launched next is not joined with the kernel before."""
        if self.fusion is not None:
            self.fusion.end()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Marks what is launched inside the context as updating parameters."""
        self._updating = True
        yield
        self._updating = False

    def created(self, lines: Sequence[Sequence[int]], purpose: str) -> None:
        """Records that groups of these ranks are created, at most one of them with this rank.

        All ranks create groups in the same order, so their numbers name them.
        """
        groups = self.trace.groups
        same = groups and groups[-1].purpose == purpose
        before = groups.pop() if same else Groups(purpose, 0, 0)
        content = hash((before.content, tuple(map(tuple, lines))))
        groups.append(Groups(purpose, before.n + len(lines), content))
        mine = next((i for i, line in enumerate(lines) if self.trace.rank in line), None)
        if mine is not None:
            name = f"{self.n_groups + mine + 1}"
            self.trace.own.append(Member(name, purpose, tuple(lines[mine])))
        self.n_groups += len(lines)

    def start(self, group: _Group, op: str, tensors: Sequence[Tensor], **more: Any) -> _Work:
        """Records that a collective is started; returns the handle to wait for.

        Args:
            group: The group of the collective.
            op: Its name, such as `all_reduce`.
            tensors: The tensors that this rank passes in, first the one whose elements are counted.
            more: The other attributes of `Start` that this collective has, such as `how`.
        """
        self.ends_kernel()
        place, (axis, label) = self.places.here(), self._purpose(group)
        for x in tensors:
            self._refuse(x, op, axis)
        self._number += 1
        if tensors:
            more |= {"size": tensors[0].numel(), "dtype": dtype_name(tensors[0])}
        of = group.group_name, group.members
        self.trace.events.append(Start(self._number, op, *of, place, axis, label, **more))
        return _Work(self, self._number)

    def post(self, group: _Group, part: Part, x: Tensor) -> _Work:
        """Records that a message to or from one rank is started.

        Those that `gridformer.comm` posts together are one, as NCCL returns one handle for them.
        """
        self.ends_kernel()
        axis, label = self._purpose(group)
        self._refuse(x, part.what, axis)
        last, events, posted = self._noted(), self.trace.events, self._posted
        if posted is not None and posted[0] is last and posted[1] is events[-1]:
            _, start, work = posted
            start = events[-1] = start._replace(parts=(*start.parts, part))
        else:
            of = group.group_name, group.members, self.places.here()
            self._number += 1
            start = Start(self._number, "p2p", *of, axis, label, parts=(part,))
            events.append(start)
            work = _Work(self, self._number)
        self._posted = (last, start, work) if last else None
        return work

    def repeats(self, times: int) -> Callable[[], None]:
        """Returns a function that repeats what is recorded from now until it is called."""
        self.ends_kernel()
        events = self.trace.events
        begins = len(events)

        def again() -> None:
            self.ends_kernel()
            turn = events[begins:]
            for _ in range(times):
                numbers: dict[int, int] = {}  # a wait may be for a message of earlier events
                for event in turn:
                    if isinstance(event, Start):
                        self._number += 1
                        numbers[event.number] = self._number
                        event = event.numbered(self._number)
                    elif isinstance(event, Wait):
                        event = Wait(numbers.get(event.number, event.number), event.place)
                    events.append(event)

        return again

    def wait(self, number: int) -> None:
        """Records that this rank waits for the message with a number."""
        self.ends_kernel()
        self.trace.events.append(Wait(number, self.places.here()))

    def _refuse(self, x: Tensor, op: str, axis: str) -> None:
        """Notes what NCCL refuses about a tensor that is handed to a message."""
        if not self.nccl:
            return
        shape = f"a tensor of shape {list(x.shape)}"
        if x.device.type != NAME:
            text = f"{op}: {shape} on {x.device.type} is handed to a group of GPUs"
            self._trouble("device", text, axis)
        if not x.is_contiguous():
            text = f"{op}: {shape} with strides {list(x.stride())} is not contiguous"
            self._trouble("contiguity", text, axis)

    def size(self, op: str, group: _Group, whole: Tensor, part: Tensor) -> None:
        """Notes if a tensor of all members' parts has another size or type than that of one has."""
        if whole.numel() != group.size() * part.numel() or whole.dtype != part.dtype:
            axis, _ = self._purpose(group)
            text = (
                f"{op}: {whole.numel()} elements of {dtype_name(whole)} are not {group.size()} x "
                f"{part.numel()} of {dtype_name(part)}"
            )
            self._trouble("size", text, axis)

    def _trouble(self, kind: str, text: str, axis: str) -> None:
        self.trace.troubles.append(Trouble(kind, text, self.places.here(), axis))

    def _purpose(self, group: _Group) -> tuple[str, str]:
        """Returns the axis and the label of the message that is being started."""
        last = self._noted()
        return (last.axis, last.label) if last else (group.group_desc, "")

    def _noted(self) -> Record | None:
        return self.recorder.records[-1] if self.recorder.records else None


class _Work(dist._Work):
    """The handle of a message; waiting for it is recorded once."""

    def __init__(self, log: Log, number: int) -> None:
        super().__init__()
        self._log, self._number = log, number
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._waited:
            self._waited = True
            self._log.wait(self._number)
        return True


class _Group(dist.ProcessGroup):
    """The methods are those that torch.distributed calls, with its arguments."""

    def __init__(self, log: Log, rank: int, members: tuple[int, ...], name: str) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.log, self.members, self._name = log, members, name
        self._rank = rank

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return self.log.backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.log.device]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=None, supports_coalescing=False)  # as of torch's fake one

    def shutdown(self) -> None:
        pass

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        return self.log.start(self, "all_reduce", tensors, how=_op(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        return self.log.start(self, "broadcast", tensors, how=f"root {opts.rootRank}")

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        how = f"root {opts.rootRank}, {_op(opts)}"
        return self.log.start(self, "reduce", tensors, how=how)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Work:
        self.log.size("all_gather", self, out, x)
        return self.log.start(self, "all_gather", [x, out])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> _Work:
        self.log.size("reduce_scatter", self, x, out)
        return self.log.start(self, "reduce_scatter", [x, out], how=_op(opts))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> _Work:
        n = len(self.members)
        sent = tuple(sizes) or (x.shape[0] // n,) * n
        received = tuple(out_sizes) or (out.shape[0] // n,) * n
        each = x[:1].numel() if x.numel() else 1
        pieces = tuple(s * each for s in sent), tuple(r * each for r in received)
        return self.log.start(self, "all_to_all", [x, out], pieces=pieces)

    # The names that torch 2.11 has for them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        return self._post("send", tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> _Work:
        return self._post("recv", tensors[0], peer)

    def _post(self, what: Literal["send", "recv"], x: Tensor, peer: int) -> _Work:
        return self.log.post(self, Part(what, self.members[peer], x.numel(), dtype_name(x)), x)

    def barrier(self, opts: Any = None) -> _Work:
        return self.log.start(self, "barrier", [])


_playing: Log | None = None  # torch calls the creator of groups without our arguments


@contextmanager
def recording(log: Log, n_processes: int) -> Iterator[None]:
    """Makes this process one rank of a group of devices, whose messages the log records."""
    global _playing
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name, devices = log.backend, ["cpu", NAME] if log.nccl else ["cpu"]
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, _create, extended_api=True, devices=devices)
    _playing = log
    world, rank = n_processes, log.trace.rank
    log.trace.own.append(Member("0", "world", tuple(range(world))))
    hook = sys.excepthook  # torch replaces it by one that prints the rank
    dist.init_process_group(name, rank=rank, world_size=world, store=FakeStore())
    groups.listeners.append(log.created)
    try:
        yield
    finally:
        groups.listeners.remove(log.created)
        dist.destroy_process_group()
        sys.excepthook = hook
        _playing = None


def _create(options: Any, _: Any) -> _Group:
    assert _playing is not None
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return _Group(_playing, options.group_rank, members, _playing.trace.own[-1].name)


def _op(opts: Any) -> str:
    return str(opts.reduceOp.op).rsplit(".", 1)[-1].lower()
