"""Measures an emulated cluster, and layouts on it. Every measurement is kept as soon as it is made.

What a folder keeps: `processor-16.json`, the kernels while 16 processes compute, and for each
machine a file with its messages and the times of layouts. So an interrupted run goes on where it
was, and other layouts of a known machine cost only their own time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.predicted.steps import measure
from benchmarks.published.cases import Layout, Machine
from benchmarks.published.namespaces import enter, network, parts_of_cores
from gridformer import comm
from gridformer.calibrate.device import Measurements, measure_cpu
from gridformer.calibrate.messages import message_seconds, sends_of
from gridformer.calibrate.operations import AttentionShape, Cases, cpu_cases
from gridformer.config import RunConfig
from gridformer.launch import launch
from gridformer.mesh.axes import Axis
from gridformer.mesh.groups import make_groups
from gridformer.mesh.process_group import World, close_process_groups, init_process_groups
from gridformer.utils.process import n_cores

MESSAGES = (64, 16_384, 131_072, 524_288)  # bytes
STEPS, WARM_UPS = 5, 2
Place = tuple[str, Path | None]  # a node, and a part of the cores
Pattern = tuple[int, int]  # the members of a group, and the distance of their ranks


@dataclass
class Kept:
    """What was measured on a machine.

    Attributes:
        messages: Rows of `cluster.tables`; None if they have not been measured.
        times: The seconds of a step and of a forward pass, None where it was not wanted, by the
            key of a layout.
    """

    messages: list[list[Any]] | None = None
    times: dict[str, list[float | None]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Kept:
        return Kept(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Kept()

    def write(self, path: Path) -> None:
        _write(path, json.dumps(asdict(self)))

    def has(self, layout: Layout, machine: Machine) -> bool:
        times = self.times.get(layout.key(machine))
        return times is not None and (times[1] is not None or not layout.forward_too)


@dataclass(frozen=True)
class Job:
    """What the processes of a machine are to measure.

    Attributes:
        machine: The machine.
        layouts: Those of which the times are not known, with their runs.
        processor: The file for kernels; it is written if it does not exist.
        out: The machine's file.
        attention: Shapes of attention to measure, the first two of them.
    """

    machine: Machine
    layouts: tuple[tuple[Layout, RunConfig], ...]
    processor: Path
    out: Path
    attention: tuple[AttentionShape, ...]


def measured(
    machine: Machine,
    layouts: tuple[Layout, ...],
    folder: Path,
    attention: tuple[AttentionShape, ...] = cpu_cases().attention,
) -> tuple[Measurements, list[tuple[float, float]]]:
    """Measures what the folder does not hold yet.

    Args:
        machine: The machine.
        layouts: The layouts, all for as many processes as the machine has.
        folder: What is measured is kept here.
        attention: Shapes of attention to measure, the first two of them.

    Returns:
        What was found of the processor and of messages, and for each layout the seconds of a step
        and of a forward pass, NaN where that was not wanted.

    Raises:
        UserError: This machine cannot emulate a cluster; the message says why.
        SystemExit: A process failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processor = folder / f"processor-{machine.n}{'-apart' * machine.apart}.json"
    out = folder / f"{machine.file_name}.json"
    kept = Kept.read(out)
    todo = [(one, one.run(machine)) for one in layouts if not kept.has(one, machine)]
    if todo or kept.messages is None or not processor.exists():
        job = Job(machine, tuple(todo), processor, out, attention)
        with network_of(machine) as places:
            launch(worker, (job, places), machine.n)
        kept = Kept.read(out)
    found = Measurements.read(processor)
    found.rows["messages"] = kept.messages or []
    times = []
    for layout in layouts:
        step, forward = kept.times[layout.key(machine)]
        times.append((step or float("nan"), forward or float("nan")))
    return found, times


