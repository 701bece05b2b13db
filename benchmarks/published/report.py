"""The page of the emulated clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.predicted.report import Row, error_lines, table
from benchmarks.published import plan
from benchmarks.published.cases import Machine
from benchmarks.published.comparisons import (
    OPTIMUS,
    ORDER,
    RACKS,
    SLICES,
    STAGES_THERE,
    SUB_GRAPHS,
    TENSOR,
    Ratios,
    bubble,
    bubbles_there,
)
from benchmarks.published.emulate import Outcome

_INTRODUCTION = """\
Network namespaces are the nodes of a cluster, and links limited by `tc` connect them. Processes,
models, messages (gloo over TCP) and optimizer steps are real; only the sizes are small, so that the
messages take most of the time. All processes share the cores of one machine. The same processes
first measure the machine as `gridformer calibrate` does, products and other kernels with all of
them busy and messages for every pattern of groups, and then the layouts. `predict` gets only the
former. Times are medians of 5 steps after 2, on the slowest process, in milliseconds.

"Predicted on the published machine" is what `predict` says of the paper's own models on
`frontera-rtx5000`, `lassen-v100` and `selene-a100`. "Predicted here" and "measured here" are the
small models on the emulated machine. Where links and devices have another proportion here, ratios
differ from the paper's, and what counts is whether the prediction follows."""
_SECTIONS = {
    OPTIMUS: """\
How many times faster a step, and a forward pass, is than with Megatron on a line of all processes.
The paper's figures are those of 64 devices, 4 a node, the largest of its tables; the predictions
for its machine are those of the layers of its Table 2. Here are 16 processes, and steps include the
embedding, the head and the update. "Auto" leaves schedule and stationary operand to gridformer.""",
    SUB_GRAPHS: """\
How many times faster a step is than with data parallelism, one sequence a process, with the heads
of a process in one product. SUPER's published ratios are those of one node with heads one by one,
where launches decide (docs/results/published-super.md); they are not expected with one product.
Here the processes of a node share the cores of the machine, so work that D&SP does twice costs
more.""",
    ORDER: """\
How many times faster a step is with ranks that know their nodes than with contiguous ones: the
members of a segmented collective in one node if possible, and blocks of a grid in a node.""",
    RACKS: """\
Each rack has a switch of its own, and a trunk of less than the bandwidth of its nodes connects it.
`layout.nodes_per_rack` places blocks of nodes in racks. The tables of a cluster file know nodes but
no racks, so messages between nodes are predicted by formulas here, from three levels of links.""",
    TENSOR: """\
Stages x tensor-parallel processes: speed relative to the layout whose tensor parallelism fills a
node, 2 x 4 here and 8 x 8 of 64 A100 there (162.2B, batch 32). The paper has its peak there.""",
    SLICES: """\
Two stages a rank: each tensor-parallel process sends a slice of an activation between nodes, and
not the whole of it. There: 175B on 96 A100 with a batch of 12.""",
}


def report(
    outcomes: Sequence[Outcome],
    found: Sequence[Ratios],
    there: Mapping[str, float],
    head: str,
    image: str = "",
) -> str:
    """Returns the page as Markdown.

    Args:
        outcomes: What was predicted and measured.
        found: The comparisons of the papers.
        there: Predicted seconds a sequence on the machines of the papers, by `There.key`.
        head: The first paragraph.
        image: The name of the figure beside the page; empty if there is none.
    """
    parts = ["# The papers' experiments on an emulated cluster", head, _INTRODUCTION]
    machines = list(dict.fromkeys(outcome.machine for outcome in outcomes))
    rows = {machine: _rows(machine, outcomes) for machine in machines}
    every = [row for some in rows.values() for row in some]
    parts += ["## All layouts together", error_lines(every)]
    if image:
        parts.append(f"![Predicted against measured times and ratios]({image})")
    for section, text in _SECTIONS.items():
        some = [one for one in found if one.comparison.section == section]
        if some:
            parts += [f"## {section}", text, ratio_table(some)]
    parts += _bubbles(outcomes, there)
    for machine in machines:
        parts += [f"## {machine}", table(rows[machine], 1e3, "ms"), error_lines(rows[machine])]
        parts += _choices(machine, outcomes)
    failures = [f"- {o.layout}: no prediction: {o.predicted.error}" for o in outcomes
                if o.predicted.error]  # fmt: skip
    return "\n\n".join([*parts, *(["\n".join(failures)] if failures else [])]) + "\n"


