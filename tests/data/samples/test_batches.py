"""Batches of every task: their keys, and that they depend only on seed, step and row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import RunConfig
from gridformer.data import Batches, TokenFolder, resolve, special_ids
from tests.support.chats import chat_folder
from tests.support.data import a_run, open_batches

MASK = {"data__document_mask": True}
PACK = {**MASK, "data__packing": "documents"}
PAIRS, PACKED_PAIRS = {"data__task": "pairs"}, {"data__task": "pairs", **PACK}
CHAT = {"data__task": "chat", "model__max_seq_len": 96}
ONE_SENTENCE = {"model__sentence_pair": False}
PLACES = "documents positions"
# The family, the values and the keys of a batch beside tokens and targets.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "causal": ("gpt2", {}, ""),
    "labeled gpt2": ("gpt2", {"model__n_labels": 10}, "valid at labels"),
    "masked": ("bert", {}, "segments pair"),
    "masked, one sentence": ("bert", ONE_SENTENCE, "segments"),
    "labeled bert": ("bert", {"model__n_labels": 10, **ONE_SENTENCE}, "segments valid at labels"),
    "spans": ("t5", {}, "source"),
    "pairs t5": ("t5", PAIRS, "source source_valid"),
    "pairs": ("transformer", {}, "source source_valid"),
    "masked documents": ("llama", MASK, PLACES),
    "packed": ("gpt2", PACK, f"valid {PLACES}"),
    "packed pairs": (
        *("t5", PACKED_PAIRS),
        f"{PLACES} source source_valid source_documents source_positions",
    ),
    "chat": ("gpt2", CHAT, ""),
    "packed chat": ("llama", CHAT | PACK, f"valid {PLACES}"),
}
Opened = tuple[RunConfig, TokenFolder]


@pytest.fixture(scope="session")
def opened(
    text_folder: TokenFolder,
    pairs_folder: TokenFolder,
    labeled_folder: TokenFolder,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Opened]:
    """Return a resolved run and its folder for each of KINDS."""
    chats = chat_folder(tmp_path_factory.mktemp("chat"))
    folders = {"pairs": pairs_folder, "chat": chats, "labeled": labeled_folder}
    out = {}
    for kind, (family, values, _) in KINDS.items():
        folder = next((one for word, one in folders.items() if word in kind), text_folder)
        out[kind] = (resolve(a_run(folder, family, **values), folder), folder)
    return out


def opened_batches(opened: Opened, split: str = "train", **train: int) -> Batches:
    run, folder = opened
    run = run.model_copy(update={"train": run.train.model_copy(update=train)})
    return open_batches(run, folder, "train" if split == "train" else "val")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_shapes_and_types(opened: dict[str, Opened], kind: str) -> None:
    run, _ = opened[kind]
    batch = opened_batches(opened[kind]).batch(0)
    assert set(batch) == {"tokens", "targets", *KINDS[kind][2].split()}
    for key, values in batch.items():
        assert values.dtype == (bool if "valid" in key else np.int64)
        length = run.source_len if key.startswith("source") else run.seq_len
        flat = key in ("pair", "at", "labels")
        assert values.shape == ((8,) if flat else (8, length))
    for key in ("tokens", "source"):
        if key in batch:
            assert 0 <= batch[key].min() <= batch[key].max() < run.model.vocab_size
    said = batch["targets"][batch["targets"] != -100]
    assert 0 <= said.min() <= said.max() < run.model.vocab_size
    # Every row has at least one target.
    assert ((batch["targets"] != -100).sum(axis=1) >= 1).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_rows_alone_are_rows_of_the_whole(
    opened: dict[str, Opened], kind: str, data: st.DataObject
) -> None:
    split = data.draw(st.sampled_from(["train", "val"]))
    step = data.draw(st.integers(0, 10**9))
    seed = data.draw(st.integers(0, 2**63 - 1))
    size = data.draw(st.integers(1, 9))
    whole = opened_batches(opened[kind], split, seed=seed, global_batch=size).batch(step)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    parts = [
        # Each is opened anew: what one process reads does not depend on the others.
        opened_batches(opened[kind], split, seed=seed, global_batch=size).batch(step, slice(a, b))
        for a, b in zip([0, *cuts], [*cuts, size])
    ]
    assert same({key: np.concatenate([p[key] for p in parts]) for key in whole}, whole)
    rows = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3)))
    some = opened_batches(opened[kind], split, seed=seed, global_batch=size).batch(step, rows)
    assert same(some, {key: value[rows] for key, value in whole.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_depend_on_what_was_read(opened: dict[str, Opened], kind: str) -> None:
    batches = opened_batches(opened[kind])
    straight = [batches.batch(step) for step in range(4)]
    assert same(batches.batch(2), straight[2])
    assert same(opened_batches(opened[kind]).batch(3), straight[3])
    assert not same(straight[0], straight[1])
    assert not same(opened_batches(opened[kind], seed=99).batch(0), straight[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_is_read_from_its_own_file(opened: dict[str, Opened], kind: str) -> None:
    """If the other split's tokens are blanked out, what is read stays the same."""
    run, folder = opened[kind]
    for name in ("train", "val"):
        want = opened_batches(opened[kind], name).batch(0)
        other = "val" if name == "train" else "train"
        blank = replace(getattr(folder, other), tokens=np.zeros_like(getattr(folder, other).tokens))
        half = replace(folder, **{other: blank})
        assert same(open_batches(run, half, "train" if name == "train" else "val").batch(0), want)


def test_masks_of_the_next_epoch_are_others(opened: dict[str, Opened]) -> None:
    """Two places that hold the same text hide different words of it."""
    batches = opened_batches(opened["masked, one sentence"], global_batch=1)
    seen: dict[bytes, list[bytes]] = {}
    for step in range(2 * batches.n_samples):
        batch = batches.batch(step)
        hidden = batch["targets"] != -100
        text = np.where(hidden, batch["targets"], batch["tokens"])
        seen.setdefault(text.tobytes(), []).append(hidden.tobytes())
    assert all(len(hidden) == 2 for hidden in seen.values())
    differ = sum(one != other for one, other in seen.values())
    assert differ > 0.8 * len(seen)


def test_validation_draws_other_numbers_than_training(
    opened: dict[str, Opened], tmp_path: Path
) -> None:
    """On the same split, so that only the random numbers could make the masks differ."""
    run, folder = opened["masked"]
    twice = TokenFolder(folder.path, folder.index, folder.train, folder.train)
    train, val = (open_batches(run, twice, split).batch(0) for split in ("train", "val"))
    assert not same(train, val)


def test_special_ids_fit_the_resolved_vocabulary(opened: dict[str, Opened]) -> None:
    for run, folder in opened.values():
        if not (run.task == "causal" and not run.model.n_labels):
            assert special_ids(run, folder.tokenizer).vocab_size == run.model.vocab_size
