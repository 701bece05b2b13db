"""Messages between two ranks of a pipeline, sent and received without waiting.

Part of the one door (see gridformer.comm.collectives). Between two ranks messages are received in
the order in which they are sent; both know it beforehand.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from gridformer.comm.axis import Axes
from gridformer.comm.collectives import Pending
from gridformer.comm.recorder import note


class P2PChannel:
    """The connections between the ranks of a pipeline, each direction on its own.

    NCCL carries out what two ranks exchange over one group one after the other, in the order in
    which it is asked. Two ranks that send before they receive would wait for each other: so there
    messages to higher indices have a group of their own, and messages to lower ones. gloo's
    messages do not wait for each other.
    """

    def __init__(self, axes: Axes) -> None:
        self.axis = axis = axes.pp
        self._up = self._down = axis.group
        if dist.get_backend(axis.group) == "nccl":
            every = tuple(range(axis.size))
            self._up, self._down = axes.new_group(every), axes.new_group(every)

    def send(self, x: Tensor, to: int, label: str = "") -> Pending:
        """x, contiguous and left alone until the message is through, to the member `to`."""
        timing = note("send", self.axis, x.numel(), x.element_size(), label, (to,))
        group = self._up if to > self.axis.index else self._down
        return Pending(x, dist.isend(x, group=group, group_dst=to), x).timed(timing)

    def receive(self, out: Tensor, source: int, label: str = "") -> Pending:
        """Into `out`, contiguous, the next message from the member `source`."""
        timing = note("recv", self.axis, out.numel(), out.element_size(), label, ())
        group = self._up if self.axis.index > source else self._down
        return Pending(out, dist.irecv(out, group=group, group_src=source), out).timed(timing)
