"""Runs layouts on an emulated cluster and predicts them with a cluster file of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.predicted.predictions import Predicted, Question, predict_all
from benchmarks.published.cases import Layout, Machine
from benchmarks.published.measuring import measured
from gridformer.calibrate.device import Measurements
from gridformer.calibrate.machine import cpu_cluster, write_cluster
from gridformer.cluster.file import Cluster, Figure, Fitted, Level

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A layout with what was predicted and measured: seconds of a step and of a forward pass.

    `forward_s` and `forward` are NaN where forward passes were not measured.
    """

    machine: Machine
    layout: Layout
    predicted: Predicted
    step_s: float
    forward: Predicted
    forward_s: float


def emulate(
    machine: Machine, layouts: tuple[Layout, ...], keep: Path | None, tell: Tell
) -> list[Outcome]:
    """Measures all layouts on an emulated machine, then predicts them.

    Args:
        machine: The machine.
        layouts: The layouts, all for as many processes as the machine has.
        keep: A folder for what is measured. What is there already is not measured again, so that a
            run can go on, and another model of time can be compared with the same measurements.
        tell: Receives progress messages.

    Raises:
        UserError: This machine cannot emulate a cluster; the message says why.
    """
    tell(f"{machine}: {len(layouts)} layouts")
    with tempfile.TemporaryDirectory(prefix="gridformer-emulate-") as folder:
        found, times = measured(machine, layouts, keep or Path(folder))
        file = Path(folder) / "emulated.yaml"
        write_cluster(cluster_of(machine, found), file)
        tell("predicting")
        runs = [layout.run(machine) for layout in layouts]
        both = [number for number, layout in enumerate(layouts) if layout.forward_too]
        questions = [Question(run) for run in runs]
        questions += [Question(runs[number], training=False) for number in both]
        answers = predict_all(questions, file)
    passes = dict(zip(both, answers[len(runs) :]))
    return [
        Outcome(machine, layout, answers[i], times[i][0], passes.get(i, Predicted()), times[i][1])
        for i, layout in enumerate(layouts)
    ]


def cluster_of(machine: Machine, found: Measurements) -> Cluster:
    """Returns the cluster file of an emulated machine.

    Args:
        machine: The machine.
        found: What was measured. With racks the rows between nodes say only how much of a link's
            rate is reached, and how long the smallest message takes.
    """
    if machine.nodes == 1:
        return cpu_cluster(found)
    sends = [row for row in found.rows["messages"] if row[0] == "send" and row[3] > 1]
    latency = Figure(
        value=min(row[-1] for row in sends),
        source="smallest message between two nodes, measured",
    )
    levels = [_outer("cluster", max(machine.n, 2 * machine.each), machine.mbit, latency)]
    if machine.racks > 1:
        in_rack = machine.n // machine.racks
        trunk = _outer("cluster", 2 * machine.n, machine.trunk_mbit, latency)
        levels = [
            _outer("rack", in_rack, machine.mbit, latency),
            trunk.model_copy(update={"shared_by": in_rack}),
        ]
    levels[0] = levels[0].model_copy(update={"shared_by": machine.each})
    fitted: dict[str, Fitted] = {}
    if machine.racks > 1:
        inside = [row for row in found.rows["messages"] if row[3] == 1]
        found = Measurements({**found.rows, "messages": inside}, found.failures)
        fitted["outer_efficiency"] = Fitted(
            value=round(max(_rate(row) for row in sends) / (machine.mbit / 8), 3),
            source="python -m benchmarks.published",
            data="the largest messages between two nodes",
            identified=True,
        )
    cluster = cpu_cluster(found)
    inner = cluster.levels[0].model_copy(update={"size": machine.each})
    cluster = cluster.model_copy(update={"levels": (inner, *levels), "fitted": fitted})
    return with_cores(cluster, machine.n) if machine.apart else cluster


def with_cores(cluster: Cluster, n: int) -> Cluster:
    """Returns a cluster whose processes share n cores; with one for each they share nothing."""
    cores = Figure(value=n, source="python -m benchmarks.published")
    return cluster.model_copy(update={"host": cluster.host.model_copy(update={"cores": cores})})


def _outer(name: str, size: int, mbit: float, latency: Figure) -> Level:
    figure = Figure(value=mbit / 8e3, source="tc, token bucket")
    return Level(
        name=name,
        size=size,
        bandwidth_gbps=figure,
        latency_us=latency,
        source="network namespaces of python -m benchmarks.published",
    )


def _rate(row: list[float]) -> float:
    """Returns the bytes per microsecond that a link carries, of a row of a message."""
    sharers, n_bytes, us = row[4:]
    return sharers * n_bytes / us
