"""What the papers compare, with the layouts that compare it here and the runs that do it there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published import plan
from benchmarks.published.cases import Layout, Machine
from benchmarks.published.elsewhere import There, as_published, lassen, selene, weak_scaling
from benchmarks.published.emulate import Outcome

OPTIMUS, SUB_GRAPHS, ORDER, RACKS, TENSOR, SLICES = (
    "Optimus against Megatron",
    "Sub-graphs against data parallelism",
    "The order of ranks",
    "Racks",
    "Tensor or pipeline parallelism",
    "Scatter/gather between stages",
)
# What the models of BRANCHED stand for, and what SUPER published of 4-way D&SP on four devices.
_SUPER = {"Transformer": ("transformer-base", "1.8"), "T5": ("t5-large-mod", "2.22")}
_GPT_162B, _GPT_175B = (32, 20480, 128), (96, 12288, 96)
_BUBBLES = (12, 20480, 128)  # three layers for each of four stages
STAGES_THERE = 4


@dataclass(frozen=True)
class Comparison:
    """How many times faster one layout is than another.

    Attributes:
        section: The heading of its table.
        name: How the table calls it.
        machine: The emulated machine.
        slow: The layout in the numerator.
        fast: The layout in the denominator.
        published: What a paper says; empty if it says nothing.
        there: The two runs on the paper's machine, if they have a counterpart there.
        forward: Whether forward passes are compared, or optimizer steps.
    """

    section: str
    name: str
    machine: Machine
    slow: Layout
    fast: Layout
    published: str = ""
    there: tuple[There, There] | None = None
    forward: bool = False


def comparisons() -> list[Comparison]:
    """Returns all comparisons, in the order of the page."""
    return [*_optimus(), *_sub_graphs(), *_orders(), *_racks(), *_megatron()]


def _optimus() -> Iterator[Comparison]:
    auto = {"schedule": "auto", "stationary": "auto"}
    for machine in (plan.GRIDS, plan.WIDE):
        for layout, title in ((plan.STEM_PAPER, "as in the paper"), (plan.STEM_AUTO, "auto")):
            for forward, what, said in ((False, "training", "1.48"), (True, "inference", "1.78")):
                in_paper = layout is plan.STEM_PAPER
                there = (
                    as_published("megatron", not forward),
                    as_published("optimus", not forward)
                    if in_paper
                    else weak_scaling("optimus", not forward, **auto),
                )
                yield Comparison(
                    OPTIMUS,
                    f"4x4, {title}, {what}; {machine.nodes} nodes of {machine.each}",
                    machine,
                    plan.STEM,
                    layout,
                    said if in_paper else "",
                    there,
                    forward,
                )


def _sub_graphs() -> Iterator[Comparison]:
    for machine in (plan.ONE_NODE, plan.TWO_NODES):
        n = machine.n
        for model in plan.BRANCHED:
            layouts = plan.sub_graphs(model, n)
            base = layouts["data parallel"]
            name, said = _SUPER[model]
            for title, layout in layouts.items():
                if layout is base:
                    continue
                known = said if (n, title) == (4, "4-way D&SP") else ""
                there = tuple(lassen(name, n, one.layout) for one in (base, layout))
                where = "a node" if machine.nodes == 1 else f"{machine.nodes} nodes"
                yield Comparison(
                    SUB_GRAPHS,
                    f"{model}, {title}; {n} processes on {where}",
                    machine,
                    base,
                    layout,
                    known,
                    (there[0], there[1]),
                )


def _orders() -> Iterator[Comparison]:
    for machine, model in (
        (plan.TWO_NODES, "Transformer"),
        (plan.TWO_NODES, "T5"),
        (plan.WIDE, "T5"),
    ):
        n, name = machine.n, _SUPER[model][0]
        pair = plan.contiguous(model, n), plan.sub_graphs(model, n)["4-way D&SP"]
        there = tuple(lassen(name, n, one.layout) for one in pair)
        yield Comparison(
            ORDER,
            f"{model}, 4-way D&SP; {n} processes on {machine.nodes} nodes",
            machine,
            *pair,
            "",
            (there[0], there[1]),
        )
    yield Comparison(
        ORDER,
        "GPT-2, optimus 4x4; 16 processes on 4 nodes",
        plan.GRIDS,
        plan.GRID_PLAIN,
        plan.GRID_AWARE,
        "",
        (weak_scaling("optimus", devices_per_node=0), weak_scaling("optimus")),
    )


def _racks() -> Iterator[Comparison]:
    grids, machine = plan.RACK_GRIDS, plan.RACKS
    for slow, fast, name in (
        ("contiguous", "nodes", "nodes known, against contiguous"),
        ("nodes", "racks", "racks known, too, against nodes known"),
        ("contiguous", "racks", "nodes and racks known, against contiguous"),
    ):
        yield Comparison(RACKS, f"optimus 4x2, dp 2: {name}", machine, grids[slow], grids[fast])
    pair = plan.contiguous("T5", 16), plan.sub_graphs("T5", 16)["4-way D&SP"]
    yield Comparison(RACKS, "4-way D&SP, dp 4: topology-aware, against contiguous", machine, *pair)


def _megatron() -> Iterator[Comparison]:
    # Here four processes fill a node, there eight devices.
    there = {
        one: selene(_GPT_162B, 32, cols=tp, pp=64 // tp)
        for one, tp in (("1 x 8", 16), ("2 x 4", 8), ("4 x 2", 4), ("8 x 1", 2))
    }
    for name, layout in plan.SWEEP.items():
        if name == "2 x 4":
            continue
        devices = there[name].run.layout
        yield Comparison(
            TENSOR,
            f"{name} here, {devices.pp} x {devices.cols} there",
            plan.TWO_NODES,
            plan.SWEEP["2 x 4"],
            layout,
            "below 1",
            (there["2 x 4"], there[name]),
        )
    whole, sliced = (
        selene(_GPT_175B, 12, cols=8, pp=12, stages_per_rank=2, scatter_gather=which)
        for which in (False, True)
    )
    yield Comparison(
        SLICES,
        "slices against whole tensors",
        plan.TWO_NODES,
        plan.WHOLE,
        plan.SLICED,
        "up to 1.11",
        (whole, sliced),
    )


def bubbles_there() -> dict[int, There]:
    """Returns the pipelines of four stages on A100s, by their numbers of micro-batches."""
    return {m: selene(_BUBBLES, m, cols=8, pp=STAGES_THERE) for m in plan.BUBBLES}


# --------------------------------------------------------------------------- ratios


@dataclass(frozen=True)
class Ratios:
    """A comparison in numbers; NaN where there is none."""

    comparison: Comparison
    there: float
    predicted: float
    measured: float


def ratios(outcomes: Sequence[Outcome], there: Mapping[str, float]) -> list[Ratios]:
    """Returns the comparisons of which both layouts were measured.

    Args:
        outcomes: What was measured.
        there: Predicted seconds a sequence on the machines of the papers, by `There.key`.
    """
    known = {(one.machine, str(one.layout)): one for one in outcomes}
    found = []
    for one in comparisons():
        pair = [known.get((one.machine, str(layout))) for layout in (one.slow, one.fast)]
        slow, fast = pair
        if slow is None or fast is None:
            continue
        elsewhere = math.nan
        if one.there is not None:
            times = [there.get(run.key, math.nan) for run in one.there]
            elsewhere = times[0] / times[1]
        if one.forward:
            predicted = slow.forward.step_s / fast.forward.step_s
            measured = slow.forward_s / fast.forward_s
        else:
            predicted = slow.predicted.step_s / fast.predicted.step_s
            measured = slow.step_s / fast.step_s
        found.append(Ratios(one, elsewhere, predicted, measured))
    return found


def bubble(times: Mapping[int, float]) -> dict[int, float]:
    """Returns the time of a step beyond that of its micro-batches, relative to that, by their
    number.

    Args:
        times: Seconds of a step by the number of equal micro-batches. One more of them takes what
            a step grows by from the fewest to the most.
    """
    fewest, most = min(times), max(times)
    each = (times[most] - times[fewest]) / (most - fewest)
    return {m: seconds / (m * each) - 1 for m, seconds in times.items()}
