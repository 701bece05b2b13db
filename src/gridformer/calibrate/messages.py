"""Times of messages between the processes of this machine, as training sends them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer import comm
from gridformer.mesh.axes import Axis
from gridformer.mesh.groups import make_groups

_CHUNKS = 3
_FEWEST, _MOST = 5, 60  # messages of one kind that are timed
_SLOW_S = 0.1  # messages that take longer are sent one at a time
_MUCH = 1.25  # messages in a row that take this many times as long as one are sent again

Send = Callable[[int], Callable[[], object]]  # bytes to a function that sends them


def group_sizes(n: int) -> list[int]:
    """Returns the sizes of the groups that are measured among n processes: 2, n, and about sqrt(n).

    All of them divide n.
    """
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    middle = min(divisors, key=lambda d: abs(d - n**0.5))
    return sorted({divisors[0], middle, n})


def axes_of(n: int, rank: int) -> dict[int, Axis]:
    """Returns the axes of groups of neighboring ranks by size; all processes call this together."""
    axes = {}
    for members in group_sizes(n):
        lines = [list(range(i, i + members)) for i in range(0, n, members)]
        group = dist.group.WORLD if members == n else make_groups(lines, "calibrate")
        axes[members] = Axis("calibrate", members, rank % members, group)
    return axes


def sends_of(axis: Axis, device: torch.device) -> dict[str, Send]:
    """Returns functions for each kind of message, by the names of `cluster.messages`.

    Their argument is the number of bytes that one rank passes in, or for all_gather and
    reduce_scatter the bytes of the gathered buffer. They return a function that sends one message.
    """

    def new(n_bytes: float) -> Tensor:
        return torch.ones(max(1, int(n_bytes) // 4), device=device)

    def all_reduce(n_bytes: int) -> Callable[[], object]:
        x = new(n_bytes)
        return lambda: comm.all_reduce(x.fill_(1.0), axis)

    def reduce_scatter(n_bytes: int) -> Callable[[], object]:
        return partial(comm.reduce_scatter, new(n_bytes / axis.size).repeat(axis.size), axis, 0)

    def all_to_all(n_bytes: int) -> Callable[[], object]:
        pieces = [new(n_bytes / axis.size) for _ in range(axis.size)]  # its own is not sent
        return partial(comm.all_to_all, pieces, [piece.shape for piece in pieces], axis)

    def send(n_bytes: int) -> Callable[[], object]:
        posted: list[dict[int, Tensor]] = [{1 - axis.index: new(n_bytes)}, {}]
        return partial(comm.exchange, posted[axis.index], posted[1 - axis.index], axis)

    return {
        "all_reduce": all_reduce,
        "all_gather": lambda n: partial(comm.all_gather, new(n / axis.size), axis, 0),
        "reduce_scatter": reduce_scatter,
        "broadcast": lambda n: partial(comm.broadcast, new(n), axis, 0),
        "reduce": lambda n: partial(comm.reduce, new(n), axis, 0),
        "all_to_all": all_to_all,
        **({"send": send} if axis.size == 2 else {}),
    }


def message_seconds(run: Callable[[], object], window_s: float, world: Axis, gpu: bool) -> float:
    """Returns the seconds of one message while all groups send such messages at the same time.

    All ranks call this together. On a CPU it is the larger of two times:

    - That of a message by itself, from when the last rank starts it until all have its result, as
      training waits for it. If messages follow each other, a rank may begin the next one before
      others have ended the last.
    - The mean time of many in a row, which cores and links need for each of them. A message by
      itself can take less: before the last rank starts it, the others have already worked on it,
      and a link that was idle lets some bytes pass at once. If they take much longer than a message
      by itself, one of them may have been stuck, so two more rows are sent, and the median counts.

    For GPUs it is the mean of many in a row. `world` has all ranks of the measurement, and
    `window_s` says about how long messages are measured.
    """
    run()  # connects
    if gpu:
        return _in_a_row(run, window_s, world)
    first = _agreed(max(_one_by_one(run, 2, world)), "max", world)
    calls = int(min(_MOST, max(_FEWEST, window_s / max(first, 1e-6))))
    alone = statistics.median(_one_by_one(run, calls, world))
    spans = [_span(run, calls, world) / calls]
    if spans[0] > _MUCH * alone:
        spans += [_span(run, calls, world) / calls for _ in range(2)]
    return max(alone, statistics.median(spans))


def _span(run: Callable[[], object], calls: int, world: Axis) -> float:
    """Returns the seconds from when the first rank starts messages in a row until all have them.

    The ranks must be processes of one machine, whose clock they share.
    """
    comm.barrier((world,))
    start = time.perf_counter()
    for _ in range(calls):
        run()
    span = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
    return float(comm.all_reduce(span, world, "max").sum())


def _one_by_one(run: Callable[[], object], calls: int, world: Axis) -> list[float]:
    """Returns the seconds of each of some messages, between which all ranks meet.

    The ranks must be processes of one machine, whose clock they share.
    """
    starts, ends = [], []
    for _ in range(calls):
        comm.barrier((world,))
        starts.append(time.perf_counter())
        run()
        ends.append(time.perf_counter())
    last = comm.all_reduce(torch.tensor([starts, ends], dtype=torch.float64), world, "max")
    seconds: list[float] = (last[1] - last[0]).tolist()
    return seconds


def _in_a_row(run: Callable[[], object], window_s: float, world: Axis) -> float:
    """Returns the mean seconds of messages between GPUs that follow each other."""

    def chunk(calls: int) -> float:
        torch.cuda.synchronize()
        comm.barrier((world,))
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    first = _agreed(chunk(2), "max", world, "cuda")
    fewest = 1 if first > _SLOW_S else _FEWEST
    calls = int(min(_MOST, max(fewest, window_s / _CHUNKS / max(first, 1e-6))))
    mine = statistics.median(chunk(calls) for _ in range(_CHUNKS))
    return _agreed(mine, "sum", world, "cuda") / world.size


def _agreed(value: float, op: str, world: Axis, device: str = "cpu") -> float:
    """Returns the maximum or the sum of a number over all ranks."""
    return float(comm.all_reduce(torch.tensor([value], device=device), world, op))
