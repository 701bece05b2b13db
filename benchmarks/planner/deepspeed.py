"""ZeRO-3 as DeepSpeed of 2021 ran it, simulated on the record of gridformer's `dp_mode: fsdp`.

What DeepSpeed did is read in its code of 2021-04-19 (commit fbece50b2, of the month in which the
paper with the numbers appeared; deepspeed/runtime/zero/partition_parameters.py and stage3.py), with
the settings of its tutorial on ZeRO-3. Which settings the paper used is not known. Nothing is
fitted to how long it took.

- Each matrix is gathered by a message of its own. Before it the host waits for the device, and
  after it again, so no message travels beside a computation (`_allgather_param`,
  `_synchronize_communication`; issue 1069 and pull request 1188 say so, too). Parameters with fewer
  than 100,000 elements are not gathered in layers (`persistence_threshold`).
- The buffer is filled with zeros, the host makes a view of each rank's part of it in a Python loop,
  and torch copies what it gathered into these views one by one (pull request 4705 and apex's 1360
  removed these copies). While the host makes views, the device has nothing to do. The norm of each
  parameter is computed for a message of a log that is off (`fetch_sub_module`).
- Gathering the next matrix ahead, and keeping what is soon used again, both ask a trace of modules
  for the place of a module in the step. The number of that place was off by one, because it was set
  to zero again after the first module had raised it (`setup_zero_stage3_hooks`; found in issue 1069
  on 2021-05-27). So nothing was gathered ahead (`get_params_to_prefetch`), and nothing kept
  (`get_reuse_distance_in_numel`): with recomputation each matrix is gathered three times.
- Each gradient is divided, cut into views and summed by a reduce-scatter of its own in 16 bits;
  torch first copies the views, one by one (`_reduce_scatter_gradient`).
- The small parameters that layers do not gather are released behind the backward pass
  (`_partition_all_parameters`) and gathered behind the update, in one message. A loop in Python
  then copies each rank's part of each of them to its place (`_allgather_params`): 295,000 copies
  for 768 parameters and 384 ranks, and each copy is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gridformer.cluster.costs import KernelWork, kernel_s
from gridformer.cluster.file import Cluster
from gridformer.plan.predict import Recorded
from gridformer.record.events import Event, Kernel, Place, Start, Trace, Wait

# The modules of a layer of GPT-2 in the order in which they run: their parameters in units of
# h squared and of h.
_LAYER = (
    ((0, 1), (0, 1)),
    ((3, 0), (0, 3)),
    ((1, 0), (0, 1)),
    ((0, 1), (0, 1)),
    ((4, 0), (0, 4)),
    ((4, 0), (0, 1)),
)
_PERSISTENT = 100_000  # stage3_param_persistence_threshold of docs/_tutorials/zero.md
# A view in its loops in Python, which ask for the rank each time (all-gather) or make two views
# (reduce-scatter): measured with torch 2.13 on an AMD EPYC, medians of five runs.
VIEW_S = {"all_gather": 3.9e-6, "reduce_scatter": 3.6e-6}
# A short kernel among many: NVIDIA's page on CUDA graphs (developer.nvidia.com/blog/cuda-graphs)
# measured 3.8 us on a V100; from memory of the page, not verified.
COPY_S = 3.8e-6
# A round of the loop that copies small parameters, without its kernel: two views and torch's own
# part of the copy, measured as the views were. The kernel takes less than this, so the host's time
# counts, which launches it in COPY_S.
ROUND_S = 5.5e-6
_BYTES = 2  # of an element in 16 bits


class Rates(NamedTuple):
    """What the simulation needs to know of a device.

    Attributes:
        bytes_s: Bytes that kernels read and write in a second.
    """

    bytes_s: float

    def kernel(self, op: str, seconds: float, place: Place) -> Kernel:
        """Returns a kernel that takes this long on the device, or keeps it waiting as long."""
        n_bytes = round(seconds * self.bytes_s)
        return Kernel(op, "memory", (), "float16", 0, n_bytes, place)

    def moved(self, op: str, n_elements: float, place: Place) -> Kernel:
        """Returns a kernel that reads and writes this many elements of 16 bits in all."""
        return self.kernel(op, n_elements * _BYTES / self.bytes_s, place)

    def copies(self, n: int, n_elements: int, place: Place) -> Kernel:
        """Returns n copies that read and write n_elements together."""
        seconds = max(n * COPY_S, 2 * n_elements * _BYTES / self.bytes_s)
        return self.kernel("copies", seconds, place)


def as_deepspeed(recorded: Recorded, cluster: Cluster) -> Recorded:
    """Returns the record of a step with FSDP as DeepSpeed of 2021 would have run it.

    Args:
        recorded: The record, of a GPT-2 with recomputation.
        cluster: The cluster on which it is priced.
    """
    model = recorded.run.model
    rates = Rates(1e12 / kernel_s(cluster, KernelWork("memory", 0.0, 1e12, "float16")))
    traces = [of_deepspeed(trace, model.hidden_size, rates) for trace in recorded.traces]
    return replace(recorded, traces=traces)


def of_deepspeed(trace: Trace, hidden: int, rates: Rates) -> Trace:
    """Returns a trace whose messages over `dp` are those of DeepSpeed.

    Args:
        trace: The trace.
        hidden: The model's hidden size h.
        rates: Those of the device.
    """
    events: list[Event] = []
    update, ended, layers = trace.update, set[int](), 0
    gather: Start | None = None
    earlier = 0  # elements of the gradients that were summed before these
    fresh = 1 + max((one.number for one in trace.unfolded() if isinstance(one, Start)), default=0)
    for number, event in enumerate(trace.events):
        if number == trace.update:
            update = len(events)
        if isinstance(event, Wait) and event.number in ended:
            continue
        if not isinstance(event, Start) or event.axis != "dp":
            events.append(event)
            continue
        ended.add(event.number)
        if event.op == "all_gather" and event.label == "parameters":
            gather = event
            layers += _is_layer(event, hidden) and not event.place.backward
        fresh = _append(events, _instead(event, hidden, earlier, rates), fresh)
        earlier = event.size if event.op == "reduce_scatter" else earlier
    if gather is not None:
        place = events[-1].place if isinstance(events[-1], Kernel | Start | Wait) else gather.place
        _append(events, _gather_small(gather._replace(place=place), hidden, layers, rates), fresh)
    return replace(trace, events=events, update=update)


def _append(events: list[Event], parts: Iterator[Start | Kernel], fresh: int) -> int:
    """Appends what takes the place of a message, each message with its wait.

    Args:
        events: Where it is appended.
        parts: Messages and kernels.
        fresh: The first number that no message has.

    Returns:
        The first number that no message has now.
    """
    for part in parts:
        if isinstance(part, Start):
            events += [part._replace(number=fresh), Wait(fresh, part.place)]
            fresh += 1
        else:
            events.append(part)
    return fresh


def _modules(hidden: int) -> list[list[int]]:
    """Returns the sizes of the parameters of a layer, by module."""
    return [[a * hidden**2 + b * hidden for a, b in module] for module in _LAYER]


def _is_layer(start: Start, hidden: int) -> bool:
    """Returns whether an all-gather carries the parameters of a layer."""
    # They lack a bias or two, and are padded: a rank has whole rows of a matrix, so with 2,240
    # ranks and 20,480 rows there are 9% more.
    whole = sum(map(sum, _modules(hidden)))
    return 0.99 * whole < start.size * len(start.ranks) < 1.25 * whole


def _gradients(total: int, earlier: int, hidden: int) -> list[int]:
    """Returns the sizes of the gradients that gridformer sums in one message.

    Those of matrices travel alone. Between them travel, from the last layer to the first: the norm
    behind a second matrix of a feed-forward with the bias of that matrix, the bias of the first
    matrix, the norm behind an attention with its last bias, and the bias of queries, keys and
    values, which has as many elements as the three others, but follows the matrix of h x h.

    Args:
        total: Elements of the message.
        earlier: Elements of the message of gradients before it.
        hidden: The model's hidden size h.
    """
    n = round(total / hidden)
    alone = n not in (2, 3) or (n == 3 and 0.99 < earlier / hidden**2 < 1.25)
    return [total] if alone else [hidden] * n


def _instead(start: Start, hidden: int, earlier: int, rates: Rates) -> Iterator[Start | Kernel]:
    """Yields what DeepSpeed did in the place of a message over replicas."""
    n = len(start.ranks)
    if start.op == "reduce_scatter":
        for size in _gradients(start.size, earlier, hidden):
            yield rates.moved("div", 2 * size, start.place)
            yield rates.kernel("views", n * VIEW_S[start.op], start.place)
            yield rates.copies(n, size, start.place)
            yield start._replace(dtype="float16", size=-(-size // n) * n)
    elif start.op == "all_gather" and start.label == "parameters":
        if not _is_layer(start, hidden):
            yield from _gather(start, [start.size * n], rates)
            return
        modules = _modules(hidden)
        for module in modules:
            yield from _gather(start, module, rates)
        if start.place.backward:  # what has just been recomputed is released and gathered again
            for module in modules:
                yield from _gather(start, module, rates)
    else:
        yield start


def _gather(start: Start, sizes: list[int], rates: Rates) -> Iterator[Start | Kernel]:
    n = len(start.ranks)
    for size in sizes:
        if size < _PERSISTENT:
            continue
        share = -(-size // n)
        yield rates.moved("zeros", size, start.place)
        yield rates.kernel("views", n * VIEW_S[start.op], start.place)
        yield start._replace(size=share)
        yield rates.copies(n, size, start.place)
    for size in sizes:
        yield rates.moved("norm", size, start.place)


def _gather_small(
    gather: Start, hidden: int, layers: int, rates: Rates
) -> Iterator[Start | Kernel]:
    """Yields what gathers the parameters that layers keep, once a step."""
    n = len(gather.ranks)
    small = [size for module in _modules(hidden) for size in module if size < _PERSISTENT]
    shares = [-(-size // n) for size in small]
    rounds = sum(-(-size // share) for size, share in zip(small, shares, strict=True))
    yield rates.kernel("views", n * VIEW_S[gather.op], gather.place)
    yield gather._replace(size=layers * sum(shares))
    yield rates.copies(n, layers * sum(small), gather.place)
    yield rates.kernel("rounds", layers * rounds * (ROUND_S + COPY_S), gather.place)
