"""Predicts how long a step of a run takes on a cluster.

The ranks that differ are recorded once, and replayed with the times of any cluster of that kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.estimate import breakdown_of, estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.memory.room import room_on
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.registry import spec_of
from gridformer.plan.prediction import Parts, Prediction, warnings_of
from gridformer.plan.program import EventTimes, Programs
from gridformer.plan.replay import Spent, replay
from gridformer.plan.replay_cpu import replay_cpu
from gridformer.record.device import Backend
from gridformer.record.events import Trace
from gridformer.record.itineraries import alike_stages
from gridformer.record.rank import RankRecord, record_ranks
from gridformer.record.step import Extent, RecordOptions
from gridformer.train.flops import TERA, StepFlops
from gridformer.utils.units import GIB

Kind = Literal["cuda", "cpu"]
_WORK = ("products", "attention", "memory_bound", "update")


def predict(
    run: RunConfig,
    cluster: Cluster,
    layers_only: bool = False,
    training: bool = True,
    memory: bool = True,
    timeline: bool = False,
    on_all_cores: bool = False,
) -> Prediction:
    """Predicts one optimizer step of a checked run on a cluster.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        layers_only: Whether only transformer layers count, forward and backward.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        memory: Whether the memory is estimated, too: that of an optimizer step.
        timeline: Whether the prediction keeps what each rank does when.
        on_all_cores: Whether copies of this process do it, as many as there are cores.

    Raises:
        UserError: The step of this run fails, which `gridformer check` explains.
    """
    kind = cluster.device.kind
    run = on_device_type(run, kind)
    held = unfused(run, cluster)
    memory = memory and training
    recorded = record_run(run, kind, None, training, timeline, memory and held == run, on_all_cores)
    prediction = price(recorded, cluster, layers_only, timeline)
    if memory:
        ranks = [*largest_ranks(held, recorded.decisions)]
        if held == run:
            mine = [one for one in recorded.records if one.trace.rank in ranks]
            breakdowns = [breakdown_of(one, kind == "cpu", timeline=False) for one in mine]
        else:
            breakdowns = estimate_ranks(held, ranks, recorded.decisions)
        prediction.peak_gib = max(one.needed for one in breakdowns) / GIB
        prediction.fits = prediction.peak_gib <= prediction.limit_gib
    return prediction


def on_device_type(run: RunConfig, kind: Kind) -> RunConfig:
    """Returns a run on a type of device."""
    return run.model_copy(update={"train": run.train.model_copy(update={"device": kind})})


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


# --------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Recorded:
    """What the ranks of a run that differ do in a step.

    Attributes:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        traces: The traces of these ranks.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        records: Their records, with memory if that was asked for.
    """

    run: RunConfig
    decisions: Decisions
    traces: list[Trace]
    training: bool
    records: Sequence[RankRecord] = ()


def record_run(
    run: RunConfig,
    kind: Kind = "cuda",
    decisions: Decisions | None = None,
    training: bool = True,
    all_layers: bool = False,
    storages: bool = False,
    on_all_cores: bool = False,
) -> Recorded:
    """Records the ranks of a checked run that differ, with their kernels.

    Args:
        decisions: The result of `decide_run(run)`, or others, such as another block of a node.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        all_layers: Whether all layers run, so that events have their names.
        storages: Whether memory is recorded, too.
        on_all_cores: Whether copies of this process share the work.

    Raises:
        UserError: The step of this run fails.
    """
    run = on_device_type(run, kind)
    decisions = decisions or decide_run(run)
    backend: Backend = "nccl" if kind == "cuda" else "gloo"
    extent: Extent = "all layers" if all_layers else "composed"
    options = RecordOptions(backend, True, storages, training, extent)
    records = record_ranks(run, different_ranks(run, decisions), decisions, options, on_all_cores)
    for one in records:
        if not one.trace.complete:
            raise one.trace.failure
    return Recorded(run, decisions, [one.trace for one in records], training, records)


def different_ranks(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns ranks that stand for all, in lists of those whose stages have equal layers.

    These are the first rank of each stage, on each kind of sub-grid.
    """
    layout = run.layout
    mesh = mesh_ranks(layout, decisions.block)
    places = [0]
    if spec_of(layout).boundary(layout).activation_layout == "first" and mesh[0, 0].numel() > 1:
        places.append(1)  # a sub-grid without the common layers
    stages = alike_stages(run, decisions)
    return [
        [int(mesh[stage].flatten()[place]) for stage in line] for line in stages for place in places
    ]


