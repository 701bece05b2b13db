"""Traces what ranks of a run do in a step, as far as its time on any cluster follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.registry import spec_of
from gridformer.record.device import Backend
from gridformer.record.events import Trace
from gridformer.record.itineraries import alike_stages
from gridformer.record.rank import Extent, RankRecord, RecordOptions, record_ranks

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Recorded:
    """What the ranks of a run do, from which its time on any cluster of a kind follows.

    Attributes:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        traces: The traces of the ranks that differ.
        training: Whether it is an optimizer step.
    """

    run: RunConfig
    decisions: Decisions
    traces: list[Trace]
    training: bool


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


def record_run(
    run: RunConfig,
    kind: Kind = "cuda",
    decisions: Decisions | None = None,
    training: bool = True,
    all_layers: bool = False,
) -> Recorded:
    """Traces a run's step for `gridformer.plan.price`.

    Args:
        run: The checked run.
        kind: The type of device.
        decisions: What `decide_run(run)` returns, or others, such as another block of a node.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        all_layers: Whether all layers run, so that events have their names.

    Raises:
        UserError: The step of this run fails.
    """
    run = on_device_type(run, kind)
    decisions = decisions or decide_run(run)
    records = records_of(run, decisions, training, all_layers=all_layers)
    return Recorded(run, decisions, [one.trace for one in records], training)


def records_of(
    run: RunConfig,
    decisions: Decisions,
    training: bool,
    storages: bool = False,
    all_layers: bool = False,
    on_all_cores: bool = False,
) -> list[RankRecord]:
    """Records the ranks that differ, with their kernels.

    Args:
        run: The checked run, on a type of device.
        decisions: The decisions of its layout.
        training, all_layers: See `record_run`.
        storages: Whether memory is recorded, too.
        on_all_cores: Whether copies of this process share the work.

    Raises:
        UserError: The step of this run fails.
    """
    backend: Backend = "nccl" if run.train.device == "cuda" else "gloo"
    extent: Extent = "all layers" if all_layers else "composed"
    how = RecordOptions(backend, True, storages, training, extent)
    found = record_ranks(run, different_ranks(run, decisions), decisions, how, on_all_cores)
    for one in found:
        if not one.trace.complete:
            raise one.trace.failure
    return found


def different_ranks(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns ranks that stand for all, in lists of those whose stages have equal layers.

    These are the first rank of each stage, on each kind of sub-grid.
    """
    layout = run.layout
    mesh = mesh_ranks(layout, decisions.block)
    places = [0]
    if spec_of(layout).boundary(layout).lies == "first" and mesh[0, 0].numel() > 1:
        places.append(1)  # a sub-grid without the common layers
    stages = alike_stages(run, decisions)
    return [
        [int(mesh[stage].flatten()[place]) for stage in line] for line in stages for place in places
    ]
