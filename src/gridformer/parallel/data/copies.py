"""Sends updated parameters to ranks that hold copies of them, and checks that copies are equal."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.parallel.data.buckets import buckets, in_buckets
from gridformer.parallel.data.zero import FlatBucket, replica_part, stored
from gridformer.parallel.sharding import replica_axis, shard_of, shared_by_stages

_PERIOD = 8191  # bytes whose factors in a checksum differ
_PIECE = 512 * _PERIOD  # bytes that are summed at a time
_IN_FLIGHT = 2  # gathers of `share_parts`; one travels while another is copied


@torch.no_grad()
def share_parts(units: Iterable[Sequence[nn.Parameter]], axes: Axes) -> None:
    """Gathers updated parts on replicas that hold full parameters (zero1), after the update.

    Small parameters of a unit travel together. Only a few messages are in flight at a time, because
    each holds its parameters a second time until it has arrived.
    """
    whole: dict[tuple[int, str], list[nn.Parameter]] = defaultdict(list)
    for number, unit in enumerate(units):
        for parameter in unit:
            if replica_part(parameter) is not None and stored(parameter) is parameter:
                whole[number, replica_axis(parameter)].append(parameter)
    in_flight: deque[tuple[FlatBucket, comm.Pending]] = deque()

    def arrive() -> None:
        flat_bucket, pending = in_flight.popleft()
        flat_bucket.part(pending.wait(), [parameter.data for parameter in flat_bucket.parameters])

    for (_, name), sharded in whole.items():
        for members in buckets(sharded):
            if len(in_flight) == _IN_FLIGHT:
                arrive()
            flat_bucket = FlatBucket(members, axes[name])
            mine = flat_bucket.join_parts().unsqueeze(0)
            pending = comm.start_all_gather(mine, flat_bucket.axis, 0, "parameters")
            in_flight.append((flat_bucket, pending))
    while in_flight:
        arrive()


@torch.no_grad()
def share_copies(parameters: Iterable[nn.Parameter], axes: Axes) -> None:
    """Broadcasts the values of owners to all copies, after the update: see `in_buckets`."""
    copies: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        name = shard_of(parameter).copies
        if name:
            copies[name].append(stored(parameter).data)
    for name, tensors in copies.items():
        in_buckets(tensors, partial(comm.broadcast, axis=axes[name], root=0, label="copies"))


def assert_copies_equal(model: nn.Module, axes: Axes) -> None:
    """Checks that replicas, copies, and what several stages share are bitwise equal.

    All ranks call it together. It compares checksums. With fsdp there are no equal replicas, and
    copies are compared part by part.

    Raises:
        RuntimeError: Parameters differ. It names them, and is raised on every rank of the axis.
    """
    problems = []
    keys: set[str] = set()
    for parameter in model.parameters():
        keys |= {key for key in _held_along(parameter) if key}
    for key in sorted(keys):  # in the same order on all ranks
        held = [(name, stored(p)) for name, p in model.named_parameters() if key in _held_along(p)]
        problems += _unequal(held, axes[key])
    for stages, shared in shared_by_stages(model).items():
        problems += _unequal([(name, stored(p)) for name, p in shared], axes.holders(stages))
    if problems:  # not earlier: ranks of another axis may wait for this one
        raise RuntimeError("; ".join(problems))


def _held_along(parameter: nn.Parameter) -> tuple[str | None, ...]:
    """Returns the axes along which other ranks hold the same values."""
    part, copies = replica_part(parameter), shard_of(parameter).copies
    across = shard_of(part).replicas if part is not None else None
    return shard_of(stored(parameter)).replicas, across, copies


def _unequal(held: Sequence[tuple[str, nn.Parameter]], axis: Axis) -> list[str]:
    names = differing(held, axis)
    return [f"copies over axis {axis.name} differ: {', '.join(names)}"] if names else []


def differing(held: Sequence[tuple[str, nn.Parameter]], axis: Axis) -> list[str]:
    """Returns the names of the parameters whose checksums differ over an axis."""
    if axis.size == 1 or not held:
        return []
    sums = torch.stack([checksum(p) for _, p in held])
    low = comm.all_reduce(sums.clone(), axis, "min", "sanity")
    high = comm.all_reduce(sums, axis, "max", "sanity")
    return [name for (name, _), same in zip(held, (low == high).tolist()) if not same]


def checksum(parameter: Tensor) -> Tensor:
    """Returns a checksum of a parameter's bytes, an int64 scalar on its device."""
    # Flattened before its bytes are read: the last dimension of a matrix [n, 1] that is stored
    # transposed has a stride other than 1, although torch calls the matrix contiguous.
    octets = parameter.detach().contiguous().view(-1).view(torch.uint8)
    factors = torch.arange(1, _PERIOD + 1, device=octets.device)
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    # In pieces, because each byte becomes one of 8: a large table would take many times its memory.
    for piece in octets.split(_PIECE):
        whole = len(piece) // _PERIOD * _PERIOD
        total += (piece[:whole].view(-1, _PERIOD) * factors).sum()
        total += (piece[whole:] * factors[: len(piece) - whole]).sum()
    return total
