"""Asynchronous messages between two ranks of a pipeline.

A rank receives the messages of another rank in the order in which they are sent, and both know this
order beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import irecv, isend

from gridformer.comm.collectives import Pending
from gridformer.comm.recorder import note
from gridformer.mesh import groups
from gridformer.mesh.axes import Axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Edge = tuple[int, int]  # from an index along pp to another


class P2PChannel:
    """Connects neighboring ranks of a pipeline, on NCCL with a separate group for each direction.

    NCCL executes the operations of a rank in a group one after the other, and a send ends only with
    its receive. A rank posts its next receive early. A send in the same group would wait for that
    receive, and the rank that waits for this send might then never send what was to be received.
    Over NCCL, every pair of neighbors therefore has one group per direction, in which one rank only
    sends and the other only receives, in the same order. The messages of gloo do not wait for each
    other. All processes must create the channel.

    Args:
        ring: Whether the last rank and the first are neighbors, which is so if ranks have several
            stages.

    Attributes:
        on_device: Whether messages are kernels, which occupy the device until they are over.
    """

    def __init__(self, axes: Axes, ring: bool) -> None:
        self.axis = axis = axes.pp
        self._ranks = axis.ranks
        self._groups: dict[Edge, ProcessGroup | None] = {}
        self._host: ProcessGroup | None = None
        self.on_device = axis.size > 1 and axis.over_nccl
        if not self.on_device:
            return
        for pairs in _pairs_apart(axis.size, ring):
            for up in (True, False):
                edges = [pair if up else pair[::-1] for pair in pairs]
                group = axes.new_groups(pairs, f"pp {'up' if up else 'down'}")
                for edge in edges:
                    if axis.index in edge:
                        self._groups[edge] = group

    @contextmanager
    def through_host(self) -> Iterator[None]:
        """Sends and receives through the memory of the host inside the context.

        All processes must enter it together.
        """
        self._host = groups.objects_group()
        try:
            yield
        finally:
            self._host = None

    def send(self, x: Tensor, to: int, label: str = "") -> Pending:
        """Starts sending x to a neighbor along `pp`. x must not change until `wait` returns."""
        timing = note("send", self.axis, x.numel(), x, label, (to,), peer=to)
        group = self._group(self.axis.index, to)
        x = x.cpu() if groups.through_host(x, group) else x.contiguous()
        work = isend(x, self._ranks[to], group=group)
        return Pending(x, work, timing)

    def receive(self, out: Tensor, source: int, label: str = "") -> Pending:
        """Starts receiving the next message of a neighbor into `out`, which is contiguous."""
        timing = note("recv", self.axis, out.numel(), out, label, (), peer=source)
        group = self._group(source, self.axis.index)
        host = groups.through_host(out, group)
        room = torch.empty_like(out, device="cpu") if host else out
        work = irecv(room, self._ranks[source], group=group)
        return Pending(room, work, timing, finish=out.copy_ if host else None)

    def _group(self, source: int, to: int) -> ProcessGroup | None:
        if self._host is not None:
            return self._host
        return self._groups[source, to] if self._groups else self.axis.group


def _pairs_apart(n: int, ring: bool) -> list[list[Edge]]:
    """Returns the pairs of neighbors among n ranks in a row or ring, as sets to create together.

    Each pair occurs once with the lower rank first, and no rank occurs twice in a set.
    """
    pairs = [(i, i + 1) for i in range(n - 1)]
    sets = [pairs[::2], pairs[1::2]]
    if ring and n > 2:
        # In a ring of even size the closing pair meets only pairs of the first set.
        sets[1:] = [[*sets[1], (0, n - 1)]] if n % 2 == 0 else [sets[1], [(0, n - 1)]]
    return [pairs for pairs in sets if pairs]
