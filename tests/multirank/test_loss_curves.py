"""On real text, bfloat16 and float16 learn what float32 does; see docs/reference/precision.md."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
from benchmarks.precision.dtypes import BOUND, HALVES, LAYOUTS, MODEL, TRAIN, largest_gap, smoothed

from gridformer.config import parse_run
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import train

FULL = 200  # steps; shorter runs also have fewer tokens per step


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare part of the Python standard library."""
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources

    library = Path(sysconfig.get_paths()["stdlib"])
    out = tmp_path_factory.mktemp("text") / "tokens"
    packages = [str(library / name) for name in ("json", "email", "asyncio", "unittest")]
    prepare_corpus(open_sources(packages), out, vocab_size=512, val_fraction=0.05)
    return out


def curve(
    pool: WorkerPool, text: Path, out: Path, layout: dict[str, Any], dtype: str, steps: int
) -> list[dict[str, Any]]:
    """Return the metrics of every step of a run."""
    rows = TRAIN["global_batch"] if steps == FULL else 8
    run = parse_run(
        {
            "model": {**MODEL, "max_seq_len": 64 if steps == FULL else 16},
            "layout": layout,
            "data": {"path": str(text)},
            "train": {**TRAIN, "steps": steps, "dtype": dtype, "global_batch": rows},
        }
    )
    check_layout(run)
    with pool.limit(900.0):
        plan = Plan(run, out, None, 0, decide_run(run))
        pool.run(plan.n_processes, train, plan)
    return [line for line in read_metrics(out) if "loss" in line]


CASES = [("one process", 60), *((layout, FULL) for layout in LAYOUTS)]


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case[1] < FULL, CASES), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_curves_are_close_to_float32s(
    pool: WorkerPool, text: Path, tmp_path: Path, case: tuple[str, int]
) -> None:
    """The runs have equal initial weights and text; losses are means over 20 steps."""
    layout, steps = LAYOUTS[case[0]], case[1]
    runs = {
        dtype: curve(pool, text, tmp_path / dtype, layout, dtype, steps)
        for dtype in ("float32", *HALVES)
    }
    losses = {dtype: [line["loss"] for line in lines] for dtype, lines in runs.items()}
    means = smoothed(losses["float32"])
    assert means[-1] < 0.95 * means[0], "it learns"
    for dtype in HALVES:
        gap = largest_gap(losses[dtype], losses["float32"])
        assert 0.0 < gap < BOUND, f"{dtype}: 0 would be the same type"
    assert sum(line["skipped"] for line in runs["float16"]) < 5, "the scale is found, and kept"
