"""Conversations and examples: stopped and begun again, and with several workers: the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gridformer.data import TokenFolder
from gridformer.data.chat import open_template
from gridformer.data.examples_file import read_questions
from gridformer.data.prepare import reading, resuming
from gridformer.data.prepare.chat import FORGED, NO_ANSWER, prepare_chat
from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.resuming import documents_kept
from gridformer.data.prepare.tasks.writing import prepare_task
from tests.support.chats import conversations, written
from tests.support.tasks import words_tokenizer, write_mnli, write_race, write_squad

Prepare = Callable[..., TokenFolder]


class Stop(BaseException):
    """Like KeyboardInterrupt, but pytest does not treat it as its own."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches small, and save the state after each."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 11)
    monkeypatch.setattr(resuming, "SAVE_EVERY_S", 0.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def of_chats(root: Path) -> Prepare:
    """Conversations in two formats, some of which are left out; the tokenizer is trained."""
    root.mkdir()
    lines = conversations(40)
    lines[5:5] = [
        {"prompt": "a", "completion": "<|im_end|>"},
        {"messages": [{"role": "user", "content": "hello?"}]},
    ]
    (root / "b.json").write_text(json.dumps([{"prompt": "a", "completion": "b"}] * 30))
    specs = [written(root / "a.jsonl", lines)]
    try:
        import datasets  # noqa: F401
    except ImportError:
        pass
    else:
        specs.append(str(root / "b.json"))
    template, needed = open_template("chatml", None)
    return partial(prepare_chat, specs, chat=template, needed=needed, vocab_size=300)


def of_task(kind: str, write: Callable[[Path], Path], root: Path) -> Prepare:
    return partial(prepare_task, kind, write(root), tokenizer=words_tokenizer())


MAKE: dict[str, Callable[[Path], Prepare]] = {
    "chat": of_chats,
    "mnli": partial(of_task, "mnli", write_mnli),
    "squad": partial(of_task, "squad", write_squad),
    "race": partial(of_task, "race", write_race),
}


@pytest.mark.parametrize("kind", MAKE)
def test_stopped_again_and_again(kind: str, tmp_path: Path) -> None:
    prepare = MAKE[kind](tmp_path / "in")
    whole = prepare(out=tmp_path / "whole")
    if kind == "chat":
        assert whole.index.skipped == {NO_ANSWER: 1, FORGED: 1}
    seen: list[int] = []

    def stop(now: PrepareProgress) -> None:
        if now.phase == "tokenizing":
            seen.append(now.documents)
        if len(seen) == 3:
            raise Stop

    stops = 0
    while True:
        before = documents_kept(tmp_path / "t")
        seen.clear()
        try:
            prepare(out=tmp_path / "t", on_progress=stop)
            break
        except Stop:
            stops += 1
            # Two batches were written, and nothing was written again.
            assert before < documents_kept(tmp_path / "t") <= before + 22
            assert seen[0] - before <= 11
    assert stops
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    prepare = of_task("squad", write_squad, tmp_path / "in")

    def stop(now: PrepareProgress) -> None:
        if now.documents > 55:  # among the validation questions
            raise Stop

    with pytest.raises(Stop):
        prepare(out=tmp_path / "t", on_progress=stop)
    assert documents_kept(tmp_path / "t") == 51
    file = tmp_path / "in" / "train-v2.0.json"
    file.write_text(file.read_text().replace("which words?", "whose words?"))
    seen: list[PrepareProgress] = []
    found = prepare(out=tmp_path / "t", on_progress=seen.append)
    assert seen[0].documents == 11
    assert len(read_questions(found.path, "val")) == found.val.n_documents
    prepare(out=tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["chat", "squad"])
def test_workers_write_the_same_bytes(kind: str, tmp_path: Path) -> None:
    prepare = MAKE[kind](tmp_path / "in")
    for workers in (1, 3):
        prepare(out=tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
