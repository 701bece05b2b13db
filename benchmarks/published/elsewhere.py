"""The comparisons of the papers on the machines of the papers, as `predict` sees them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.planner.rows import FRONTERA, SELENE, Row, calibration_rows, gpt
from benchmarks.predicted.predictions import Question, predict_all
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.validation import check_layout

LASSEN = "lassen-v100"


@dataclass(frozen=True)
class There:
    """A run on a published machine.

    Attributes:
        cluster: The name of a shipped cluster.
        run: The run.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        layers_only: Whether only transformer layers count, as in some papers.
        row: The published row whose machine and place of ranks in nodes it has; None for the
            choices of gridformer.
    """

    cluster: str
    run: RunConfig
    training: bool = True
    layers_only: bool = False
    row: Row | None = None

    @property
    def key(self) -> str:
        kind = f"{self.cluster} {self.training} {self.layers_only} {self.row is not None}"
        return f"{kind} {self.run.model_dump_json()}"


def seconds_there(some: Iterable[There]) -> dict[str, float]:
    """Predicts the seconds a sequence of all of them, by their keys.

    Raises:
        RuntimeError: There is no prediction for one of them.
    """
    found: dict[str, float] = {}
    by_cluster: dict[str, dict[str, There]] = {}
    for one in some:
        by_cluster.setdefault(one.cluster, {})[one.key] = one
    for cluster, runs in by_cluster.items():
        questions = [
            Question(one.run, one.layers_only, one.training, row=one.row) for one in runs.values()
        ]
        for key, predicted in zip(runs, predict_all(questions, Path(cluster))):
            if predicted.error:
                raise RuntimeError(f"no prediction on {cluster}: {predicted.error}")
            found[key] = predicted.step_s / runs[key].run.train.global_batch
    return found


# --------------------------------------------------------------------------- Optimus


@cache
def _table_2() -> dict[str, Row]:
    return {row.name: row for row in calibration_rows(FRONTERA)}


def as_published(scheme: str, training: bool = True) -> There:
    """Returns Table 2 of Optimus on 64 devices, with ranks placed in nodes as in the paper."""
    row = _table_2()[f"{scheme} / 64"]
    return There(FRONTERA, row.run, training, layers_only=True, row=row)


def weak_scaling(scheme: str, training: bool = True, **layout: Any) -> There:
    """Returns it with fields of the layout changed, and ranks placed by gridformer."""
    run = _table_2()[f"{scheme} / 64"].run
    run = run.model_copy(update={"layout": run.layout.model_copy(update=layout)})
    check_layout(run)
    return There(FRONTERA, run, training, layers_only=True)


# --------------------------------------------------------------------------- SUPER


def lassen(model: str, n: int, layout: dict[str, Any]) -> There:
    """Returns a run of SUPER on Lassen, one sequence a device."""
    raw: dict[str, Any] = {
        "model": {"name": model, "dropout": 0.0},
        "layout": {"devices_per_node": 4, **layout},
        "data": {"path": "none", "task": "pairs"},
        "train": {"global_batch": n},
    }
    run = parse_run(raw)
    check_layout(run)
    return There(LASSEN, run)


# --------------------------------------------------------------------------- Megatron


def selene(sizes: tuple[int, int, int], batch: int, **layout: Any) -> There:
    """Returns a GPT on A100s as Megatron-LM ran it; sizes are layers, hidden size and heads."""
    fields = {"scheme": "megatron", "devices_per_node": 8, "micro_batches": batch, **layout}
    train = {"global_batch": batch, "dtype": "float16", "recompute": "full"}
    run = gpt((*sizes, 2048, 51200), fields, train)
    check_layout(run)
    return There(SELENE, run)
