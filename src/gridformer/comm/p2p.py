"""Messages between two ranks of a pipeline, sent and received without waiting.

Part of the one door (see gridformer.comm.collectives). Between two ranks messages are received in
the order in which they are sent; both know it beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm.collectives import Pending
from gridformer.comm.recorder import note
from gridformer.mesh import groups
from gridformer.mesh.axes import Axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Edge = tuple[int, int]  # from an index along pp to another


class P2PChannel:
    """The connections between neighboring ranks of a pipeline, each direction on its own.

    NCCL carries out what a rank does in a group one after the other, and a send ends only with its
    receive. A rank asks for its next message early; what it sent over the same group would wait
    behind that, and its reader, who waits for it, might never send what was asked for. So over NCCL
    every pair of neighbors has a group for each direction: in it one rank only sends and the other
    only receives, in the same order. gloo's messages do not wait for each other.

    Args:
        ring: the last rank and the first are neighbors, too: there are several stages a rank.
    """

    def __init__(self, axes: Axes, ring: bool) -> None:
        self.axis = axis = axes.pp
        self._ranks = axis.ranks
        self._groups: dict[Edge, ProcessGroup | None] = {}
        if not groups.over_nccl(axis.group):
            return
        for pairs in _pairs_apart(axis.size, ring):
            for up in (True, False):
                edges = [pair if up else pair[::-1] for pair in pairs]
                group = axes.new_groups(pairs, f"pp {'up' if up else 'down'}")
                for edge in edges:
                    if axis.index in edge:
                        self._groups[edge] = group

    def send(self, x: Tensor, to: int, label: str = "") -> Pending:
        """x, left alone until the message is through, to the member `to`."""
        timing = note("send", self.axis, x.numel(), x.element_size(), label, (to,))
        group = self._group(self.axis.index, to)
        x = x.cpu() if groups.through_host(x, group) else x.contiguous()
        work = dist.isend(x, self._ranks[to], group=group)
        return Pending(x, work, x).timed(timing)

    def receive(self, out: Tensor, source: int, label: str = "") -> Pending:
        """Into `out`, contiguous, the next message from the member `source`."""
        timing = note("recv", self.axis, out.numel(), out.element_size(), label, ())
        group = self._group(source, self.axis.index)
        room = out
        if groups.through_host(out, group):
            room = torch.empty_like(out, device="cpu")
        work = dist.irecv(room, self._ranks[source], group=group)
        pending = Pending(room, work, room).timed(timing)
        return pending if room is out else pending.then(out.copy_)

    def _group(self, source: int, to: int) -> ProcessGroup | None:
        return self._groups[source, to] if self._groups else self.axis.group


def _pairs_apart(n: int, ring: bool) -> list[list[Edge]]:
    """The pairs of neighbors among n ranks in a row or a ring, each once and the lower rank first,
    in sets in which no rank occurs twice: the groups of such a set are made together."""
    pairs = [(i, i + 1) for i in range(n - 1)]
    sets = [pairs[::2], pairs[1::2]]
    if ring and n > 2:
        # In a ring of even size the closing pair meets only pairs of the first set.
        sets[1:] = [[*sets[1], (0, n - 1)]] if n % 2 == 0 else [sets[1], [(0, n - 1)]]
    return [pairs for pairs in sets if pairs]
