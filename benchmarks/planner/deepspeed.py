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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gridformer.cluster.file import Cluster
from gridformer.cluster.kernels import KernelWork, kernel_s
from gridformer.plan.recorded import Recorded
from gridformer.trace.events import Event, Kernel, Place, Start, Trace, Wait

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
        """Returns a kernel that reads and writes so many elements of 16 bits in all."""
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
    traces, shorter = (
        [of_deepspeed(trace, model.hidden_size, rates) for trace in some]
        for some in (recorded.traces, recorded.shorter)
    )
    earlier = as_deepspeed(recorded.earlier, cluster) if recorded.earlier else None
    return replace(recorded, traces=traces, shorter=shorter, earlier=earlier)


def of_deepspeed(trace: Trace, hidden: int, rates: Rates) -> Trace:
    """Returns a trace whose messages over `dp` are those of DeepSpeed.

    Args:
        trace: The trace.
        hidden: The model's hidden size h.
        rates: Those of the device.
    """
    events: list[Event] = []
    update, ended = trace.update, set[int]()
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
        for part in _instead(event, hidden, rates):
            if isinstance(part, Start):
                part = replace(part, number=fresh)
                events += [part, Wait(fresh, part.place)]
                fresh += 1
            else:
                events.append(part)
    return replace(trace, events=events, update=update)


def _instead(start: Start, hidden: int, rates: Rates) -> Iterator[Start | Kernel]:
    """Yields what DeepSpeed did in the place of a message over replicas."""
    modules = [[a * hidden**2 + b * hidden for a, b in module] for module in _LAYER]
    whole = sum(map(sum, modules))
    n = len(start.ranks)
    total = start.size * n if start.op == "all_gather" else start.size
    # A layer's message carries its parameters, but for a bias or two, and padding: a rank has whole
    # rows of a matrix, so with 2,240 ranks and 20,480 rows there are 9% more.
    is_layer = 0.99 * whole < total < 1.25 * whole
    if start.op == "reduce_scatter":
        sizes = [size for module in modules for size in module] if is_layer else [total]
        for size in sizes:
            yield rates.moved("div", 2 * size, start.place)
            yield rates.kernel("views", n * VIEW_S[start.op], start.place)
            yield rates.copies(n, size, start.place)
            yield replace(start, dtype="float16", size=-(-size // n) * n)
    elif start.op == "all_gather" and start.label == "parameters":
        if not is_layer:
            yield from _gather(start, [total], rates)
            return
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
        yield replace(start, size=share)
        yield rates.copies(n, size, start.place)
    for size in sizes:
        yield rates.moved("norm", size, start.place)
