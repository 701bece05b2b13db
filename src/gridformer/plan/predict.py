"""Predicts how long a step of a run takes on a cluster, from traces of the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from gridformer.check.sample import alike_stages
from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.estimate import estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.registry import spec_of
from gridformer.plan.blocks import Programs
from gridformer.plan.costs import Costs, dtypes_without_peak
from gridformer.plan.fewer_layers import extended, removable, without_layers
from gridformer.plan.fewer_rounds import removable_rounds, without_rounds
from gridformer.plan.prediction import Parts, Prediction
from gridformer.plan.program import Spent
from gridformer.plan.replay import replay
from gridformer.plan.replay_cpu import replay_cpu
from gridformer.trace.alike import trace_alike
from gridformer.trace.device import Backend
from gridformer.trace.events import Trace
from gridformer.trace.rank import trace_rank
from gridformer.train.flops import TERA, StepFlops
from gridformer.utils.beside import beside
from gridformer.utils.errors import UserError
from gridformer.utils.garbage import no_garbage_collection
from gridformer.utils.units import GIB


def predict(
    run: RunConfig,
    cluster: Cluster,
    layers_only: bool = False,
    training: bool = True,
    memory: bool = True,
    timeline: bool = False,
    peak_gib: Callable[[], float] | None = None,
) -> Prediction:
    """Predicts one optimizer step of a checked run on a cluster.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The run.
        cluster: The cluster.
        layers_only: Whether only transformer layers count, forward and backward.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        memory: Whether the memory is estimated, too.
        timeline: Whether the prediction keeps what each rank does when.
        peak_gib: Waits for the memory, if it is being estimated; see `peak_beside`.

    Raises:
        UserError: The step of this run fails, which `gridformer check` explains.
    """
    timed: Callable[[], Prediction] = partial(
        _predict_time, run, cluster, layers_only, training, timeline
    )
    if peak_gib is not None:
        timed = beside(timed)  # a copy of this process loads less; see gridformer.trace.no_dtensor
    found = timed()
    if memory:
        if peak_gib is None:
            on_device = _on_device(run, cluster.device.kind)
            peak_gib = partial(_peak_gib, on_device, cluster, decide_run(on_device))
        found.peak_gib = peak_gib()
        found.fits = found.peak_gib <= found.limit_gib
    return found


def _predict_time(
    run: RunConfig, cluster: Cluster, layers_only: bool, training: bool, timeline: bool
) -> Prediction:
    recorded = record(run, cluster.device.kind, training=training, whole=timeline)
    return price(recorded, cluster, layers_only, timeline)


def peak_beside(run: RunConfig, cluster: Cluster) -> Callable[[], float]:
    """Begins to estimate the memory of a run, on another core if there is one.

    Returns:
        What waits for the peak of the fullest rank, in GiB.
    """
    run = _on_device(run, cluster.device.kind)
    return beside(partial(_peak_gib, run, cluster, decide_run(run)))


def _peak_gib(run: RunConfig, cluster: Cluster, decisions: Decisions) -> float:
    run = unfused(run, cluster)
    breakdowns = estimate_ranks(run, [*largest_ranks(run, decisions)], decisions)
    return max(breakdown.peak for breakdown in breakdowns) / GIB


def _on_device(run: RunConfig, kind: Literal["cuda", "cpu"]) -> RunConfig:
    return run.model_copy(update={"train": run.train.model_copy(update={"device": kind})})


@dataclass(frozen=True)
class Recorded:
    """What the ranks of a run do, from which its time on any cluster of a kind follows.

    Attributes:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        traces: The traces of the ranks that differ.
        training: Whether it is an optimizer step.
        shorter: Traces with one layer fewer in each stage; empty if `traces` have all layers.
        more: How many layers each stage has besides those of `traces`.
        earlier: The same with one round of micro-batches fewer; None if there is no such sample.
        rounds: How many rounds the run has besides those of this record.
    """

    run: RunConfig
    decisions: Decisions
    traces: list[Trace]
    training: bool
    shorter: list[Trace] = field(default_factory=list)
    more: int = 0
    earlier: Recorded | None = None
    rounds: int = 0


def record(
    run: RunConfig,
    kind: Literal["cuda", "cpu"] = "cuda",
    decisions: Decisions | None = None,
    training: bool = True,
    whole: bool = False,
) -> Recorded:
    """Traces a run's step for `price`.

    Args:
        run: The checked run.
        kind: The type of device.
        decisions: What `decide_run(run)` returns, or others, such as another block of a node.
        training: See `predict`.
        whole: Whether all layers and micro-batches are traced; otherwise see
            `gridformer.plan.fewer_layers` and `fewer_rounds`.

    Raises:
        UserError: The step of this run fails.
    """
    run = _on_device(run, kind)
    decisions = decisions or decide_run(run)
    rounds = 0 if whole else removable_rounds(run)
    if not rounds:
        return _record(run, kind, decisions, training, whole)
    later, earlier = (
        _record(without_rounds(run, fewer), kind, decisions, training, whole)
        for fewer in (rounds - 1, rounds)
    )
    return replace(later, run=run, earlier=earlier, rounds=rounds - 1)


def _record(
    run: RunConfig,
    kind: Literal["cuda", "cpu"],
    decisions: Decisions,
    training: bool,
    whole: bool,
) -> Recorded:
    """Traces all micro-batches of a run, with few layers; see `record`."""
    n = 0 if whole else removable(run, decisions)
    samples = []
    with no_garbage_collection():
        if not n:
            return Recorded(run, decisions, traces_of(run, kind, decisions, training), training)
        for fewer in (n - 1, n):
            with without_layers(run, decisions, fewer) as part:
                samples.append(traces_of(part, kind, decisions, training))
    return Recorded(run, decisions, samples[0], training, samples[1], n - 1)


def price(
    recorded: Recorded, cluster: Cluster, layers_only: bool = False, timeline: bool = False
) -> Prediction:
    """Predicts the time of a recorded step on a cluster. Memory is not estimated.

    Args:
        recorded: The step.
        cluster: The cluster, with the type of device for which the step was recorded.
        layers_only: See `predict`.
        timeline: See `predict`; it shows the layers that were traced.
    """
    run, traces = recorded.run, recorded.traces
    n = run.layout.n_processes
    host = cluster.host.launch_us.value * 1e-6, cluster.host.step_us.value * 1e-6
    if cluster.device.kind == "cpu":  # processes share the cores and the memory
        cluster = cluster.model_copy(update={"processes": n})
        host = cluster.tables.host_s(n) or host
    cores = cluster.host.cores
    n_cores = cores.value if cores else n
    weights = _weights(run, [trace.rank for trace in traces], recorded.decisions)
    costs = Costs(run, cluster, recorded.decisions)

    # In training, the host of a GPU launches a step while the GPU is at the step before. So no part
    # of a step waits for launches, unless all of them take longer than the step.
    ahead = recorded.training and not costs.on_cpu and run.train.dtype != "float16"
    launch_s = 0.0 if ahead else host[0]

    def replayed(traces: Sequence[Trace], timeline: bool = False) -> list[Spent]:
        builder = Programs(costs, traces, launch_s, layers_only, timeline or costs.on_cpu)
        programs = [builder.program(trace) for trace in traces]
        if costs.on_cpu:
            return replay_cpu(programs, host[0], n, n_cores, weights, timeline)
        return replay(programs, launch_s, timeline=timeline)

    def all_layers(recorded: Recorded, timeline: bool = False) -> list[Spent]:
        spent = replayed(recorded.traces, timeline)
        if not recorded.shorter:
            return spent
        pairs = zip(spent, replayed(recorded.shorter))
        return [extended(one, other, recorded.more).at_least(one) for one, other in pairs]

    spent = all_layers(recorded, timeline)
    if recorded.earlier is not None:
        pairs = zip(spent, all_layers(recorded.earlier))
        spent = [extended(one, other, recorded.rounds) for one, other in pairs]
    whole, stretch = 0.0 if layers_only else host[1], 1.0
    if ahead:
        busy = max(one.end for one in spent)
        launching = max(one.n_launches for one in spent) * host[0] + whole
        whole = max(0.0, launching - busy)
        stretch += whole / busy
    found = _prediction(run, cluster, spent, whole, stretch, recorded.training)
    found.warnings = _warnings(run, cluster, traces)
    if timeline:
        found.timeline = {one.rank: one.intervals for one in spent}
    return found


def unfused(run: RunConfig, cluster: Cluster) -> RunConfig:
    """Returns the run with attention that keeps its scores if the cluster has no fused one.

    Scores of attention without dropout are then kept like those with very little of it, which no
    fused kernel computes.
    """
    if cluster.device.fused_attention:
        return run
    model = run.model
    if not model.attention_dropout:
        model = model.model_copy(update={"attention_dropout": 1e-6})
    train = run.train.model_copy(update={"kernels": "torch"})
    return run.model_copy(update={"model": model, "train": train})


def traces_of(
    run: RunConfig, kind: Literal["cuda", "cpu"], decisions: Decisions, training: bool
) -> list[Trace]:
    """Traces the ranks that differ: the first rank of each stage, on each kind of sub-grid.

    Raises:
        UserError: A trace does not come to its end.
    """
    backend: Backend = "nccl" if kind == "cuda" else "gloo"
    found: list[Trace] = []
    for line in different_ranks(run, decisions):
        if len(line) > 1 and training:
            found += trace_alike(run, line, decisions, True, backend)
            continue
        found += [
            trace_rank(run, rank, decisions, training, True, backend, training) for rank in line
        ]
    for trace in found:
        if not trace.complete:
            raise UserError(
                f"the step of rank {trace.rank} fails: {trace.troubles[-1].text}; "
                "`gridformer check` says more"
            )
    return sorted(found, key=lambda trace: trace.rank)


def different_ranks(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns ranks that stand for all, in lists of those whose stages have equal layers."""
    layout = run.layout
    mesh = mesh_ranks(layout, decisions.block)
    places = [0]
    if spec_of(layout).boundary(layout).lies == "first" and mesh[0, 0].numel() > 1:
        places.append(1)  # a sub-grid without the common layers
    stages = alike_stages(run, decisions)
    return [
        [int(mesh[stage].flatten()[place]) for stage in line] for line in stages for place in places
    ]