def ratio_table(some: Sequence[Ratios]) -> str:
    """Returns a table with a ratio in four columns."""
    lines = [
        "| | published | predicted on the published machine | predicted here | measured here |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in some:
        said = one.comparison.published or "-"
        cells = " | ".join(_number(x) for x in (one.there, one.predicted, one.measured))
        lines.append(f"| {one.comparison.name} | {said} | {cells} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _rows(machine: Machine, outcomes: Sequence[Outcome]) -> list[Row]:
    return [
        Row(str(o.layout), o.predicted.step_s, o.step_s)
        for o in outcomes
        if o.machine == machine and not o.predicted.error
    ]


def _choices(machine: Machine, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns for each model whether the layout that is predicted to be best is good.

    Layouts with different batches are not compared.
    """
    lines = []
    here = [o for o in outcomes if o.machine == machine and not o.predicted.error]
    for model, batch in dict.fromkeys((o.layout.model, o.layout.batch) for o in here):
        some = [o for o in here if (o.layout.model, o.layout.batch) == (model, batch)]
        if len(some) < 2:
            continue
        chosen = min(some, key=lambda o: o.predicted.step_s)
        best = min(some, key=lambda o: o.step_s)
        slower = 100 * (chosen.step_s / best.step_s - 1)
        lines.append(
            f"- {model}: predicted best is {chosen.layout.title}, measured best is "
            f"{best.layout.title}; the predicted one is {slower:.0f}% slower than the best"
        )
    return ["\n".join(lines)] if lines else []


def _bubbles(outcomes: Sequence[Outcome], there: Mapping[str, float]) -> list[str]:
    """Returns the part of a step in which a pipeline waits, by the number of micro-batches."""
    known = {(o.machine, str(o.layout)): o for o in outcomes}
    mine = {m: known.get((plan.OVERALL, str(layout))) for m, layout in plan.BUBBLES.items()}
    here = {m: one for m, one in mine.items() if one is not None}
    if len(here) < len(mine):
        return []
    runs = bubbles_there()
    stages = next(iter(plan.BUBBLES.values())).layout["pp"]
    elsewhere = {m: m * there.get(one.key, math.nan) for m, one in runs.items()}
    columns = (
        bubble(elsewhere),
        bubble({m: one.predicted.step_s for m, one in here.items()}),
        bubble({m: one.step_s for m, one in here.items()}),
    )
    lines = [
        f"| micro-batches | formula, {STAGES_THERE} stages | predicted on the published machine | "
        f"formula, {stages} stages | predicted here | measured here |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for m in plan.BUBBLES:
        cells = [(STAGES_THERE - 1) / m, columns[0][m], (stages - 1) / m, columns[1][m],
                 columns[2][m]]  # fmt: skip
        shown = " | ".join("-" if math.isnan(cell) else f"{cell:.0%}" for cell in cells)
        lines.append(f"| {m} | {shown} |")
    return [
        "## Bubbles",
        "What a step takes beyond its micro-batches, relative to what they take: a pipeline waits "
        "(pp - 1) / m of that. A micro-batch takes what a step grows by with one more of them, and "
        f"the update counts as waiting. There: {STAGES_THERE} stages x 8 A100, three layers of "
        f"h=20480 a stage; here {stages} x 4 on 4 nodes.",
        "\n".join(lines),
    ]
