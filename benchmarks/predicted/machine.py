"""Layers and training steps on this machine's CPU: predicted, measured, and the errors."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.machine import describe_machine
from benchmarks.predicted.predictions import Question, predict_all
from benchmarks.predicted.report import Row, error_lines, table
from benchmarks.predicted.steps import Measured, work
from benchmarks.schemes import results
from benchmarks.schemes.cases import Case
from benchmarks.schemes.group import Plan, measure
from benchmarks.schemes.variants import GridformerVariant, gridformer_variants
from gridformer.calibrate.machine import calibrate, write_cluster
from gridformer.config import LayoutConfig, ModelConfig, RunConfig, shipped_model
from gridformer.launch import launch
from gridformer.parallel.validation import check_layout

Tell = Callable[[str], None]
# The variants that `predict` can be asked about: their layouts say everything about them.
VARIANTS = ("single", "megatron", "megatron-sp", "megatron-2d", "optimus-broadcast",
            "optimus-gather", "optimus-auto")  # fmt: skip
DEMO: tuple[tuple[str, dict[str, Any]], ...] = (
    ("single", {}),
    ("megatron 1x2", {"scheme": "megatron", "cols": 2}),
    ("dp 2", {"dp": 2}),
    ("pp 2, 4 micro-batches", {"pp": 2, "micro_batches": 4}),
    ("megatron 1x4", {"scheme": "megatron", "cols": 4}),
    ("optimus 2x2 (the demo)", {"scheme": "optimus", "rows": 2, "cols": 2}),
    ("megatron_2d 2x2", {"scheme": "megatron_2d", "rows": 2, "cols": 2}),
    ("subgraph, 4 branches", {"scheme": "subgraph", "branches": 4}),
    ("fsdp 4", {"dp": 4, "dp_mode": "fsdp"}),
    ("megatron 1x2, dp 4", {"scheme": "megatron", "cols": 2, "dp": 4}),
    ("optimus 2x2, dp 2", {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2}),
    ("optimus 4x4", {"scheme": "optimus", "rows": 4, "cols": 4}),
)


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        processes: Numbers of processes of the layers.
        sizes: Names of shapes in `benchmarks.schemes.cases`.
        rounds: Timed rounds of the layers.
        steps: Timed steps of each layout of the demo.
        demo: How many layouts of the demo.
        counts: Numbers of processes to calibrate with.
        quick: Whether to calibrate with tiny cases.
    """

    processes: Sequence[int] = (1, 4, 9, 16)
    sizes: Sequence[str] = ("small", "large")
    rounds: int = 4
    steps: int = 7
    demo: int = len(DEMO)
    counts: Sequence[int] = (1, 2, 4, 8, 16)
    quick: bool = False


QUICK = Effort((1, 4), ("tiny",), 2, 2, 2, (1, 2), True)


