"""The result of a prediction: the time of a step, where it goes, and whether the run fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gridformer.plan.program import Interval

MICRO = 1e6
_LEAST = 5e-4  # fraction of a step below which a row is not shown by itself


@dataclass
class Parts:
    """Where the time of a step goes, in seconds on the slowest rank.

    Attributes:
        products: Matrix products.
        attention: Fused attention.
        memory_bound: All other kernels of forward and backward passes.
        launches: The device waits for the host.
        update: The kernels of the optimizer.
        exposed: The device waits for messages that travel, by axis.
        hidden: Messages travel while the device computes, by axis.
        bubble: The device waits for other ranks to come to a message.
    """

    products: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    launches: float = 0.0
    update: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    bubble: float = 0.0

    def rows(self) -> list[tuple[str, float]]:
        """Returns all that adds up to the step, the largest first and the smallest together."""
        found = [
            ("matrix products", self.products),
            ("attention", self.attention),
            ("memory-bound kernels", self.memory_bound),
            ("waiting for the host", self.launches),
            ("optimizer", self.update),
            *((f"messages over {axis}", seconds) for axis, seconds in self.exposed.items()),
            ("waiting for other ranks", self.bubble),
        ]
        least = _LEAST * sum(row[1] for row in found)
        small = sum(row[1] for row in found if row[1] < least)
        rows = sorted((row for row in found if row[1] >= least > 0), key=lambda row: -row[1])
        rounding = 1e-9 * sum(row[1] for row in found)
        return [*rows, ("other", small)] if small > rounding else rows

    def as_json(self) -> dict[str, Any]:
        """Returns the parts by name, in seconds."""
        return dict(vars(self))


@dataclass
class Prediction:
    """How long a step of a run takes on a cluster.

    Attributes:
        step_s: Seconds of a step.
        forward_s: Those of its forward passes. In a pipeline passes of both kinds run at the same
            time on different ranks. What is before the update is then divided in the proportion in
            which the slowest rank spends its time, without its waiting for other ranks.
        backward_s: Those of its backward passes, with what they recompute.
        update_s: Those after the last pass of all ranks: rest of the sums of gradients, norms and
            optimizer.
        fits: Whether it fits into the memory of each device; None if that was not estimated.
        peak_gib: The most that the tensors of a rank take, in GiB; None if not estimated.
        limit_gib: What they may take, in GiB: a little less than a device has for them, because
            neither estimates nor allocators are exact.
        model_tflops_per_device: See `train.flops`; in 10^12 operations per second.
        hardware_tflops_per_device: The same with what is recomputed.
        exposed_communication_s: Seconds in which the device waits for messages that travel.
        bubble_s: Seconds in which it waits for other ranks.
        warnings: What makes the prediction less certain.
        parts: Where the time goes.
        launches: How many kernels and messages the host launches.
        rank: The slowest rank.
        timeline: What the replayed ranks do when, if that was asked for.
    """

    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    fits: bool | None
    peak_gib: float | None
    limit_gib: float
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    exposed_communication_s: float
    bubble_s: float
    warnings: list[str]
    parts: Parts
    launches: int = 0
    rank: int = 0
    timeline: dict[int, list[Interval]] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Returns what `gridformer predict --json` prints."""
        found = {name: value for name, value in vars(self).items() if name != "timeline"}
        return {**found, "parts": self.parts.as_json()}

    def chrome_trace(self) -> dict[str, Any]:
        """Returns the timeline in the format of Chrome traces, which Perfetto shows."""
        events: list[dict[str, Any]] = []
        for rank, intervals in self.timeline.items():
            streams = {"compute": 0}
            for one in intervals:
                thread = streams.setdefault(one.stream, len(streams))
                arguments = {"module": one.module} if one.module else {}
                events.append(
                    {
                        **{"name": one.name, "cat": one.kind, "ph": "X", "pid": rank},
                        **{"tid": thread, "ts": one.start * MICRO},
                        **{"dur": (one.end - one.start) * MICRO, "args": arguments},
                    }
                )
            name = {"name": "process_name", "ph": "M", "pid": rank}
            events.append({**name, "args": {"name": f"rank {rank}"}})
            for stream, thread in streams.items():
                about = {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread}
                events.append({**about, "args": {"name": stream}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}
