"""Preparations that are stopped and go on, and several workers: always the same bytes."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.chat import open_template
from gridformer.data.prepare import atomic_folder, reading
from gridformer.data.prepare.atomic_folder import documents_kept
from gridformer.data.prepare.corpus import FORGED, NO_ANSWER, prepare_chat, prepare_corpus
from gridformer.data.prepare.reading import TextSource
from gridformer.data.prepare.sources import open_sources
from gridformer.data.prepare.tasks import prepare_task
from gridformer.data.prepare.writer import PrepareProgress
from gridformer.data.side_texts import read_questions
from gridformer.utils.errors import UserError
from tests.support.chats import conversations, written
from tests.support.data import Stop, documents, labeled_source, pairs_source, sentences
from tests.support.marks import extra
from tests.support.tasks import words_tokenizer, write_mnli, write_race, write_squad

TOKENIZER = Tokenizer.train(sentences(200), 300)


Prepare = Callable[..., TokenFolder]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches small, and save the state after each."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 7)
    monkeypatch.setattr(atomic_folder, "SAVE_EVERY_S", 0.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def of_files(folder: Path) -> list[TextSource]:
    """Files of several formats, some of whose records are left out."""
    folder.mkdir(exist_ok=True)
    texts = sentences(120)
    for number in range(10):
        (folder / f"{number}.txt").write_text(texts[number])
    lines = [json.dumps({"text": text}) for text in texts[10:]]
    lines[3:3] = ['{"text": null}', '{"text": ""}']
    (folder / "more.jsonl").write_text("\n".join(lines))
    return open_sources([str(folder), str(folder / "more.jsonl")])


def of_tables(folder: Path) -> list[TextSource]:
    """The rows of a data set in two files, and a table with commas."""
    datasets = extra("datasets")
    folder.mkdir(exist_ok=True)
    rows = {"text": [*sentences(200), None], "n": list(range(201))}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "saved"), num_shards=2)
    (folder / "a.csv").write_text("text,n\n" + "".join(f'"a, {i}",{i}\n' for i in range(90)))
    (folder / "a.tsv").write_text("text\tn\n" + "".join(f"b, {i}\t{i}\n" for i in range(30)))
    (folder / "a.json").write_text(json.dumps([{"text": f"c {i}"} for i in range(30)]))
    return open_sources([str(folder / name) for name in ("saved", "a.csv", "a.tsv", "a.json")])


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


def of_texts(make: Callable[[Path], list[TextSource]], root: Path) -> Prepare:
    return partial(prepare_corpus, make(root), tokenizer=TOKENIZER)


MAKE: dict[str, Callable[[Path], Prepare]] = {
    "files": partial(of_texts, of_files),
    "tables": partial(of_texts, of_tables),
    "pairs": partial(of_texts, lambda folder: [pairs_source(60)]),
    "labels": partial(of_texts, lambda folder: [labeled_source(80)]),
    "chat": of_chats,
    "mnli": partial(of_task, "mnli", write_mnli),
    "squad": partial(of_task, "squad", write_squad),
    "race": partial(of_task, "race", write_race),
}


def stop_after(documents: int) -> Callable[[PrepareProgress], None]:
    def stop(now: PrepareProgress) -> None:
        if now.documents > documents:
            raise Stop

    return stop


def stopped(prepare: Prepare, out: Path, documents: int = 40) -> int:
    """Stop a preparation after some documents, and return how many are kept."""
    with pytest.raises(Stop):
        prepare(out=out, on_progress=stop_after(documents))
    return documents_kept(out)


def done(prepare: Prepare, out: Path) -> PrepareProgress:
    """Run a preparation to its end, and return what it says of its first batch."""
    seen: list[PrepareProgress] = []
    prepare(out=out, on_progress=seen.append)
    return seen[0]


def same_as_whole(prepare: Prepare, out: Path) -> None:
    """Compare a folder with that of a preparation that is not stopped."""
    prepare(out=out.with_name("whole"))
    assert contents(out) == contents(out.with_name("whole"))


@pytest.mark.parametrize("kind", MAKE)
def test_stopped_again_and_again(tmp_path: Path, kind: str) -> None:
    prepare = MAKE[kind](tmp_path / "in")
    seen: list[int] = []

    def stop(now: PrepareProgress) -> None:
        if now.phase == "tokenizing":
            seen.append(now.documents)
            assert now.kept == before
        if len(seen) == 3:
            raise Stop

    for _ in range(100):
        before = documents_kept(tmp_path / "t")
        seen.clear()
        try:
            folder = prepare(out=tmp_path / "t", on_progress=stop)
            break
        except Stop:
            # Two batches of at most 7 documents or pairs were written, and nothing again.
            most = 7 * (2 if kind == "pairs" else 1)
            assert before < documents_kept(tmp_path / "t") <= before + 2 * most
            assert seen[0] - before <= most
    assert before  # it was stopped
    if kind == "chat":
        assert folder.index.skipped == {NO_ANSWER: 1, FORGED: 1}
    same_as_whole(prepare, tmp_path / "t")
    assert not list(tmp_path.glob(".*"))


def test_a_trained_tokenizer_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = partial(prepare_corpus, of_files(tmp_path / "in"), vocab_size=300)
    prepare(out=tmp_path / "whole")
    stopped(prepare, tmp_path / "t")
    monkeypatch.setattr(Tokenizer, "train", None)
    prepare(out=tmp_path / "t")
    assert contents(tmp_path / "t") == contents(tmp_path / "whole")


def another_file(folder: Path) -> None:
    (folder / "in" / "3.txt").write_text("something else")


def damage(folder: Path) -> None:
    (folder / ".writing-t" / "train.lengths").unlink()


@pytest.mark.parametrize(
    "change",
    [
        *({"seed": 5}, {"val_fraction": 0.3}, {"ends": False}),
        {"tokenizer": Tokenizer.train(sentences(100), 290)},
        *(another_file, damage),
    ],
)
def test_what_begins_anew(tmp_path: Path, change: Any) -> None:
    prepare = MAKE["files"](tmp_path / "in")
    assert stopped(prepare, tmp_path / "t") > 30
    if callable(change):
        change(tmp_path)
    else:
        prepare = partial(prepare, **change)
    assert done(prepare, tmp_path / "t").documents <= 7
    same_as_whole(prepare, tmp_path / "t")


def test_another_file_of_a_task_begins_anew(tmp_path: Path) -> None:
    prepare = of_task("squad", write_squad, tmp_path / "in")
    assert stopped(prepare, tmp_path / "t", 55) == 49, "among the validation questions"
    file = tmp_path / "in" / "train-v2.0.json"
    file.write_text(file.read_text().replace("which words?", "whose words?"))
    assert done(prepare, tmp_path / "t").documents == 7
    folder = TokenFolder.open(tmp_path / "t")
    assert len(read_questions(folder.path, "val")) == folder.val.n_documents
    same_as_whole(prepare, tmp_path / "t")


def test_another_token_that_begins_documents_begins_anew(tmp_path: Path) -> None:
    """`--format` adds no such token, but the folder's tokenizer has it for the texts of a model."""
    prepare = of_task("mnli", write_mnli, tmp_path / "in")
    words_tokenizer().save(tmp_path / "tokenizer.json")
    other = Tokenizer.load(tmp_path / "tokenizer.json", bos_token="<|endoftext|>")
    assert stopped(partial(prepare, tokenizer=other), tmp_path / "t", 20) > 10
    prepare(out=tmp_path / "t")
    same_as_whole(prepare, tmp_path / "t")


