"""Traces the run of a published row once, and prices it on clusters with other fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.planner.rows import Row
from gridformer.cluster.file import Cluster, load_cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.plan import predict as predicting
from gridformer.plan.prediction import Prediction


@dataclass
class RecordedRow:
    """A row and the traces of its run."""

    row: Row
    recorded: predicting.Recorded


def uncompiled(run: RunConfig) -> RunConfig:
    """Returns a run without torch.compile, as the published code ran."""
    return run.model_copy(update={"train": run.train.model_copy(update={"compile": False})})


def record(row: Row, training: bool = True) -> RecordedRow:
    """Traces the run of a row; call it in a process that belongs to no process group.

    Args:
        row: The row.
        training: Whether it is an optimizer step; otherwise its forward passes.
    """
    check_layout(row.run)
    decisions = decide_run(row.run)
    if row.node_block is not None:
        same = [
            candidate
            for candidate in decisions.candidates
            if candidate.block and (candidate.block.row, candidate.block.col) == row.node_block
        ]
        decisions = replace(decisions, candidates=same)
    run = uncompiled(row.run)
    return RecordedRow(row, predicting.record_run(run, "cuda", decisions, training))


def cluster_of(row: Row) -> Cluster:
    """Returns the row's cluster, with attention as the published code computed it."""
    cluster = load_cluster(row.cluster)
    device = cluster.device.model_copy(update={"fused_attention": row.fused_attention})
    return cluster.model_copy(update={"device": device})


def price(recorded: RecordedRow, cluster: Cluster) -> Prediction:
    """Predicts the run of a row on a cluster."""
    return predicting.price(recorded.recorded, cluster, layers_only=recorded.row.layers > 0)


def predicted(recorded: RecordedRow, cluster: Cluster) -> float:
    """Returns what is predicted for a row, in the unit of what was published."""
    row, found = recorded.row, price(recorded, cluster)
    if row.value == "TFLOP/s":
        return found.model_tflops_per_device
    if row.value == "hardware TFLOP/s":
        return found.hardware_tflops_per_device
    if row.value == "MFU":
        peak = cluster.device.peak_tflops[row.run.train.dtype].value
        return 100 * found.model_tflops_per_device / peak
    seconds = found.step_s
    if row.layers:
        seconds *= row.layers / row.run.model.n_layers
    return seconds / row.run.train.global_batch if row.value == "s/sequence" else seconds


def error(row: Row, found: float) -> float:
    """Returns the relative error of a predicted time; rates count as the times they stand for."""
    if row.value in ("s/sequence", "s/iteration"):
        return found / row.published - 1
    return row.published / found - 1
