"""Collectives with messages of different shapes: each rank sends its own piece to every other rank.

A rank receives only what it keeps. Neither a piece that stays on its rank nor an empty piece is
sent. Both sides must know all shapes beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm.recorder import Noted, note
from gridformer.mesh.axes import Axis
from gridformer.mesh.groups import through_host


def all_to_all(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis, label: str = ""
) -> list[Tensor]:
    """Sends piece i to the rank with index i, and receives a piece of shape `shapes[i]` from it.

    Returns the received pieces by index; this rank's own piece is `pieces[axis.index]` itself.
    """
    if axis.size == 1:
        return [*pieces]
    here = axis.index
    sent = [0 if i == here else piece.numel() for i, piece in enumerate(pieces)]
    sizes = [0 if i == here else torch.Size(shape).numel() for i, shape in enumerate(shapes)]
    like = pieces[here]
    timing = note("all_to_all", axis, max(sum(sent), sum(sizes)), like, label, equal=False)
    others = [piece.reshape(-1) for i, piece in enumerate(pieces) if i != here]
    out = torch.cat(others)
    received = like.new_empty(sum(sizes))
    dist.all_to_all_single(received, out, sizes, sent, group=axis.group)
    _ended(timing)
    return [
        pieces[here] if i == here else part.view(torch.Size(shape))
        for i, (part, shape) in enumerate(zip(received.split(sizes), shapes))
    ]


def all_to_all_rows(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis, label: str = ""
) -> Tensor:
    """Sends `sends[i]` rows of x [n, ..], in order, to the rank with index i.

    Returns the rows received, `receives[i]` from each rank, in order of the ranks.
    """
    x, here = x.contiguous(), axis.index
    out = x.new_empty(sum(receives), *x.shape[1:])
    width = x.shape[1:].numel()
    most = max(sum(sends) - sends[here], sum(receives) - receives[here])
    timing = note("all_to_all", axis, most * width, x, label, equal=False)
    dist.all_to_all_single(out, x, [*receives], [*sends], group=axis.group)
    _ended(timing)
    return out


def scatter(
    pieces: Sequence[Tensor] | None, out: Tensor, axis: Axis, root: int, label: str = ""
) -> Tensor:
    """Sends piece i of `root` to the rank with index i, into its contiguous `out`; returns that.

    Only `root` needs the pieces.
    """
    if axis.index == root:
        assert pieces is not None
        n_sent = sum(piece.numel() for i, piece in enumerate(pieces) if i != root)
        timing = note("scatter", axis, n_sent, out, label, equal=False)
        out.copy_(pieces[root])
        _post([(i, piece) for i, piece in enumerate(pieces) if i != root], [], axis)
    else:
        timing = note("scatter", axis, out.numel(), out, label, (), equal=False)
        _post([], [(root, out)], axis)
    _ended(timing)
    return out


def gather(
    x: Tensor, shapes: Sequence[Sequence[int]], axis: Axis, root: int, label: str = ""
) -> list[Tensor] | None:
    """Sends x, of shape `shapes[axis.index]`, to `root`.

    Returns the tensors of all ranks by index on `root`, None on other ranks.
    """
    if axis.index != root:
        timing = note("gather", axis, x.numel(), x, label, (root,), equal=False)
        _post([(root, x)], [], axis)
        _ended(timing)
        return None
    parts = [x if i == root else x.new_empty(shape) for i, shape in enumerate(shapes)]
    n_received = sum(part.numel() for i, part in enumerate(parts) if i != root)
    timing = note("gather", axis, n_received, x, label, (root,), equal=False)
    _post([], [(i, part) for i, part in enumerate(parts) if i != root], axis)
    _ended(timing)
    return parts


def exchange(
    sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], axis: Axis, label: str = ""
) -> None:
    """Exchanges any messages between ranks of an axis, at most one in each direction per pair.

    All messages are posted before any is waited for, so no order of ranks can deadlock. A message
    to oneself is a copy. Ranks with nothing to send or receive need not call this.

    Keys are indices of the peers. Tensors to receive into are contiguous.
    """
    here = axis.index
    if here in sends:
        receives[here].copy_(sends[here])
    out = [(i, x) for i, x in sends.items() if i != here]
    into = [(i, x) for i, x in receives.items() if i != here]
    some = next(iter([*sends.values(), *receives.values()]), None)
    if some is None:
        return
    moved = max(sum(x.numel() for _, x in out), sum(x.numel() for _, x in into))
    timing = note("exchange", axis, moved, some, label, tuple(sends), equal=False)
    _post(out, into, axis)
    _ended(timing)


def _post(
    sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], axis: Axis
) -> None:
    """Posts all messages, each with the index of its peer, and waits until all are done."""
    ops, arriving = [], []
    for i, x in sends:
        if x.numel():
            x = x.cpu() if through_host(x, axis.group) else x.contiguous()
            ops.append(dist.P2POp(dist.isend, x, group=axis.group, group_peer=i))
    for i, x in receives:
        if x.numel():
            room = x
            if through_host(x, axis.group):
                room = torch.empty_like(x, device="cpu")
                arriving.append((x, room))
            ops.append(dist.P2POp(dist.irecv, room, group=axis.group, group_peer=i))
    works: list[Any] = dist.batch_isend_irecv(ops) if ops else []
    for work in works:
        work.wait()
    for x, room in arriving:
        x.copy_(room)


def _ended(timing: Noted) -> None:
    if timing is not None:
        timing.end()
