"""`evaluate --tasks labels:FILE` knows labels by the names that a model has with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.config import parse_run
from gridformer.data.side_texts import write_label_names
from gridformer.evaluate.examples import predicted
from gridformer.evaluate.loading import load_model
from tests.support.checkpoints import save_model
from tests.support.commands import gridformer_here

CPU = torch.device("cpu")
NAMES = ("no", "yes", "2")
MODEL = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 24, "vocab_size": 301}
TEXTS = [f"line {i} of {'it ' * i}" for i in range(6)]


def said_of(place: Path, labels: Sequence[object]) -> str:
    """Return the accuracy that the command finds for labels of `TEXTS`, or its error."""
    file = place.parent / "labels.jsonl"
    records = [{"text": text, "label": label} for text, label in zip(TEXTS, labels)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ("--tasks", f"labels:{file}", "--json", "--device", "cpu")
    done = gridformer_here("evaluate", place, *words)
    if done.returncode:
        return done.stderr
    (found,) = json.loads(done.stdout)["tasks"].values()
    return str(found["accuracy"])


def test_the_names_are_found_wherever_the_model_lies(token_folder: Path, tmp_path: Path) -> None:
    """Also where the data of its training is not."""
    model = {**MODEL, "n_labels": 3, "token_head": False, "init_std": 0.5}
    data = {"path": str(tmp_path / "gone"), "task": "classify"}
    run = parse_run({"model": model, "data": data})
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(token_folder / "tokenizer.json", out)
    nameless = save_model(out, run, 1, seed=3)
    write_label_names(out, NAMES)
    named = save_model(out, run, 2, seed=3)
    far = Path(shutil.copytree(named, tmp_path / "far"))
    export_run(out, tmp_path / "exported")
    right = predicted(load_model(named, CPU), TEXTS, 2)
    mixed = [*right[:3], *(NAMES[(i + 1) % 3] for i in right[3:])]  # half of them are wrong
    for place in (out, named, far, tmp_path / "exported"):
        assert said_of(place, [NAMES[i] for i in right]) == "1.0"
        assert said_of(place, mixed) == "0.5"
    assert "has the label 'maybe': write one of no, yes, 2" in said_of(far, ["maybe"])
    gone = f"neither labels.json of the model nor {tmp_path / 'gone'}, whose names"
    assert gone in said_of(nameless, ["no"])
    assert said_of(nameless, right) == "1.0"
