"""Predicts how long a step of a run takes on a cluster, from traces of the ranks that differ."""

from __future__ import annotations

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.breakdown import breakdown_of
from gridformer.memory.estimate import estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.auto.decisions import decide_run
from gridformer.plan.prediction import Prediction
from gridformer.plan.price import Prices, warnings_of
from gridformer.plan.recorded import on_device_type, records_of, unfused
from gridformer.utils.units import GIB


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
        run: The run.
        cluster: The cluster.
        layers_only: Whether only transformer layers count, forward and backward.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        memory: Whether the memory is estimated, too: that of an optimizer step.
        timeline: Whether the prediction keeps what each rank does when.
        on_all_cores: Whether copies of this process do it, as many as there are cores.

    Raises:
        UserError: The step of this run fails, which `gridformer check` explains.
    """
    run = on_device_type(run, cluster.device.kind)
    decisions = decide_run(run)
    held = unfused(run, cluster)
    memory = memory and training
    records = records_of(
        run,
        decisions,
        training,
        storages=memory and held == run,
        all_layers=timeline,
        on_all_cores=on_all_cores,
    )
    traces = [one.trace for one in records]
    prices = Prices(run, decisions, training, cluster, layers_only)
    found = prices.prediction(traces, timeline)
    found.warnings = warnings_of(run, prices.cluster, traces)
    if memory:
        ranks = [*largest_ranks(held, decisions)]
        if held == run:
            on_cpu = cluster.device.kind == "cpu"
            mine = [one for one in records if one.trace.rank in ranks]
            breakdowns = [breakdown_of(one, on_cpu, timeline=False) for one in mine]
        else:
            breakdowns = estimate_ranks(held, ranks, decisions)
        found.peak_gib = max(one.needed for one in breakdowns) / GIB
        found.fits = found.peak_gib <= found.limit_gib
    return found
