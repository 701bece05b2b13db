"""Training steps of models on one GPU: predicted, measured, and the errors."""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.predicted.predictions import Predicted, Question, predicting
from benchmarks.predicted.report import Row, error_lines, table
from benchmarks.predicted.steps import Measured, measure
from gridformer.config import RunConfig, shipped_model
from gridformer.mesh.process_group import init_process_groups
from gridformer.parallel.validation import check_layout
from gridformer.train.numerics import set_numerics
from gridformer.utils.units import GIB

STEPS, WARM_UPS = 6, 3
LEAST_S = 6.0  # no case starts with less time left


@dataclass(frozen=True)
class Case:
    """A model on one GPU in bfloat16."""

    model: str
    batch: int
    recompute: str = "none"
    dropout: float = 0.0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.model} b={self.batch}, recompute {self.recompute}{dropout}"

    def run(self, device: str) -> RunConfig:
        model: dict[str, Any] = {**shipped_model(self.model), "dropout": self.dropout}
        if not model.get("vocab_size"):
            model["vocab_size"] = 512
        run = RunConfig.model_validate(
            {
                "model": model,
                "data": {"path": "."},
                "train": {
                    "global_batch": self.batch,
                    "dtype": "bfloat16",
                    "device": device,
                    "recompute": self.recompute,
                    "steps": 1000,
                    "sanity_checks": False,
                },
            }
        )
        check_layout(run)
        return run


# The most telling ones first, because the time may not suffice for all.
CASES = (
    Case("gpt2-124m", 16),
    Case("gpt2-774m", 8),
    Case("bert-large", 16),
    Case("megatron-1.2b", 8),
    Case("gpt2-774m", 8, "full"),
    Case("gpt2-124m", 16, dropout=0.1),
    Case("t5-large", 8),
    Case("megatron-2.5b", 4, "full"),
    Case("gpt2-124m", 1),
    Case("gpt2-124m", 16, "full"),
    Case("gpt2-774m", 8, dropout=0.1),
    Case("megatron-1.2b", 8, "full"),
    Case("bert-large", 16, dropout=0.1),
    Case("gpt2-1.5b", 4),
    Case("t5-large", 8, "full"),
    Case("megatron-2.5b", 4),
)
QUICK = (Case("demo-4m", 4),)


def compare(cluster: Path, limit_s: float, quick: bool, n_cases: int, numbers: Path | None) -> str:
    """Returns the table as Markdown. What fails is a line below it.

    Args:
        cluster: The cluster file.
        limit_s: No case starts when this time is almost over.
        quick: Whether to run one case on whatever device there is, to try the code.
        n_cases: How many cases are run.
        numbers: A file to which all that is predicted and measured is appended as JSON.
    """
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = QUICK if quick else CASES[:n_cases]
    questions = [Question(case.run(device), memory=True) for case in cases]
    set_numerics(questions[0].run.train)
    world = init_process_groups("auto", 1, 600.0)
    measured: list[Measured | str] = []
    for case, question in zip(cases, questions):
        spent = time.monotonic() - began
        if spent > limit_s - LEAST_S:
            measured.append("left out for lack of time")
            continue
        print(f"[{spent:5.1f} s] {case}", file=sys.stderr, flush=True)
        try:
            steps, warm_ups = (2, 1) if quick else (STEPS, WARM_UPS)
            measured.append(measure(question.run, world, steps, warm_ups))
        except Exception as error:
            measured.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    # Not meanwhile: other processes would slow down the host, which limits many steps.
    print(f"[{time.monotonic() - began:5.1f} s] predicting", file=sys.stderr, flush=True)
    with predicting(questions, cluster, 2 if quick else 8) as futures:
        predicted = [_result(future) for future in futures]
    found = list(zip(cases, predicted, measured))
    if numbers is not None:
        with numbers.open("a", encoding="utf-8") as file:
            for case, said, seen in found:
                took = seen if isinstance(seen, str) else asdict(seen)
                line = {"case": str(case), "predicted": asdict(said), "measured": took}
                file.write(json.dumps(line) + "\n")
    return _report(found)


def _result(future: Any) -> Predicted:
    try:
        found: Predicted = future.result(timeout=120)
        return found
    except Exception as error:
        return Predicted(error=f"{type(error).__name__}: {error}")


def _report(found: list[tuple[Case, Predicted, Measured | str]]) -> str:
    rows, memory, failures = [], [], []
    for case, predicted, measured in found:
        if isinstance(measured, str):
            failures.append(f"- {case}: {measured}")
        elif predicted.error:
            failures.append(
                f"- {case}: measured {1e3 * measured.median:.1f} ms, no prediction: "
                f"{predicted.error}"
            )
        else:
            rows.append(Row(str(case), predicted.step_s, measured.median))
            if measured.peak_bytes:
                memory.append(Row(str(case), predicted.peak_gib, measured.peak_bytes / GIB))
    parts = ["Milliseconds of a training step.", table(rows, 1e3, "ms"), error_lines(rows)]
    if memory:
        parts += ["Peak of torch's allocator in GiB.", table(memory, 1, "GiB"), error_lines(memory)]
    return "\n\n".join([*parts, "\n".join(failures)]).rstrip() + "\n"
