"""Runs layouts on an emulated cluster and predicts them with a cluster file of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.predicted.predictions import Predicted, Question, predict_all
from benchmarks.predicted.steps import measure
from benchmarks.published.cases import Layout, Machine
from benchmarks.published.namespaces import enter, network
from gridformer import comm
from gridformer.calibrate.cases import Cases, LinearShape, cpu_cases
from gridformer.calibrate.device import average, measure_cpu
from gridformer.calibrate.found import Measurements
from gridformer.calibrate.machine import cpu_cluster
from gridformer.calibrate.messages import message_seconds, sends_of
from gridformer.calibrate.write import write_cluster
from gridformer.cluster import Cluster, Figure, Level
from gridformer.config import RunConfig
from gridformer.launch import launch
from gridformer.mesh.axes import Axis
from gridformer.mesh.groups import make_groups
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.utils.errors import UserError
from gridformer.utils.hardware import n_cores

Tell = Callable[[str], None]
MESSAGES = (64, 16_384, 131_072, 524_288)  # bytes
STEPS, WARM_UPS = 5, 2


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


def cases() -> Cases:
    """Returns what is measured of the processor: shapes of tiny models."""
    widths = ((64, 64), (128, 128), (128, 512))
    few = [LinearShape(t, i, o) for t in (64, 256, 1024) for i, o in widths]
    return replace(cpu_cases(), few_linears=tuple(few), window_s=0.04)


def patterns(machine: Machine) -> list[tuple[int, int]]:
    """Returns the members and the distance of ranks of groups that layouts of a machine have."""
    powers = [2**i for i in range(1, machine.n.bit_length()) if 2**i <= machine.n]
    return [(m, d) for m in powers for d in (1, *powers) if m * d <= machine.n]


def groups_of(machine: Machine, members: int, distance: int) -> list[list[int]]:
    """Returns all groups of ranks of one pattern, of which each rank is in one."""
    block = members * distance
    return [
        [start + offset + i * distance for i in range(members)]
        for start in range(0, machine.n, block)
        for offset in range(distance)
    ]


def worker(
    machine: Machine, nodes: list[str], runs: list[RunConfig], forward: list[bool], out: Path
) -> None:
    """The entrypoint of every process: measures the processor, messages, and the runs."""
    enter(nodes[int(os.environ["RANK"]) // machine.each])
    world = init_process_groups("cpu", machine.n, 600.0)
    everyone = Axis("world", machine.n, world.rank)

    def say(text: str) -> None:
        if world.rank == 0:
            print(f"  {text}", flush=True)

    meet = lambda: comm.barrier((everyone,))  # noqa: E731
    found = measure_cpu(cases(), machine.n, True, n_cores(), meet, say)
    average(found, everyone)
    found.add_host(machine.n)
    seen: set[tuple[int, int, int]] = set()
    for members, distance in patterns(machine):
        groups = groups_of(machine, members, distance)
        n_nodes = len({rank // machine.each for rank in groups[0]})
        sharers = sharers_of(machine, groups)
        if (members, n_nodes, sharers) in seen:
            continue
        seen.add((members, n_nodes, sharers))
        say(f"messages among {members} on {n_nodes} nodes, {sharers} sharing a link")
        (mine,) = (g for g in groups if world.rank in g)
        group = make_groups(groups, "emulate") if members < machine.n else None
        axis = Axis("emulate", members, mine.index(world.rank), group)
        for op, send in sends_of(axis, torch.device("cpu")).items():
            for n_bytes in MESSAGES:
                seconds = message_seconds(send(n_bytes), 0.05, everyone, False)
                row = [op, machine.n, members, n_nodes, sharers, n_bytes, round(1e6 * seconds, 1)]
                found.rows.setdefault("messages", []).append(row)
    times = []
    for number, run in enumerate(runs):
        say(f"layout {number + 1} of {len(runs)}")
        step = measure(run, world, STEPS, WARM_UPS).median
        passes = float("nan")
        if forward[number]:
            passes = measure(run, world, STEPS, 1, forward_only=True).median
        times.append([step, passes])
    if world.rank == 0:
        out.write_text(json.dumps({"found": asdict(found), "times": times}), encoding="utf-8")
    close_process_groups()


def sharers_of(machine: Machine, groups: list[list[int]]) -> int:
    """Returns how many of these groups share a node's link with the first one; see
    `gridformer.cluster.like_messages`.
    """
    nodes = [{rank // machine.each for rank in group} for group in groups]
    if len(nodes[0]) == 1:
        return 1
    return max(sum(node in other for other in nodes if len(other) > 1) for node in nodes[0])


def _with_levels(cluster: Cluster, machine: Machine, latency_us: float) -> Cluster:
    source = "tc, token bucket"
    inner = cluster.levels[0].model_copy(update={"size": machine.each})
    outer = Level(
        name="cluster",
        size=max(machine.n, 2 * machine.each),
        bandwidth_gbps=Figure(value=machine.mbit / 8e3, source=source),
        latency_us=Figure(value=latency_us, source="smallest message between two nodes, measured"),
        shared_by=machine.each,
    )
    return cluster.model_copy(update={"levels": (inner, outer)})


def emulate(
    machine: Machine, layouts: tuple[Layout, ...], keep: Path | None, tell: Tell
) -> list[Outcome]:
    """Measures all layouts on an emulated machine, then predicts them.

    Args:
        machine: The machine.
        layouts: The layouts, all for as many processes as the machine has.
        keep: A folder for what is measured. What lies there is not measured again, so that another
            model of time can be held to the same measurements.
        tell: Receives progress messages.

    Raises:
        UserError: This machine cannot emulate a cluster; the message says why.
    """
    tell(f"{machine}: {len(layouts)} layouts")
    runs = [layout.run(machine) for layout in layouts]
    forward = [layout.forward_too for layout in layouts]
    with tempfile.TemporaryDirectory(prefix="gridformer-emulate-") as folder:
        file = Path(folder) / "emulated.yaml"
        out = (keep or Path(folder)) / f"{machine.nodes}x{machine.each}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.exists():
            with network(machine.nodes, machine.mbit) as nodes:
                launch(worker, (machine, nodes, runs, forward, out), machine.n)
        answer = json.loads(out.read_text(encoding="utf-8"))
        if len(answer["times"]) != len(layouts):
            raise UserError(f"{out} holds other layouts: remove it to measure again")
        found = Measurements(**answer["found"])
        sends = [row for row in found.rows["messages"] if row[0] == "send" and row[3] > 1]
        latency_us = min(row[-1] for row in sends)
        write_cluster(_with_levels(cpu_cluster(found), machine, latency_us), file)
        tell("predicting")
        predicted = predict_all([Question(run) for run in runs], file)
        passes = predict_all([Question(run, training=False) for run in runs], file)
    return [
        Outcome(machine, layout, step, step_s, forward_pass, forward_s)
        for layout, step, forward_pass, (step_s, forward_s) in zip(
            layouts, predicted, passes, answer["times"]
        )
    ]
