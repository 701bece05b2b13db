"""The page of the emulated clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.predicted.report import Row, error_lines, table
from benchmarks.published.cases import Machine
from benchmarks.published.emulate import Outcome

# Xu, Li, Gong and You 2021: Optimus against Megatron on 64 devices.
PUBLISHED = {"training": 1.48, "inference": 1.78}
_INTRODUCTION = """\
Network namespaces are the nodes of a cluster, and links limited by `tc` connect them. Processes,
models, messages (gloo over TCP) and optimizer steps are real; only the sizes are small, so that the
messages take most of the time. All processes share the cores of one machine. The same processes
first measure the machine as `gridformer calibrate` does, products and other kernels with all of
them busy and messages for every pattern of groups, and then the layouts. `predict` gets only the
former. Times are medians of 5 steps after 2, on the slowest process, in milliseconds."""


def report(outcomes: Sequence[Outcome], head: str) -> str:
    """Returns the page as Markdown."""
    parts = ["# The papers' experiments on an emulated cluster", head, _INTRODUCTION]
    machines = list(dict.fromkeys(outcome.machine for outcome in outcomes))
    rows = {machine: _rows(machine, outcomes) for machine in machines}
    every = [row for found in rows.values() for row in found]
    parts += ["## All layouts together", error_lines(every)]
    parts += _optimus(outcomes)
    for machine in machines:
        parts += [f"## {machine}", table(rows[machine], 1e3, "ms"), error_lines(rows[machine])]
        parts += _choices(machine, outcomes)
    failures = [f"- {o.layout}: no prediction: {o.predicted.error}" for o in outcomes
                if o.predicted.error]  # fmt: skip
    return "\n\n".join([*parts, *(["\n".join(failures)] if failures else [])]) + "\n"


def _rows(machine: Machine, outcomes: Sequence[Outcome]) -> list[Row]:
    return [
        Row(str(o.layout), o.predicted.step_s, o.step_s)
        for o in outcomes
        if o.machine == machine and not o.predicted.error
    ]


def _choices(machine: Machine, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns for each model whether the layout that is predicted to be best is good."""
    lines = []
    here = [o for o in outcomes if o.machine == machine and not o.predicted.error]
    for model in dict.fromkeys(o.layout.model for o in here):
        of_model = [o for o in here if o.layout.model == model]
        if len(of_model) < 2:
            continue
        chosen = min(of_model, key=lambda o: o.predicted.step_s)
        best = min(of_model, key=lambda o: o.step_s)
        slower = 100 * (chosen.step_s / best.step_s - 1)
        lines.append(
            f"- {model}: predicted best is {chosen.layout.title}, measured best is "
            f"{best.layout.title}; the predicted one is {slower:.0f}% slower than the best"
        )
    return ["\n".join(lines)] if lines else []


def _optimus(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns Optimus against Megatron: published, predicted and measured."""
    stem = [o for o in outcomes if o.layout.model == "stem" and not math.isnan(o.forward_s)]
    if not stem:
        return []
    megatron, *others = stem
    lines = [
        "| speedup over Megatron | published, p = 64 | predicted here | measured here |",
        "|---|---:|---:|---:|",
    ]
    for other in others:
        published = PUBLISHED if "paper" in other.layout.title else {}
        pairs = {
            "training": (
                megatron.predicted.step_s / other.predicted.step_s,
                megatron.step_s / other.step_s,
            ),
            "inference": (
                megatron.forward.step_s / other.forward.step_s,
                megatron.forward_s / other.forward_s,
            ),
        }
        for what, (predicted, measured) in pairs.items():
            paper = f"{published[what]:.2f}" if what in published else "-"
            lines.append(
                f"| {other.layout.title}, {what} | {paper} | {predicted:.2f} | {measured:.2f} |"
            )
    return [
        "## Optimus against Megatron",
        f"{megatron.machine}. The paper's figures are those of 64 devices of 4 a node, the largest "
        "of its tables; here are 16, also 4 a node, and steps include the embedding, the head and "
        "the update.",
        "\n".join(lines),
    ]
