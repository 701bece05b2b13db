"""`evaluate` knows labels by the names that a model has with it, and the named sets of a run."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.config import RunConfig, parse_run
from gridformer.data import RunData, resolve
from gridformer.data.side_texts import write_label_names
from gridformer.evaluate.examples import check_named_set, named_sets, predicted, validation_names
from gridformer.evaluate.loading import load_model
from gridformer.utils.errors import ConfigError, DataError
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


def a_run(data: dict[str, Any], **layout: int) -> RunConfig:
    model = {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 24}
    return parse_run(
        {"model": model, "data": data, "train": {"global_batch": 8}, "layout": {**layout}}
    )


def test_names_of_sets(token_folder: Path) -> None:
    alone = a_run({"path": str(token_folder)})
    assert [*named_sets(alone)] == validation_names(alone) == ["val"]
    run = a_run(
        {
            "path": str(token_folder),
            "validation": [{"name": "wiki", "path": "w"}, {"name": "web", "path": "v"}],
            "test": [{"name": "web", "path": "x"}, {"name": "code", "path": "y"}],
        }
    )
    found = {name: str(one.path) for name, one in named_sets(run).items()}
    assert found == {"wiki": "w", "web": "v", "test/web": "x", "code": "y"}
    assert validation_names(run) == ["wiki", "web"]


def test_sets_that_are_refused(token_folder: Path, tmp_path: Path) -> None:
    def checked(name: str, **layout: int) -> None:
        data = {"path": str(token_folder), "test": [{"name": "gone", "path": str(token_folder)}]}
        run = a_run(data, **layout)
        run = resolve(run, RunData.open(run.data))
        if name == "gone":  # since it was trained
            gone = run.data.test[0].model_copy(update={"path": tmp_path / "gone"})
            run = run.model_copy(update={"data": run.data.model_copy(update={"test": (gone,)})})
        check_named_set(name, run)

    checked("val")
    checked("val", dp=2)
    with pytest.raises(ConfigError, match="--set vall: the run has no such set: did you mean"):
        checked("vall")
    with pytest.raises(ConfigError, match="no such set; use one of val, gone"):
        checked("web")
    with pytest.raises(ConfigError, match=r"does not divide over layout.dp \(3\).*use layout.dp=2"):
        checked("val", dp=3)
    with pytest.raises(DataError, match="gone: no such token folder"):
        checked("gone")
