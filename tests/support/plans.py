"""Plans whose traces are what estimates say, so that they take no time."""

import functools
from collections.abc import Sequence

from gridformer.cluster.file import Cluster, load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.plan.prediction import Parts, Prediction
from gridformer.plan.roofline import estimate
from gridformer.plan.search import PlannedLayout, Result, Search
from gridformer.plan.trace_candidates import Predict, Tracing


@functools.cache
def cluster() -> Cluster:
    """Return a cluster of H100."""
    return load_cluster("dgx-h100")


def run_of(model: str = "gpt2-774m", *overrides: str, batch: int = 64) -> RunConfig:
    """Return a run of a model in bfloat16."""
    given = ["train.dtype=bfloat16", f"train.global_batch={batch}", *overrides]
    return parse_run({"model": model, "data": {"path": "."}}, given)


def predictor(run: RunConfig, machine: Cluster, peak: float = 1.0) -> Prediction:
    """Predict what the estimate says, with memory `peak` times as large; nothing is traced."""
    found = estimate(run, machine)
    gib, load = found.peak_gib * peak, found.load
    parts = Parts(load.products, load.attention, load.memory, exposed=dict(load.exposed))
    return Prediction(
        step_s=found.step_s,
        forward_s=found.step_s / 3,
        backward_s=found.step_s / 2,
        update_s=found.step_s / 6,
        fits=gib <= found.limit_gib,
        peak_gib=gib,
        limit_gib=found.limit_gib,
        model_tflops_per_device=1.0,
        hardware_tflops_per_device=1.0,
        exposed_communication_s=0.0,
        bubble_s=0.0,
        warnings=[],
        parts=parts,
    )


def search(
    run: RunConfig,
    machine: Cluster,
    n_devices: int,
    top: int = 10,
    limit_s: float = float("inf"),
    predictor: Predict = predictor,
    also: Sequence[RunConfig] = (),
) -> Result:
    """Return what `gridformer plan` finds."""
    tracing = Tracing(Search(run, machine, n_devices), top, predictor)
    tracing.run(limit_s, also)
    return tracing.result


@functools.cache
def found_on_8() -> Result:
    """Return what a search finds for GPT-2 774M on a node of H100."""
    return search(run_of(), cluster(), 8, top=4)


def trace_of(found: PlannedLayout) -> Prediction:
    """Return the prediction of a layout that was traced."""
    assert found.prediction is not None
    return found.prediction
