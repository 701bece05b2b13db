"""Predicts the time of a recorded step on a cluster by replaying its traces."""

from __future__ import annotations

from collections.abc import Sequence

from gridformer.cluster.file import NO_DATA, Cluster
from gridformer.config import RunConfig
from gridformer.memory.room import room_on
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.plan.blocks import Programs
from gridformer.plan.costs import EventTimes, dtypes_without_peak
from gridformer.plan.prediction import Parts, Prediction
from gridformer.plan.program import Spent
from gridformer.plan.recorded import Recorded
from gridformer.plan.replay import replay
from gridformer.plan.replay_cpu import replay_cpu
from gridformer.record.events import Trace
from gridformer.train.flops import TERA, StepFlops


def price(
    recorded: Recorded, cluster: Cluster, layers_only: bool = False, timeline: bool = False
) -> Prediction:
    """Predicts the time of a recorded step on a cluster. Memory is not estimated.

    Args:
        recorded: The step.
        cluster: The cluster, with the type of device for which the step was recorded.
        layers_only: Whether only transformer layers count.
        timeline: Whether the prediction keeps what each rank does when.
    """
    prices = Prices(recorded.run, recorded.decisions, recorded.training, cluster, layers_only)
    found = prices.prediction(recorded.traces, timeline)
    found.warnings = warnings_of(recorded.run, cluster, recorded.traces)
    return found


class Prices:
    """The times of a run's step on a cluster, and the prediction from them.

    Args:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        training: Whether it is an optimizer step.
        cluster: The cluster.
        layers_only: Whether only transformer layers count.
    """

    def __init__(
        self,
        run: RunConfig,
        decisions: Decisions,
        training: bool,
        cluster: Cluster,
        layers_only: bool = False,
    ) -> None:
        self.run, self.decisions, self.training = run, decisions, training
        self.layers_only = layers_only
        n = run.layout.n_processes
        cluster = cluster.for_processes(n)
        self.host = cluster.host.launch_us.value * 1e-6, cluster.host.step_us.value * 1e-6
        cores = cluster.host.cores
        self.n_cores = cores.value if cores else n
        self.cluster = cluster
        self.costs = EventTimes(run, cluster, decisions)
        # In training, the host of a GPU launches a step while the GPU is at the step before. So no
        # part of a step waits for launches, unless all of them take longer than the step.
        self.ahead = training and not self.costs.on_cpu and not run.train.waits_each_step
        self.launch_s = 0.0 if self.ahead else self.host[0]

    def prediction(self, traces: Sequence[Trace], timeline: bool = False) -> Prediction:
        """Returns the prediction that follows from a step, without memory and warnings.

        Args:
            traces: The traces of all ranks that differ.
            timeline: Whether the prediction keeps what each rank does when.
        """
        spent = self._replayed(traces, timeline)
        whole, stretch = 0.0 if self.layers_only else self.host[1], 1.0
        if self.ahead:
            busy = max(one.end for one in spent)
            launching = max(one.n_launches for one in spent) * self.host[0] + whole
            whole = max(0.0, launching - busy)
            stretch += whole / busy
        flops = StepFlops.of(self.run, layers_only=self.layers_only)
        found = _prediction(self.run, self.cluster, spent, whole, stretch, self.training, flops)
        if any(one.intervals for one in spent):
            found.timeline = {one.rank: one.intervals for one in spent}
        return found

    def _replayed(self, traces: Sequence[Trace], timeline: bool) -> list[Spent]:
        whole = timeline or self.costs.on_cpu
        builder = Programs(self.costs, traces, self.launch_s, self.layers_only, whole)
        programs = [builder.program(trace) for trace in traces]
        n = self.run.layout.n_processes
        if not self.costs.on_cpu:
            return replay(programs, self.launch_s, timeline=timeline)
        weights = _weights(self.run, [program.rank for program in programs], self.decisions)
        return replay_cpu(programs, self.host[0], n, self.n_cores, weights, timeline)


