"""Conversations and examples: stopped and begun again, and with several workers: the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.chat import open_template
from gridformer.data.prepare import atomic_folder, reading
from gridformer.data.prepare.atomic_folder import documents_kept
from gridformer.data.prepare.chat import FORGED, NO_ANSWER, prepare_chat
from gridformer.data.prepare.tasks import prepare_task
from gridformer.data.prepare.writer import PrepareProgress
from gridformer.data.side_texts import read_questions
from tests.support.chats import conversations, written
from tests.support.data import documents
from tests.support.tasks import words_tokenizer, write_mnli, write_race, write_squad

Prepare = Callable[..., TokenFolder]


class Stop(BaseException):
    """Like KeyboardInterrupt, but pytest does not treat it as its own."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches small, and save the state after each."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 11)
    monkeypatch.setattr(atomic_folder, "SAVE_EVERY_S", 0.0)


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
    assert documents_kept(tmp_path / "t") == 55
    file = tmp_path / "in" / "train-v2.0.json"
    file.write_text(file.read_text().replace("which words?", "whose words?"))
    seen: list[PrepareProgress] = []
    found = prepare(out=tmp_path / "t", on_progress=seen.append)
    assert seen[0].documents == 11
    assert len(read_questions(found.path, "val")) == found.val.n_documents
    prepare(out=tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


def talks_saying(word: str) -> list[dict[str, str]]:
    """Conversations whose number of bytes does not depend on a word of three letters."""
    return [{"prompt": f"{i:03}?", "completion": word} for i in range(80)]


def saved_chats(folder: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> str:
    datasets = pytest.importorskip("datasets")
    shutil.rmtree(folder, ignore_errors=True)
    table = datasets.Dataset.from_list(talks_saying(word))
    datasets.DatasetDict(train=table).save_to_disk(folder)
    return str(folder)


def named_chats(folder: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("datasets")
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(talk) + "\n" for talk in talks_saying(word)]
    (folder / "train.jsonl").write_text("".join(lines))
    return f"hf:{folder}"


def chats_on_the_hub(folder: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fake hub, which has one data set with one commit."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(talks_saying(word)).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda api, name, timeout: SimpleNamespace(sha=f"commit of {name} that says {word}"),
    )
    return "hf:owner/set"


@pytest.mark.parametrize("make", [saved_chats, named_chats, chats_on_the_hub])
def test_other_conversations_of_the_same_name_begin_anew(
    tmp_path: Path,
    make: Callable[[Path, str, pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template, needed = open_template("chatml", None)
    prepare: Prepare = partial(
        prepare_chat, chat=template, needed=needed, vocab_size=300, out=tmp_path / "t"
    )

    def stop(now: PrepareProgress) -> None:
        if now.documents > 40:
            raise Stop

    name = make(tmp_path / "in", "old", monkeypatch)
    with pytest.raises(Stop):
        prepare([name], on_progress=stop)
    assert documents_kept(tmp_path / "t") > 30
    assert make(tmp_path / "in", "new", monkeypatch) == name
    seen: list[PrepareProgress] = []
    found = prepare([name], on_progress=seen.append)
    # The files of a data set say which it is, but not how much of them is read.
    assert {(now.kept, now.total) for now in seen} == {(0, None)}
    texts = [text for split in documents(found).values() for text in split]
    assert len(texts) == 80
    assert all("new" in text and "old" not in text for text in texts)


def test_another_token_that_begins_documents_begins_anew(tmp_path: Path) -> None:
    """`--format` adds no such token, but the folder's tokenizer has it for the texts of a model."""
    prepare = of_task("mnli", write_mnli, tmp_path / "in")
    words_tokenizer().save(tmp_path / "tokenizer.json")
    other = Tokenizer.load(tmp_path / "tokenizer.json", bos_token="<|endoftext|>")

    def stop(now: PrepareProgress) -> None:
        if now.documents > 20:
            raise Stop

    with pytest.raises(Stop):
        prepare(out=tmp_path / "t", tokenizer=other, on_progress=stop)
    assert documents_kept(tmp_path / "t") > 10
    prepare(out=tmp_path / "t")
    prepare(out=tmp_path / "whole")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["chat", "squad"])
def test_workers_write_the_same_bytes(kind: str, tmp_path: Path) -> None:
    prepare = MAKE[kind](tmp_path / "in")
    for workers in (1, 3):
        prepare(out=tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