def _weights(run: RunConfig, ranks: Sequence[int], decisions: Decisions) -> dict[int, float]:
    """Returns for how many ranks each rank stands that is replayed; see `different_ranks`."""
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
) -> Prediction:
    """Returns the prediction without memory and warnings.

    Args:
        run: The run.
        cluster: The cluster.
        spent: How the ranks spend the step.
        whole: Seconds in which the devices wait for the host besides those in `spent`.
        stretch: The factor by which this makes each phase longer; 1 adds it to the update.
        training: Whether it is an optimizer step.
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
    flops = StepFlops.of(run)
    each = step_s * run.layout.n_processes * TERA or 1.0
    share = 1.0 if training else 1 / 3  # the backward pass has two products for each
    return Prediction(
        step_s=step_s,
        forward_s=passes_s * forward,
        backward_s=passes_s * (1 - forward),
        update_s=step_s - passes_s,
        fits=None,
        peak_gib=None,
        limit_gib=cluster.limit_gib,
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


def _warnings(run: RunConfig, cluster: Cluster, traces: Sequence[Trace]) -> list[str]:
    found = []
    if run.layout.n_processes > cluster.size:
        found.append(
            f"the run has {run.layout.n_processes} devices, and {cluster.name} describes "
            f"{cluster.size}: the outermost level is taken to go on"
        )
    for dtype in dtypes_without_peak(traces, cluster, run.train.tf32):
        found.append(f"{cluster.name} states no peak rate for products of {dtype}")
    for name, fitted in cluster.fitted.items():
        if not fitted.identified:
            note = f": {fitted.note}" if fitted.note else ""
            found.append(f"{name} of {cluster.name} is not determined by {fitted.data}{note}")
    return found
