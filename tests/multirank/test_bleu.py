"""BLEU during training is that of the saved model, on every layout, and does not disturb a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.data import TokenFolder
from gridformer.evaluate.beams import BeamSearch, translate
from gridformer.evaluate.bleu import SAMPLES_FILE, Bleu
from gridformer.evaluate.examples import measure_set
from gridformer.evaluate.loading import load_model
from gridformer.launch.plan import check_run, plan_run
from gridformer.mesh.process_group import World
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from gridformer.utils.errors import ConfigError
from tests.support.data import pairs_source
from tests.support.marks import extra, full_unless
from tests.support.multirank.pool import WorkerPool

SIZE = {"n_layers": 2, "hidden_size": 32, "n_heads": 4, "max_seq_len": 64, "dropout": 0.1}
TRAIN = {
    "steps": 4,
    "global_batch": 16,
    "lr": 1e-2,
    "eval_every": 1,
    "eval_batches": 1,
    "save_every": 0,
    "dtype": "float64",
    "bleu_every": 2,
    "bleu_beams": 2,
}
PACKED = {"document_mask": True, "packing": "documents"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2},
    "sequence": {"scheme": "megatron", "cols": 2, "sequence_parallel": True},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "subgraph": {"scheme": "subgraph", "branches": 2, "common": "first"},
    "fsdp": {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
}


def trained(plan: Plan) -> None:
    """Train with what `gridformer train` measures; the work of one rank."""
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"), "gloo", "test")
    measures = [Bleu(plan.run, plan.out)] if plan.run.train.bleu_every else []
    Trainer(plan, world, measures).fit()


def plan(folder: TokenFolder, out: Path, layout: dict[str, Any], **train: Any) -> Plan:
    sections = {
        "model": {"family": "transformer", "label_smoothing": 0.1, **SIZE},
        # Texts are translated one by one, whatever the rows of training hold.
        "data": {"path": str(folder.path), **(PACKED if "pp" in layout else {})},
        "layout": layout,
        "train": {**TRAIN, **train},
    }
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(sections))  # JSON is also YAML
    return plan_run(file, out=out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    from gridformer.data.prepare.corpus import prepare_corpus

    out = tmp_path_factory.mktemp("pairs") / "t"
    return prepare_corpus([pairs_source(60)], out, vocab_size=270, val_fraction=0.2)


@pytest.mark.parametrize("name", full_unless("pipeline".__eq__, LAYOUTS))
def test_bleu_is_that_of_the_saved_model(
    pool: WorkerPool, folder: TokenFolder, tmp_path: Path, name: str
) -> None:
    sacrebleu = extra("sacrebleu")
    with_bleu = plan(folder, tmp_path / "with", LAYOUTS[name], save_every=2)
    without = plan(folder, tmp_path / "without", LAYOUTS[name], bleu_every=0)
    for one in (with_bleu, without):
        pool.run(one.n_processes, trained, one)
    found = {m["step"]: m for m in read_metrics(with_bleu.out)}
    assert [step for step, m in found.items() if "val_bleu" in m] == [2, 4]
    plain = {m["step"]: m for m in read_metrics(without.out)}
    for step, m in found.items():
        assert (
            m["val_loss" if step == 0 else "loss"]
            == plain[step]["val_loss" if step == 0 else "loss"]
        ), "translating changes nothing of a run"

    val, decode = folder.val, folder.tokenizer.decode
    texts = [decode(val.document(i)[:-1].tolist()) for i in range(val.n_documents)]
    for step in (2, 4):  # each checkpoint's folder is evaluated as a run directory is
        checkpoint = with_bleu.out / "checkpoints" / f"step-{step:08d}"
        model = load_model(checkpoint, torch.device("cpu"))
        said = translate(model, texts[::2], BeamSearch(2, max_tokens=64))
        want = sacrebleu.corpus_bleu(said, [texts[1::2]]).score
        assert found[step]["val_bleu"] == pytest.approx(want, abs=1e-9)
        loss = measure_set(model, "val")["loss"]
        assert loss == pytest.approx(found[step]["val_loss"], rel=1e-12)
    lines = (with_bleu.out / SAMPLES_FILE).read_text(encoding="utf-8").splitlines()
    last = [one for line in lines if (one := json.loads(line))["step"] == 4]
    assert [(one["prompt"], one["reference"]) for one in last] == [
        *zip(texts[:10:2], texts[1:10:2])
    ]
    assert [one["text"] for one in last] == said[:5]


def test_translations_of_steps_that_run_again_are_replaced(
    pool: WorkerPool, folder: TokenFolder, tmp_path: Path
) -> None:
    extra("sacrebleu")
    out = tmp_path / "resumed"
    layout = {"scheme": "megatron", "cols": 2}
    pool.run(2, trained, plan(folder, out, layout, save_every=1))
    file = out / SAMPLES_FILE
    whole = file.read_text(encoding="utf-8")
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [2] * 5 + [4] * 5

    # As if the run had been killed while it wrote its last line, after the checkpoint of step 3.
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    file.write_text(whole[:-9], encoding="utf-8")
    pool.run(2, trained, plan(folder, out, layout, save_every=1))
    assert file.read_text(encoding="utf-8") == whole


def test_other_tasks_have_no_bleu(folder: TokenFolder, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    model = {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2}
    file.write_text(json.dumps({"model": model, "data": {"path": str(folder.path)}}))
    with pytest.raises(
        ConfigError, match=r"data\.task=causal has no pairs to translate; use train"
    ):
        check_run(file, ["train.bleu_every=1"])
