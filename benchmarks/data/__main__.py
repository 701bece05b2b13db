"""Measures how runs start on, and read, a corpus of 10^9 tokens, against one of 10^6.

    python -m benchmarks.data --out docs/results/data.md

It writes a mixture of two sources of random tokens to a temporary folder (2 bytes a token), and
removes it at the end. Files are dropped from the page cache before each part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from benchmarks.data.corpus import forget, write_corpus
from benchmarks.data.training import Watched, watch

BAR_S = 5  # seconds in which a run must have started on 10^9 tokens
PARTS = ("open", "check", "fingerprint", "order", "first batch")
# A small model, since long steps would hide slow reading.
MODEL = {"n_layers": 2, "hidden_size": 64, "n_heads": 4, "max_seq_len": 512}


def run_file(folder: Path, sources: dict[str, Path], batch: int, steps: int) -> Path:
    weights = {"large": 0.6, "small": 0.4}
    sections = {
        "model": MODEL,
        "data": [{"path": str(p), "name": n, "weight": weights[n]} for n, p in sources.items()],
        "train": {
            "steps": steps,
            "global_batch": batch,
            "eval_every": 0,
            "eval_batches": 1,
            "save_every": 0,
            "trace_step": steps // 2,  # one in the middle; a run of one step has none
            "device": "cpu",
        },
    }
    path = folder / f"run-{batch}.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def read(run: Path, batches: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.data.reading", str(run), str(batches)]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(found.stdout))


def start(run: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Returns processor seconds and seconds of each phase until the first step is over."""
    command = [sys.executable, "-m", "benchmarks.data.starting", str(run), str(out)]
    found = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True
    )
    return dict(json.loads(found.stdout))


def measured(
    tokens: int, steps: int, parent: Path | None
) -> tuple[dict[str, Any], dict[str, tuple[float, float]], Watched]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="benchmark-data-") as name:
        folder = Path(name)
        corpus = folder / "corpus"
        sources = write_corpus(corpus, tokens)
        forget(corpus)
        found = read(run_file(folder, sources, 64, 1), 200)
        forget(corpus)
        phases = start(run_file(folder, sources, 8, 1), folder / "started")
        forget(corpus)
        return found, phases, watch(run_file(folder, sources, 8, steps), folder / "out")


def bar_column(found: dict[str, Any], watched: Watched, steps: int) -> dict[str, str]:
    """Returns what was measured of what a run must do, by the title of its row."""
    traced = watched.traced
    before, after = _memory(watched, steps // 10), _memory(watched, steps)
    values = {
        f"start up to the first batch, s (must be below {BAR_S})": sum(found["parts"].values()),
        "of this, processor time, s": found["processor_s"],
        f"`wait for data` in the trace of step {traced.step}, ms (must be a small part of the next "
        "row)": traced.wait_ms,
        "length of that step, ms": traced.length_ms,
        "memory after a tenth of the steps, MiB": before,
        "memory at the end, MiB (must not grow)": after,
    }
    return {title: f"{value:,.3g}" for title, value in values.items()}


def column(found: dict[str, Any], watched: Watched, steps: int) -> dict[str, str]:
    """Returns what else was measured with one corpus, by the title of its row."""
    waits, seconds = watched.waits[1:], watched.steps_s[1:]
    values = {f"{part}, s": found["parts"][part] for part in PARTS}
    values |= {
        "`gridformer train`: until the first step is over, s": watched.first_step_s,
        "processor time of all its steps and its start, s": watched.processor_s,
        "a batch of 64 x 512 tokens, ms": 1e3 * statistics.median(found["wall"]),
        "of this, processor time, ms": 1e3 * statistics.median(found["processor"]),
        "the slowest of 200 batches, ms": 1e3 * max(found["wall"]),
        f"a step of 8 x 512 tokens, median of {steps}, ms": 1e3 * statistics.median(seconds),
        "`data_wait_s` of the first step, ms": 1e3 * watched.waits[0],
        "`data_wait_s` of later steps, median, ms": 1e3 * statistics.median(waits),
        "the longest of these, ms": 1e3 * max(waits),
        "their share of the time of these steps, %": 100 * sum(waits) / sum(seconds),
    }
    return {title: f"{value:,.3g}" for title, value in values.items()}


def phase_column(phases: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Returns the processor seconds and seconds of each phase of a start, by its title."""
    both = {**phases, "until the first step is over": tuple(map(sum, zip(*phases.values())))}
    return {title: f"{used:.2f} ({wall:.2f})" for title, (used, wall) in both.items()}


def table(columns: dict[int, dict[str, str]]) -> str:
    heads = " | ".join(f"{tokens:,} tokens" for tokens in columns)
    rows = [
        f"| {title} | " + " | ".join(one[title] for one in columns.values()) + " |"
        for title in next(iter(columns.values()))
    ]
    return "\n".join([f"| | {heads} |", "|---|" + "---:|" * len(columns), *rows])


def page(
    bars: dict[int, dict[str, str]],
    columns: dict[int, dict[str, str]],
    starts: dict[int, dict[str, str]],
) -> list[str]:
    machine = describe_machine("benchmarks.data")
    return [
        "# Reading 10^9 tokens",
        "\n".join(
            [
                "This page measures how a run starts on a corpus and reads it: a mixture of two",
                "sources of random tokens (weights 0.6 and 0.4) in Megatron-LM's files, which are",
                "dropped from the page cache before. `check` reads where every document begins,",
                "and `fingerprint` blocks of every file. Memory is what the processes of the run",
                "have of their own, without pages of files, which the system takes back when it",
                "needs them. Other programs may have run meanwhile; processor times do not depend",
                "on them as wall times do.",
            ]
        ),
        f"{machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}, Python "
        f"{machine['python']}; {machine['date']}, commit {machine['commit']}",
        f"`{machine['command']}`",
        "## What must hold",
        "\n".join(
            [
                f"A run on 10^9 tokens must have started in {BAR_S} s, reading must not stall a",
                "step, and memory must be flat. The start is what depends on the corpus: opening",
                "and checking it, its fingerprint, the order of samples, and the first batch. What",
                "`gridformer train` takes besides is the same with any corpus, and is listed",
                "further below: Python, PyTorch, the model and the evaluation before the first",
                "step. `wait for data` is the row of that name in the Chrome trace of a step,",
                "which `train.trace_step` writes.",
            ]
        ),
        table(bars),
        "## The parts",
        table(columns),
        "## The start of `gridformer train`, by phases",
        "\n".join(
            [
                "Processor seconds of a run in one process, and in parentheses seconds, which",
                "reading from a cold disk and other programs make longer.",
            ]
        ),
        table(starts),
    ]


def _memory(watched: Watched, step: int) -> float:
    return min(watched.anonymous, key=lambda seen: abs(seen[0] - step))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**6, 10**9])
    parser.add_argument("--steps", type=int, default=300, help="of the training run")
    parser.add_argument("--folder", type=Path, help="where the corpus is written meanwhile")
    parser.add_argument("--out", type=Path, help="the page; by default it is printed")
    options = parser.parse_args()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    if min(options.tokens) < 10**5 or options.steps < 20:
        parser.error("use --tokens of at least 100000 and --steps of at least 20")
    bars, columns, starts = {}, {}, {}
    for tokens in options.tokens:
        found, phases, watched = measured(tokens, options.steps, options.folder)
        bars[tokens] = bar_column(found, watched, options.steps)
        columns[tokens] = column(found, watched, options.steps)
        starts[tokens] = phase_column(phases)
    write_page(page(bars, columns, starts), options.out)


if __name__ == "__main__":
    main()
