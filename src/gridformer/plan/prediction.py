"""The result of a prediction: the time of a step, where it goes, whether the run fits, how sure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gridformer.cluster.file import NO_DATA, Cluster
from gridformer.config import RunConfig
from gridformer.plan.replay import Interval
from gridformer.record.routing import routing_notes

MICRO = 1e6
_LEAST_S = 1e-6  # what takes less than a microsecond of a step is rounding


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

    def by_kind(self) -> dict[str, float]:
        """Returns all that adds up to the step, messages by axis."""
        return {
            "products": self.products,
            "attention": self.attention,
            "memory-bound": self.memory_bound,
            "update": self.update,
            **{f"messages over {axis}": seconds for axis, seconds in self.exposed.items()},
            "launches": self.launches,
            "bubble": self.bubble,
        }


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
        model_tflops_per_device: Operations of the model (`train.flops`), in 10^12 per second.
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

    def seconds_by_kind(self) -> dict[str, float]:
        """Returns the seconds of a step by kind; `other` is what no kind explains."""
        seconds = {kind: s for kind, s in self.parts.by_kind().items() if s >= _LEAST_S}
        rest = self.step_s - sum(seconds.values())
        return seconds | ({"other": rest} if rest > 0.005 * self.step_s else {})

    def hidden_by_axis(self) -> dict[str, float]:
        """Returns the seconds in which messages travel while the device computes, by axis."""
        hidden = self.parts.hidden.items()
        return {f"messages over {axis}": s for axis, s in hidden if s >= _LEAST_S}

    def to_json(self) -> dict[str, Any]:
        """Returns what `gridformer predict --json` prints."""
        values = {name: value for name, value in vars(self).items() if name != "timeline"}
        return {**values, "parts": dict(vars(self.parts))}

    def chrome_trace(self) -> dict[str, Any]:
        """Returns the timeline in the format of Chrome traces, which Perfetto shows."""
        events: list[dict[str, Any]] = []
        for rank, intervals in self.timeline.items():
            streams = {"compute": 0}
            for one in intervals:
                thread = streams.setdefault(one.stream, len(streams))
                events.append(
                    {
                        **{"name": one.name, "cat": one.kind, "ph": "X", "pid": rank},
                        **{"tid": thread, "ts": one.start * MICRO},
                        **{"dur": (one.end - one.start) * MICRO},
                        "args": {"module": one.module} if one.module else {},
                    }
                )
            about = {"ph": "M", "pid": rank}
            events.append({"name": "process_name", **about, "args": {"name": f"rank {rank}"}})
            for stream, thread in streams.items():
                about["tid"] = thread
                events.append({"name": "thread_name", **about, "args": {"name": stream}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


# --------------------------------------------------------------------------- how sure it is


def warnings_of(run: RunConfig, cluster: Cluster, dtypes: Iterable[str]) -> list[str]:
    """Returns what makes a prediction less certain, for a run with products of these types."""
    found = []
    if run.layout.n_processes > cluster.size:
        found.append(
            f"the run has {run.layout.n_processes} devices, and {cluster.name} describes "
            f"{cluster.size}: the outermost level is taken to go on"
        )
    copies = run.train.offload == "optimizer" and cluster.device.kind != "cpu"
    if copies and cluster.host.link_gbps is None:
        found.append(
            f"{cluster.name} does not state host.link_gbps: {cluster.link_gbps:g} GB/s are "
            "assumed between host and device, over which train.offload copies moments"
        )
    for dtype in sorted({*dtypes} - {*cluster.device.peak_tflops}):
        found.append(f"{cluster.name} states no peak rate for products of {dtype}")
    found += routing_notes(run)
    return found + doubts(cluster, run.layout.n_processes)


def doubts(cluster: Cluster, n_devices: int, extrapolated: bool = True) -> list[str]:
    """Returns which fitted numbers the data do not determine for runs on this many devices.

    Numbers that do not count for these runs are left out: those of messages on one device or in one
    node, and those that tables of measurements replace. With `extrapolated` those that were fitted
    to runs on fewer nodes are named, too.
    """
    nodes, tables = -(-n_devices // cluster.node_size), cluster.tables
    by_formula = {
        "product_efficiency": not tables.products,
        "memory_efficiency": not tables.memory,
        "inner_efficiency": n_devices > 1 and cluster.node_size > 1 and not tables.messages,
        "outer_efficiency": nodes > 1 and not tables.messages,
        "slowdown_per_node": nodes > 2 and not tables.messages,
    }
    unsure: dict[tuple[str, str, str], list[str]] = {}  # numbers of which the same is to be said
    far = []
    for name, counts in by_formula.items():
        fitted = cluster.fitted.get(name)
        if not counts or (fitted is None and not cluster.number(name)):
            continue
        if fitted is None or fitted.data == NO_DATA:
            number = f"{name} ({cluster.number(name):g})"
            unsure.setdefault(("was", "were", "not fitted to any data"), []).append(number)
            continue
        if not fitted.identified:
            note = f": {fitted.note}" if fitted.note else ""
            key = ("is", "are", f"not determined by {fitted.data}{note}")
            unsure.setdefault(key, []).append(name)
        if fitted.up_to_nodes and nodes > fitted.up_to_nodes:
            far.append(
                f"{name} of {cluster.name} was fitted to runs on at most {fitted.up_to_nodes} "
                f"nodes: for {nodes} nodes it is extrapolated"
            )
    return far * extrapolated + [
        f"{', '.join(names)} of {cluster.name} {several if len(names) > 1 else one} {what}"
        for (one, several, what), names in unsure.items()
    ]


# Mean errors, in percent, of steps to which nothing was fitted, and where they are listed.
_ERRORS = {
    "CPUs of one node": (9, "44 layouts in each of six runs, docs/results/predicted.md"),
    "CPUs of several nodes": (12, "64 layouts in each of six runs, docs/results/published.md"),
    "calibrated GPUs": (23, "16 steps on an H100, docs/results/predicted-h100.md"),
    "GPUs that nothing was fitted to": (18, "2 steps on V100, docs/results/planner.md"),
    "GPUs on PCI Express": (12, "8 steps on Frontera, docs/results/planner.md"),
    "GPUs on NVLink": (10, "9 steps on A100 and H100, docs/results/planner.md"),
}


def sureness(cluster: Cluster, n_devices: int) -> str:
    """Returns a sentence with the mean error of predictions for machines like this one."""
    product = cluster.fitted.get("product_efficiency")
    if cluster.device.kind == "cpu":
        like = f"CPUs of {'several nodes' if n_devices > cluster.node_size else 'one node'}"
    elif cluster.tables.products:
        like = "calibrated GPUs"
    elif product is None or product.data == NO_DATA:
        like = "GPUs that nothing was fitted to"
    else:
        slow = cluster.levels[0].bandwidth_gbps.value <= 64  # PCI Express 5.0
        like = f"GPUs on {'PCI Express' if slow else 'NVLink'}"
    percent, steps = _ERRORS[like]
    return f"How sure: +-{percent}%, the mean error for {like} ({steps})."
