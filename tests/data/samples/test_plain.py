"""Batches of all kinds, mixed and packed, hold what `tests/support/plain_samples.py` says."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gridformer.config import parse_run
from gridformer.data.samples.batches import open_samples, open_training
from gridformer.data.tokenfolder import TokenSplit
from tests.support import plain_samples as plain
from tests.support.plain_samples import EOS, IGNORE, PAD, SEP, Corpus, Row, V, fill

N, LONG, SOURCE, TARGET = 12, 40, 20, 24  # lengths of samples; LONG with random choices
WORDS: Any = SimpleNamespace(vocab_size=V, eos_id=0, special_ids={0}, begin_ids=[], id_of={}.get)
FEW: dict[str, Any] = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 64}
MASK: dict[str, Any] = {"document_mask": True}
PACK = {**MASK, "packing": "documents"}
PAIRS = {"source_len": SOURCE, "seq_len": TARGET}
KINDS: list[Any] = [  # the task, families, and other keys of data
    ("causal", "gpt2", {}, lambda c, of: plain.windows(c, N)),
    ("causal", "gpt2", MASK, lambda c, of: plain.windows(c, N, True, True)),
    ("causal", "gpt2", {**MASK, "reset_positions": False}, lambda c, of: plain.windows(c, N, True)),
    ("causal", "gpt2", PACK, lambda c, of: plain.documents(c, N)),
    ("chat", "gpt2", {}, lambda c, of: plain.chats(c, N)),
    ("chat", "gpt2", PACK, lambda c, of: plain.chats(c, N)),
    ("pairs", "t5 transformer", PAIRS, lambda c, of: plain.pairs(c, of, SOURCE, TARGET)),
    ("pairs", "t5 transformer", PAIRS | PACK, lambda c, of: plain.pairs(c, of, SOURCE, TARGET)),
    ("masked", "bert", {"seq_len": LONG}, lambda c, of: plain.cut(c, LONG - 3)),
    # 15% of 44 words are 7, in 2 spans: 44 - 7 words, 2 sentinels and the end of text are 40.
    ("spans", "t5", {"source_len": LONG}, lambda c, of: plain.cut(c, 44)),
    ("classify", "gpt2 bert t5", {}, lambda c, of: plain.texts(c, of, N, "labels")),
    ("regression", "gpt2 bert t5", {}, lambda c, of: plain.texts(c, of, N, "value")),
    ("choice", "gpt2 bert t5", {"n_choices": 2}, lambda c, of: plain.choices(c, of, N)),
    ("answer", "gpt2 bert t5", {"stride": 3}, lambda c, of: plain.answers(c, of, N, 3)),
]
CASES = [(task, one, *rest) for task, families, *rest in KINDS for one in families.split()]


def corpus(numbers: list[tuple[int, int, int]], begin: int, task: str) -> Corpus:
    """Make a document of each three numbers, with columns for the task."""
    docs, columns = [], {"first_answer": [x for x, _, _ in numbers]}
    for x, y, z in numbers:
        n, low, two = x + y + z, y % (y + z), z != 5
        docs.append([*range(begin + 1, begin + n + 1), *[EOS] * (task not in ("masked", "spans"))])
        begin += n
        parts = (x, y, z) if task == "choice" else (x, y + z) if two or task == "answer" else (n, 0)
        answer = [(low, min(low + x % 4, y + z - 1)) if x % 5 else (-1, -1)]
        said = [int(x <= i <= x + y) for i in range(n + 1)]
        some: Any = [parts], [z % 3], [z / 4], [z % 2], said if task == "chat" else answer
        for name, values in zip(("parts", "labels", "value", "right", "answer"), some):
            columns.setdefault(name, []).extend(values)
    return Corpus(docs=docs, columns=columns)


def apart(row: Row, side: str, keys: list[str], n: int, behind: int) -> list[Row]:
    """Return the first n positions by documents; `behind` is how the number of padding differs."""
    owners = row.get(f"{side}documents", [0] * n)
    assert {*owners[n:]} <= {owners[n - 1] + behind}
    at = [i - owners.index(d) for i, d in enumerate(owners)]
    assert f"{side}documents" not in row or row[f"{side}positions"] == at
    of = [[i for i in range(n) if owners[i] == d] for d in range(owners[n - 1] + 1)]
    return [{key: [row[key][i] for i in some] for key in keys} for some in of]


def undone(row: Row, task: str, packed: bool) -> list[Row]:
    """Put hidden words back, drop padding, and take documents apart that share a row."""
    if task not in ("masked", "spans", "pairs", "chat") and not packed:
        return [row]
    tokens, said = row["tokens"], [t for t in row["targets"] if t != IGNORE]
    if task == "masked":
        ids = [word if t == IGNORE else t for word, t in zip(tokens, row["targets"])]
        n, own = ids.index(SEP), [*range(ids[1], ids[1] + LONG - 3)]
        assert row["pair"] == (ids[1:n] + ids[n + 1 : -1] == own)
        return [{"text": own}]
    if task == "spans":
        assert tokens == fill([PAD, *said[:-1]], len(tokens), PAD)
        marks = [*(i for i, t in enumerate(said) if t > PAD), -1]
        lost = {said[i]: said[i + 1 : end] for i, end in pairwise(marks)}
        return [{"text": [t for one in row["source"][:-1] for t in lost.get(one, [one])]}]
    n, m = len(said) if task == "pairs" else sum(t != EOS for t in tokens), 0
    found = apart(row, "", ["tokens", "targets"], n, task != "pairs")
    assert {*tokens[n:], *row["targets"][n:]} <= {PAD if task == "pairs" else EOS, IGNORE}
    if task == "pairs":
        m = sum(row["source_valid"])
        found = [a | b for a, b in zip(found, apart(row, "source_", ["source"], m, 1))]
        assert row["source"][m:] == [PAD] * (SOURCE - m)
    valid = row["source_valid"] if task == "pairs" else row.get("valid", [True] * n)
    assert valid == [i < (m or n) for i in range(len(valid))]
    return found


@pytest.mark.parametrize(("task", "family", "keys", "rows_of"), CASES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_batches(task: str, family: str, keys: Any, rows_of: Any, data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(1, 12), st.integers(0, 9), st.integers(1, 9))
    numbers = st.lists(sizes, min_size=6, max_size=10).map(lambda some: some[len(some) % 2 :])
    weights = data.draw(st.lists(st.integers(1, 3), max_size=3))
    corpora = [corpus(data.draw(numbers), 1000 * i, task) for i in range(max(1, len(weights)))]
    want = [rows_of(c, family) for c in corpora]
    assume(all(len(rows) > 1 for rows in want))
    names = [{"name": f"s{i}", "path": "x", "weight": w} for i, w in enumerate(weights)]
    model = {"family": family, **FEW, **({"n_labels": 3} if task == "classify" else {})}
    source = {"task": task, "seq_len": N, **({"sources": names} if names else {"path": "x"})}
    train = {key: data.draw(st.integers(1, 5)) for key in ("global_batch", "seed")}
    run = parse_run({"model": model, "data": source | keys, "train": train})
    folders = {}
    for i, c in enumerate(corpora):
        text, ends = [t for doc in c.docs for t in doc], np.cumsum([0, *map(len, c.docs)])
        columns = {key: np.array(value) for key, value in c.columns.items()}
        split = TokenSplit("train", Path("x"), np.array(text), ends, V, columns)
        folders[f"s{i}"] = SimpleNamespace(train=split, tokenizer=WORDS)
    opened: Any = SimpleNamespace(sources=folders, first=folders["s0"])
    epochs = [open_samples(run, one.train, WORDS).n_samples for one in folders.values()]
    batches, size = open_training(run, opened), run.train.global_batch
    read = [batches.batch(step) for step in range(2 * sum(epochs) // size + 2)]
    rows = [{key: one[key][i].tolist() for key in one} for one in read for i in range(size)]
    words = [np.ravel(row.get("source", row["tokens"])) for row in rows]
    sources = [int(np.median([t for t in some if 0 < t < V])) // 1000 for some in words]
    if task == "masked":  # every row draws numbers of its own
        hidden = {tuple(t == IGNORE for t in row["targets"]) for row in rows}
        assert len(hidden) > 0.9 * len(rows)
    for i, (n, expected) in enumerate(zip(epochs, want)):
        mine = [row for row, source in zip(rows, sources) if source == i]
        for begin in range(0, len(mine), n):
            some = mine[begin : begin + n]
            found = [one for row in some for one in undone(row, task, "packing" in keys)]
            epoch, whole = (Counter(str(sorted(x.items())) for x in of) for of in (found, expected))
            assert epoch == whole if len(some) == n else epoch <= whole
        if "packing" in keys and task != "pairs" and len(mine) >= n:
            left = sorted(N - sum(row["valid"]) for row in mine[:n])
            assert left == plain.best_fit([len(one["tokens"]) for one in expected], N)