def compare(effort: Effort, cluster_file: Path | None, keep: Path | None, tell: Tell) -> str:
    """Calibrates, measures and predicts, and returns the tables as Markdown.

    Args:
        effort: How much is measured.
        cluster_file: A file that `gridformer calibrate` wrote; None calibrates.
        keep: A folder for what is measured, the cluster file included. What is there already is not
            measured again.
        tell: Receives progress messages.
    """
    with tempfile.TemporaryDirectory(prefix="gridformer-predicted-") as folder:
        kept = keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        cluster = cluster_file or kept / "local.yaml"
        failures: list[str] = []
        if not cluster.exists():
            tell("calibrating")
            found, failures = calibrate(effort.counts, effort.quick, 80.0, tell)
            write_cluster(found, cluster)
        measured = kept / "measured.json"
        if not measured.exists():
            rows = [_measure_layers(effort, Path(folder), tell)]
            rows.append(_measure_demo(effort, Path(folder), tell))
            text = [[(name, run.model_dump(mode="json"), s) for name, run, s in r] for r in rows]
            measured.write_text(json.dumps(text), encoding="utf-8")
        layers, steps = (
            [(name, RunConfig.model_validate(run), seconds) for name, run, seconds in rows]
            for rows in json.loads(measured.read_text(encoding="utf-8"))
        )
        tell("predicting")
        questions = [Question(run, layers_only=True) for _, run, _ in layers]
        questions += [Question(run) for _, run, _ in steps]
        predicted = predict_all(questions, cluster)
    lines: dict[str, list[Row]] = {"layers": [], "steps": []}
    for number, ((name, _, seconds), answer) in enumerate(zip([*layers, *steps], predicted)):
        kind = "layers" if number < len(layers) else "steps"
        if answer.error:
            failures.append(f"{name}: no prediction: {answer.error}")
            continue
        guess = answer.forward_s + answer.backward_s if kind == "layers" else answer.step_s
        lines[kind].append(Row(name, guess, seconds))
    parts = [
        "## Layers of `benchmarks.schemes`",
        "Milliseconds of forward and backward of the whole stack, on the slowest process.",
        table(lines["layers"], 1e3, "ms"),
        error_lines(lines["layers"]),
        "## Training steps of the demo's model",
        "Milliseconds of a step: demo-4m, global batch 16, 128 tokens, float32, AdamW.",
        table(lines["steps"], 1e3, "ms"),
        error_lines(lines["steps"]),
        "## Together",
        error_lines([*lines["layers"], *lines["steps"]]),
        "\n".join(f"- {failure}" for failure in failures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --------------------------------------------------------------------------- layers


def _measure_layers(effort: Effort, folder: Path, tell: Tell) -> list[tuple[str, RunConfig, float]]:
    """Measures stacks of layers with `benchmarks.schemes`; returns names, runs and seconds."""
    found = []
    machine = describe_machine("benchmarks.predicted")
    for n in effort.processes:
        for size in effort.sizes:
            if (size, n) == ("large", 9):
                continue  # much like the others, and it takes minutes
            case = Case(size, n, False)
            tell(f"layers: {case.describe()}")
            out = folder / "layers.jsonl"
            plan = Plan(case, VARIANTS, effort.rounds, 1, 600.0, out, machine)
            launch(measure, (plan,), n)
            rows = {row.name: row for row in results.read(out)[case.key].rows}
            for variant in gridformer_variants(n):
                row = rows.get(variant.name)
                if not isinstance(variant, GridformerVariant) or row is None or not row.seconds:
                    continue
                if variant.name == "single" and n > 1:
                    continue  # the others wait in a barrier: it is the case of one process
                seconds = median(forward + backward for forward, backward in row.seconds)
                name = f"{size}, {variant.title}"
                found.append((name, _layers_run(case, variant.layout), seconds))
    return found


def _layers_run(case: Case, layout: LayoutConfig) -> RunConfig:
    return _run(case.size.model(), layout, case.size.b)


def _run(model: ModelConfig, layout: LayoutConfig, batch: int) -> RunConfig:
    run = RunConfig.model_validate(
        {
            "model": model.model_dump(),
            "layout": layout.model_dump(),
            "data": {"path": "."},
            "train": {"global_batch": batch, "device": "cpu", "steps": 1000},
        }
    )
    check_layout(run)
    return run


# --------------------------------------------------------------------------- the demo


def demo_runs() -> list[tuple[str, RunConfig]]:
    """Returns the demo's model on each layout, with random tokens in place of its data."""
    model = ModelConfig(**{**shipped_model("demo-4m"), "vocab_size": 512})
    return [(name, _run(model, LayoutConfig(**layout), 16)) for name, layout in DEMO]


def _measure_demo(effort: Effort, folder: Path, tell: Tell) -> list[tuple[str, RunConfig, float]]:
    found = []
    for name, run in demo_runs()[: effort.demo]:
        tell(f"demo: {name}")
        out = folder / "steps.json"
        launch(work, ([run], effort.steps, 2, False, out), run.layout.n_processes)
        (measured,) = Measured.read(out)
        found.append((f"{name}, {run.layout.n_processes} processes", run, measured.median))
    return found


def progress() -> Tell:
    """Returns a function that prints messages with the seconds since now."""
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    return tell