def _weights(run: RunConfig, ranks: Sequence[int], decisions: Decisions) -> dict[int, float]:
    """Returns how many ranks each replayed rank stands for; see `different_ranks`."""
    n, stages = run.layout.n_processes, run.layout.pp
    if len(ranks) == stages:
        return dict.fromkeys(ranks, n / stages)
    mesh = mesh_ranks(run.layout, decisions.block)
    first = {int(rank) for stage in mesh for rank in stage[..., 0].flatten()}
    inside = mesh[0].numel() // mesh.shape[-1]
    return {r: inside if r in first else n / stages - inside for r in ranks}


def _prediction(
    run: RunConfig,
    cluster: Cluster,
    spent: Sequence[Spent],
    whole: float,
    stretch: float,
    training: bool,
    flops: StepFlops,
) -> Prediction:
    """Returns the prediction without memory and warnings.

    Args:
        run: The run.
        cluster: The cluster.
        spent: How the ranks spend the step.
        whole: Seconds in which the devices wait for the host besides those in `spent`.
        stretch: The factor by which this makes each phase longer; 1 adds it to the update.
        training: Whether it is an optimizer step.
        flops: The operations of the step.
    """
    last = max(one.end for one in spent)
    slowest = max(spent, key=lambda one: one.end - one.bubble)
    step_s = last + whole
    exposed = dict(slowest.exposed)
    hidden = {
        axis: max(0.0, seconds - exposed.get(axis, 0.0))
        for axis, seconds in slowest.messages.items()
    }
    rest = last - slowest.end
    parts = Parts(
        **{part: slowest.work.get(part, 0.0) for part in _WORK},
        launches=slowest.launches + whole,
        exposed=exposed,
        hidden=hidden,
        bubble=slowest.bubble + rest,
    )
    passes_s = max(one.passes_end for one in spent) * stretch
    forward = _forward_share(slowest)
    each = step_s * run.layout.n_processes * TERA or 1.0
    share = 1.0 if training else 1 / 3  # the backward pass has two products for each
    return Prediction(
        step_s=step_s,
        forward_s=passes_s * forward,
        backward_s=passes_s * (1 - forward),
        update_s=step_s - passes_s,
        fits=None,
        peak_gib=None,
        limit_gib=room_on(run, cluster),
        model_tflops_per_device=flops.model * share / each,
        hardware_tflops_per_device=(flops.hardware if training else flops.model / 3) / each,
        exposed_communication_s=sum(exposed.values()),
        bubble_s=parts.bubble,
        warnings=[],
        parts=parts,
        launches=slowest.n_launches,
        rank=slowest.rank,
    )


def _forward_share(one: Spent) -> float:
    """Returns the share of forward passes in what a rank does before the update.

    Time in which it waits for others is left out: in a pipeline most of it belongs to no pass.
    """
    mine = [one.phases.get(name, 0.0) - one.late.get(name, 0.0) for name in ("forward", "backward")]
    return mine[0] / sum(mine) if sum(mine) > 0 else 1.0


_WORK = ("products", "attention", "memory_bound", "update")


def warnings_of(run: RunConfig, cluster: Cluster, traces: Sequence[Trace]) -> list[str]:
    """Returns what makes a prediction less certain.

    Args:
        run: The run.
        cluster: The cluster.
        traces: The traces of a sample.
    """
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
    for dtype in dtypes_without_peak(traces, cluster, run.train.tf32):
        found.append(f"{cluster.name} states no peak rate for products of {dtype}")
    return found + doubts(cluster, run.layout.n_processes)


def doubts(cluster: Cluster, n_devices: int, extrapolated: bool = True) -> list[str]:
    """Returns which fitted numbers the data do not determine for runs on this many devices.

    Numbers that do not count for these runs are left out: those of messages on one device or in one
    node, and those that tables of measurements replace.

    Args:
        cluster: The cluster.
        n_devices: The number of devices.
        extrapolated: Whether those that were fitted to runs on fewer nodes are named, too.
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
