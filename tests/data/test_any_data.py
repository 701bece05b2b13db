"""Random data sections of run files: what they describe is read alike by every layout and resume.

Each example draws a task, one to three folders with weights, stages, validation and test sets, and
how documents share samples. `tests/support/fuzz` draws models and layouts, which get batches of its
own; here, run files are drawn whose batches come from folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import RunConfig, parse_run
from gridformer.data import RunData, TokenFolder, open_training, open_validation, resolve
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.samples.batches import open_tests
from tests.support.chats import chat_folder
from tests.support.data import labeled_source, listed, pairs_source, sentences

FAMILIES = {"text": ("gpt2", "llama", "bert", "t5"), "pairs": ("t5", "transformer")}
FAMILIES |= {"labeled": ("gpt2", "llama", "bert"), "chat": ("gpt2", "llama")}
N_LABELS = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Return two folders of each kind, the second one with the tokenizer of the first."""
    root, found = tmp_path_factory.mktemp("any"), {}
    made = {
        "text": [listed(*sentences(90)), listed(*(text.upper() for text in sentences(40)))],
        "pairs": [pairs_source(60), pairs_source(40)],
        "labeled": [labeled_source(90), labeled_source(90)],
    }
    for kind, (one, other) in made.items():
        first = prepare_corpus([one], root / kind, vocab_size=300, val_fraction=0.3)
        more = root / f"{kind}-2"
        prepare_corpus([other], more, tokenizer=first.tokenizer, val_fraction=0.3, seed=2)
        found[kind] = [root / kind, more]
    found["chat"] = [chat_folder(root).path] * 2
    return found


def weights(draw: st.DrawFn, names: list[str]) -> dict[str, float]:
    given = st.lists(st.sampled_from((0, 0.1, 0.3, 1, 2, 7)), min_size=len(names))
    values = given.map(lambda v: v[: len(names)]).filter(any)
    return dict(zip(names, draw(values)))


@st.composite
def runs(draw: st.DrawFn, folders: Mapping[str, list[Path]]) -> RunConfig:
    kind = draw(st.sampled_from(sorted(folders)))
    family = draw(st.sampled_from(FAMILIES[kind]))
    paths = st.sampled_from([str(path) for path in folders[kind]])
    data: dict[str, Any] = {"task": {"pairs": "pairs", "chat": "chat"}.get(kind, "auto")}
    names = ["one", "two", "three"][: draw(st.integers(0, 3))]
    if names:
        first = weights(draw, names)
        data["sources"] = [{"name": n, "path": draw(paths), "weight": first[n]} for n in names]
        starts = sorted(draw(st.sets(st.integers(2, 9), max_size=2)))
        data["stages"] = [{"from_step": n, "weights": weights(draw, names)} for n in starts]
    else:
        data["path"] = draw(paths)
    sets = st.lists(st.sampled_from(["one", "a", "b"]), unique=True, max_size=2)
    split = st.sampled_from(["train", "val"])
    for section in ("validation", "test"):
        data[section] = [{"name": n, "path": draw(paths), "split": draw(split)} for n in draw(sets)]
    if family in ("gpt2", "llama") and kind in ("text", "chat") and draw(st.booleans()):
        packing = "documents" if kind == "chat" else draw(st.sampled_from(["windows", "documents"]))
        data |= {"document_mask": True, "packing": packing, "reset_positions": draw(st.booleans())}
    model = {"family": family, "n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 96}
    if kind == "labeled":
        model |= {"n_labels": N_LABELS} | ({"sentence_pair": False} if family == "bert" else {})
    data["seq_len"] = draw(st.sampled_from([0, 33, 96])) if kind == "text" else 0
    train = {"global_batch": draw(st.integers(1, 7)), "seed": draw(st.integers(0, 99))}
    return parse_run({"model": model, "data": data, "train": train})


@settings(max_examples=12, deadline=None)
@given(choose=st.data())
def test_batches_depend_on_seed_step_and_row_alone(
    folders: dict[str, list[Path]], choose: st.DataObject
) -> None:
    run = choose.draw(runs(folders))
    assert RunConfig.model_validate(run.model_dump(mode="json")) == run
    data = RunData.open(run.data)
    run = resolve(run, data)
    assert resolve(run, data) == run
    step, start = choose.draw(st.integers(0, 12)), choose.draw(st.integers(0, 3))
    n = run.train.global_batch
    rows = np.array(choose.draw(st.lists(st.integers(0, n - 1), max_size=4)), dtype=np.int64)
    opened = [open_training(run, data, start)]
    opened += [*open_validation(run, data).values(), *open_tests(run, data).values()]
    again = RunData.open(run.data)
    reopened = [open_training(run, again, start)]
    reopened += [*open_validation(run, again).values(), *open_tests(run, again).values()]
    for one, other in zip(opened, reopened, strict=True):
        for before in range(choose.draw(st.integers(0, 2))):  # what was read before is no matter
            one.batch(start + before)
        whole, part = one.batch(start + step), other.batch(start + step, rows)
        assert whole.keys() == part.keys()
        for key, values in whole.items():
            assert len(values) == n
            assert np.array_equal(values[rows], part[key]), key


def test_the_folders_of_an_example_are_all_read(folders: dict[str, list[Path]]) -> None:
    for kind, paths in folders.items():
        for path in paths:
            assert TokenFolder.open(path).kind == kind