@contextmanager
def network_of(machine: Machine) -> Iterator[list[Place]]:
    """Creates a machine's network, and yields what each process calls `enter` with."""
    apart = parts_of_cores(machine.n) if machine.apart else nullcontext([None] * machine.n)
    with (
        network(machine.nodes, machine.mbit, machine.racks, machine.trunk_mbit) as nodes,
        apart as parts,
    ):
        yield [(nodes[rank // machine.each], part) for rank, part in enumerate(parts)]


def worker(job: Job, places: list[Place]) -> None:
    """The entrypoint of every process: measures the processor, messages, and the layouts."""
    machine, began = job.machine, time.monotonic()
    enter(*places[int(os.environ["RANK"])])
    world = init_process_groups("cpu", machine.n, 600.0)
    everyone = Axis("world", machine.n, world.rank)

    def say(text: str) -> None:
        if world.rank == 0:
            print(f"  [{time.monotonic() - began:4.0f} s] {text}", flush=True)

    kept = Kept.read(job.out)
    known = job.processor.exists()
    comm.barrier((everyone,))  # all of them have looked before rank 0 writes
    if not known:
        meet = lambda: comm.barrier((everyone,))  # noqa: E731
        found = measure_cpu(cases(job.attention), machine.n, True, n_cores(), meet, say)
        found.average(everyone)
        found.add_host(machine.n)
        if world.rank == 0:
            _write(job.processor, json.dumps(asdict(found)))
    if kept.messages is None:
        kept.messages = _messages(machine, world, say)
        if world.rank == 0:
            kept.write(job.out)
    for number, (layout, run) in enumerate(job.layouts):
        say(f"layout {number + 1} of {len(job.layouts)}: {layout}")
        step = measure(run, world, STEPS, WARM_UPS).median
        passes = None
        if layout.forward_too:
            passes = measure(run, world, STEPS, 1, forward_only=True).median
        kept.times[layout.key(machine)] = [step, passes]
        if world.rank == 0:
            kept.write(job.out)
    say("done")
    close_process_groups()


def cases(attention: tuple[AttentionShape, ...]) -> Cases:
    """Returns what is measured of the processor: shapes of tiny models, and of their attention."""
    widths = ((64, 64), (128, 128), (128, 512))
    few = [(t, i, o) for t in (64, 256, 1024) for i, o in widths]
    return replace(cpu_cases(), few_linears=tuple(few), attention=attention, window_s=0.04)


# --------------------------------------------------------------------------- messages


def patterns(machine: Machine) -> list[Pattern]:
    """Returns the groups that layouts of a machine have."""
    powers = [2**i for i in range(1, machine.n.bit_length()) if 2**i <= machine.n]
    found = [(m, d) for m in powers for d in (1, *powers) if m * d <= machine.n]
    if machine.racks > 1:
        # Tables know nodes and no racks. So messages between nodes are left to formulas, which
        # need no more than what two of them say.
        return [(2, machine.each), *((m, d) for m, d in found if m * d <= machine.each)]
    return found


def groups_of(machine: Machine, members: int, distance: int) -> list[list[int]]:
    """Returns all groups of ranks of one pattern, of which each rank is in one."""
    block = members * distance
    return [
        [start + offset + i * distance for i in range(members)]
        for start in range(0, machine.n, block)
        for offset in range(distance)
    ]


def sharers_of(machine: Machine, groups: list[list[int]]) -> int:
    """Returns how many of these groups share a node's link with the first one; see
    `gridformer.cluster.messages.like_messages`.
    """
    nodes = [{rank // machine.each for rank in group} for group in groups]
    if len(nodes[0]) == 1:
        return 1
    return max(sum(node in other for other in nodes if len(other) > 1) for node in nodes[0])


def _messages(machine: Machine, world: World, say: Any) -> list[list[Any]]:
    """Measures messages of all patterns of groups; all processes call this together."""
    everyone = Axis("world", machine.n, world.rank)
    rows: list[list[Any]] = []
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
                us = round(1e6 * seconds, 1)
                rows.append([op, machine.n, members, n_nodes, sharers, n_bytes, us])
    return rows


def _write(path: Path, text: str) -> None:
    """Writes a file that is either there as a whole or not."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