# --------------------------------------------------------------------------- time


def price(
    recorded: Recorded, cluster: Cluster, layers_only: bool = False, timeline: bool = False
) -> Prediction:
    """Predicts the time of a recorded step on a cluster. Memory is not estimated.

    The cluster has the type of device for which the step was recorded.
    """
    run, training, n = recorded.run, recorded.training, recorded.run.layout.n_processes
    cluster = cluster.for_processes(n)
    launch_s = cluster.host.launch_us.value * 1e-6
    times = EventTimes(run, cluster, recorded.decisions)
    on_cpu = times.costs.on_cpu
    # In training, the host of a GPU launches a step while the GPU is at the step before. So no part
    # of a step waits for launches, unless all of them take longer than the step.
    ahead = training and not on_cpu and not run.train.waits_each_step
    waits_s, whole = 0.0 if ahead else launch_s, timeline or on_cpu
    builder = Programs(times, recorded.traces, waits_s, layers_only, whole)
    programs = {trace.rank: builder.program(trace) for trace in recorded.traces}
    if on_cpu:
        cores, weights = cluster.host.cores, _weights(run, [*programs], recorded.decisions)
        n_cores = cores.value if cores else n
        spent = replay_cpu(programs, launch_s, n, n_cores, weights, timeline)
    else:
        spent = replay(programs, waits_s, timeline)
    rest_s, stretch = 0.0 if layers_only else cluster.host.step_us.value * 1e-6, 1.0
    if ahead:
        busy = max(one.end for one in spent)
        launching = max(one.n_launches for one in spent) * launch_s + rest_s
        rest_s = max(0.0, launching - busy)
        stretch += rest_s / busy
    step = StepFlops.of(run, layers_only=layers_only)
    # The backward pass has two products for each of the forward pass.
    flops = (step.model, step.hardware) if training else (step.model / 3, step.model / 3)
    prediction = _prediction(run, cluster, spent, rest_s, stretch, flops)
    prediction.warnings = warnings_of(run, cluster, times.dtypes)
    if timeline:
        prediction.timeline = {one.rank: one.intervals for one in spent}
    return prediction


def _weights(run: RunConfig, ranks: Sequence[int], decisions: Decisions) -> dict[int, float]:
    """Returns how many ranks each of `different_ranks` stands for."""
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
    rest_s: float,
    stretch: float,
    flops: tuple[float, float],
) -> Prediction:
    """Returns the prediction without memory and warnings.

    In the seconds `rest_s` devices wait for the host, besides those in `spent`. They make phases
    longer by the factor `stretch`; 1 adds them to the update.
    """
    last = max(one.end for one in spent)
    slowest = max(spent, key=lambda one: one.end - one.bubble)
    step_s = last + rest_s
    exposed = dict(slowest.exposed)
    hidden = {
        axis: max(0.0, seconds - exposed.get(axis, 0.0))
        for axis, seconds in slowest.messages.items()
    }
    parts = Parts(
        **{part: slowest.work.get(part, 0.0) for part in _WORK},
        launches=slowest.launches + rest_s,
        exposed=exposed,
        hidden=hidden,
        bubble=slowest.bubble + (last - slowest.end),
    )
    passes_s = max(one.end - one.phases.get("update", 0.0) for one in spent) * stretch
    # The share of forward passes in what a rank does before the update. Waiting for other ranks is
    # left out: in a pipeline most of it belongs to no pass.
    forward_s, backward_s = (
        slowest.phases.get(name, 0.0) - slowest.late.get(name, 0.0)
        for name in ("forward", "backward")
    )
    both_s = forward_s + backward_s
    forward = forward_s / both_s if both_s > 0 else 1.0
    each = step_s * run.layout.n_processes * TERA or 1.0
    return Prediction(
        step_s=step_s,
        forward_s=passes_s * forward,
        backward_s=passes_s * (1 - forward),
        update_s=step_s - passes_s,
        fits=None,
        peak_gib=None,
        limit_gib=room_on(run, cluster),
        model_tflops_per_device=flops[0] / each,
        hardware_tflops_per_device=flops[1] / each,
        exposed_communication_s=sum(exposed.values()),
        bubble_s=parts.bubble,
        warnings=[],
        parts=parts,
        launches=slowest.n_launches,
        rank=slowest.rank,
    )