def rows_saying(word: str) -> list[dict[str, str]]:
    """Rows whose number of bytes does not depend on a word of three letters."""
    return [{"text": f"{word} {i:03}"} for i in range(80)]


def write_rows(file: Path, word: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_saying(word)))


Patch = pytest.MonkeyPatch


def split_of_saved(folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    datasets = extra("datasets")
    if not folder.exists():
        tables = {name: datasets.Dataset.from_list(rows_saying(name)) for name in ("old", "new")}
        datasets.DatasetDict(tables).save_to_disk(folder)
    return open_sources([str(folder)], split=word)


def saved(folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    shutil.rmtree(folder, ignore_errors=True)
    extra("datasets").Dataset.from_list(rows_saying(word)).save_to_disk(folder)
    return open_sources([str(folder)])


def split_of_named(folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    extra("datasets")
    splits = {"old": "train", "new": "test"}
    for said, split in splits.items():
        if word == "old":
            write_rows(folder / f"{split}.jsonl", said)
    return open_sources([f"hf:{folder}"], split=splits[word])


def named(folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    extra("datasets")
    write_rows(folder / "train.jsonl", word)
    return open_sources([f"hf:{folder}"])


def on_the_hub(folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    """A fake hub, which has one data set with one commit."""
    datasets = extra("datasets")
    table = datasets.Dataset.from_list(rows_saying(word)).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda api, name, timeout: SimpleNamespace(sha=f"commit of {name} that says {word}"),
    )
    return open_sources(["hf:owner/set"])


def pair_files(suffix: str, folder: Path, word: str, monkeypatch: Patch) -> list[TextSource]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"x.{language}{suffix}" for language in ("en", "de")]
    for path in paths:
        text = "".join(row["text"] + "\n" for row in rows_saying(word)).encode()
        path.write_bytes(gzip.compress(text) if suffix else text)
    return open_sources([*map(str, paths)], pair_files=True)


@pytest.mark.parametrize(
    "make",
    [
        *(split_of_saved, saved, split_of_named, named, on_the_hub),
        *(partial(pair_files, ""), partial(pair_files, ".gz")),
    ],
)
def test_other_documents_of_the_same_name_begin_anew(
    tmp_path: Path, make: Callable[[Path, str, Patch], list[TextSource]], monkeypatch: Patch
) -> None:
    """Another split, or files that were replaced by others of the same size."""
    old, new = (
        lambda word=word, **more: prepare_corpus(
            make(tmp_path / "in", word, monkeypatch), tokenizer=TOKENIZER, **more
        )
        for word in ("old", "new")
    )
    assert stopped(old, tmp_path / "t") > 20
    assert done(new, tmp_path / "t").kept == 0
    folder = TokenFolder.open(tmp_path / "t")
    texts = [text for split in documents(folder).values() for text in split]
    assert {text[:4] for text in texts} == {"new "}
    assert len(texts) == (160 if folder.kind == "pairs" else 80)


@pytest.mark.parametrize("make", [saved, named, on_the_hub])
def test_the_same_documents_opened_again_go_on(
    tmp_path: Path, make: Callable[[Path, str, Patch], list[TextSource]], monkeypatch: Patch
) -> None:
    """Also if another program has left a file in the cache of `datasets`, or a hidden one."""
    specs = [make(tmp_path / "in", "old", monkeypatch)[0].name]

    def prepare(**more: Any) -> TokenFolder:
        return prepare_corpus(open_sources(specs), tokenizer=TOKENIZER, **more)

    kept = stopped(prepare, tmp_path / "t")
    if (tmp_path / "in").exists():
        for name in ("cache-0123.arrow", ".hidden"):
            (tmp_path / "in" / name).write_text("of another program")
    assert done(prepare, tmp_path / "t").kept == kept > 30


def test_two_at_a_time(tmp_path: Path) -> None:
    """The second one writes a folder of its own, and the one that ends later fails in words."""
    prepare = MAKE["files"](tmp_path / "in")
    begun = False

    def other(now: PrepareProgress) -> None:
        nonlocal begun
        if not begun:
            begun = True
            prepare(out=tmp_path / "t")

    with pytest.raises(UserError, match="already is a token folder"):
        prepare(out=tmp_path / "t", on_progress=other)
    TokenFolder.open(tmp_path / "t").check()


SCRIPT = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from gridformer.data import Tokenizer
    from gridformer.data.prepare import atomic_folder, reading
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources

    if __name__ == "__main__":
        reading.BATCH_ITEMS, atomic_folder.SAVE_EVERY_S = 7, 0.0
        folder, out, tokenizer, workers, most = sys.argv[1:]

        def kill(now):
            if now.documents > int(most):
                os.kill(os.getpid(), signal.SIGKILL)

        sources = open_sources([folder, folder + "/more.jsonl"])
        given = Tokenizer.load(tokenizer)
        prepare_corpus(sources, out, tokenizer=given, workers=int(workers), on_progress=kill)
""")


def run_script(tmp_path: Path, out: str, workers: int, most: int) -> int:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    words: Sequence[object] = (
        *(sys.executable, script, tmp_path / "in", tmp_path / out),
        *(tmp_path / "tokenizer.json", workers, most),
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["SCRIPT_OF"] = str(tmp_path)  # by which its processes are found
    return subprocess.run(list(map(str, words)), env=environment, check=False).returncode


@pytest.mark.parametrize("kind", ["files", "chat"])
def test_workers_write_the_same_bytes(tmp_path: Path, kind: str) -> None:
    prepare = MAKE[kind](tmp_path / "in")
    for workers in (1, 3):
        prepare(out=tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.full
def test_killed_with_workers(tmp_path: Path) -> None:
    prepare = MAKE["files"](tmp_path / "in")
    assert run_script(tmp_path, "t", 3, 60) == -signal.SIGKILL
    assert 40 < documents_kept(tmp_path / "t") <= 70
    assert run_script(tmp_path, "t", 2, 10**9) == 0
    given = Tokenizer.load(tmp_path / "tokenizer.json")
    same_as_whole(partial(prepare, tokenizer=given), tmp_path / "t")
    # The workers of the killed process have ended by themselves.
    deadline = time.monotonic() + 120
    while (left := _processes_with(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _processes_with(text: str) -> list[str]:
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SCRIPT_OF={text}" in path.read_bytes().decode(errors="replace"):
                processes.append(path.parent.name)
    return [process for process in processes if process != str(os.getpid())]
