"""Checkpoints move between all cells of the exactness matrix: random pairs, every family.

A run that stopped halfway under one layout continues under another, with the losses it would have
had: parameters, optimizer state, the position in the data and dropout masks move along.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gridformer.config import LayoutConfig
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.launch.plan import plan_run
from gridformer.train.plan import Plan
from tests.support.marks import full_unless
from tests.support.multirank.matrix import CELLS, EXPERTS, MODELS, Cell
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import MIDDLE, STEPS, assert_same_run, start_from, train

SIZE = {"n_layers": 3, "hidden_size": 24, "n_heads": 12, "max_seq_len": 16}
TRAIN = {
    "steps": STEPS, "global_batch": 32, "lr": 3e-3, "eval_every": 0, "eval_batches": 1,
    "save_every": MIDDLE, "dtype": "float64", "sanity_checks": True,
}  # fmt: skip


# The fine-tuned ones learn no text; tests/multirank/test_fine_tuning.py trains them.
PRETRAINED = [
    name for name, model in MODELS.items() if model.get("token_head", True) and name not in EXPERTS
]


def random_pairs(n: int, models: Sequence[str] = PRETRAINED) -> list[tuple[Cell, Cell]]:
    """Return pairs of cells of the same model, taking models in turn; all else may differ."""
    chooser = random.Random(5)
    pairs = []
    for number in range(n):
        model = models[number % len(models)]
        cells = [cell for cell in CELLS if cell.model == model and cell.dropout]
        before, after = chooser.sample(cells, 2)
        pairs.append((before, after))
    return pairs


# Both columns of the grid have all heads of keys and values; the replicas have them once.
SHARED_HEADS = (
    Cell("Llama", "Optimus", 1, "none", True),
    Cell("Llama", "single", 1, "fsdp", True),
)
PAIRS = [*random_pairs(40), *random_pairs(8, EXPERTS), SHARED_HEADS]
# A pair on few processes, for every test run. All random ones of Llama take many.
SMALLEST = min(
    (pair for pair in PAIRS if pair[0].model == "GPT-2"),
    key=lambda pair: sum(LayoutConfig(**cell.layout).n_processes for cell in pair),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moves")
    records = [
        {"en": f"word {i} and {i * i % 97} more", "de": f"Wort {i} und noch {i * i % 97}"}
        for i in range(300)
    ]
    lines = root / "records.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    kinds: dict[str, dict[str, Any]] = {
        "text": {"text_key": "en"},
        "pairs": {"pair_keys": ("en", "de")},
    }
    for kind, how in kinds.items():
        prepare_corpus(
            open_sources([str(lines)], **how), root / kind, vocab_size=290, val_fraction=0.2
        )
    return {kind: root / kind for kind in kinds}


def plan_of(
    folders: dict[str, Path], cell: Cell, out: Path, tmp_path: Path, optimizer: str
) -> Plan:
    # Both cells have the same number of layers, even if one has no stages.
    model = {**SIZE, **cell.config, "max_seq_len": 16, "n_layers": SIZE["n_layers"]}
    model.pop("n_labels", None)  # text has no labels
    kind = "pairs" if model["family"] == "transformer" else "text"
    # T5 needs both lengths, because sequence parallelism shards both.
    lengths = {"seq_len": 16, "source_len": 16} if model["family"] in ("t5", "transformer") else {}
    file = tmp_path / "run.yaml"
    sections = {
        "model": model,
        "layout": cell.layout,
        "data": {"path": str(folders[kind]), **lengths},
        "train": {**TRAIN, "optimizer": optimizer},
    }
    file.write_text(json.dumps(sections))
    return plan_run(file, out=out)


@pytest.mark.parametrize(
    "pair",
    full_unless(lambda pair: pair in (SMALLEST, SHARED_HEADS), PAIRS),
    ids=lambda pair: "-to-".join(cell.title for cell in pair),
)
def test_a_run_resumes_under_any_other_layout(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path, pair: tuple[Cell, Cell]
) -> None:
    before, after = pair
    # Every third pair, and one of those that always run.
    optimizer = "muon" if pair is SHARED_HEADS or PAIRS.index(pair) % 3 == 0 else "adamw"
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    for cell, out in ((before, whole), (after, moved)):
        if cell is after:
            start_from(whole, moved)
        n = LayoutConfig(**cell.layout).n_processes
        pool.run(n, train, plan_of(folders, cell, out, tmp_path, optimizer))
    assert_same_run(whole, moved)
