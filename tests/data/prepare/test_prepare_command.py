"""`gridformer prepare` as a user types it."""

import itertools
import json
import shlex
from pathlib import Path

import pytest
import tokenizers
import typer
from tokenizers import models, pre_tokenizers
from typer.testing import CliRunner

from gridformer.cli.prepare import prepare
from gridformer.cli.prepare_output import Bar
from gridformer.data import TokenFolder
from gridformer.data.prepare import atomic_folder, reading
from gridformer.data.prepare.atomic_folder import documents_kept
from gridformer.data.prepare.writer import PrepareProgress
from gridformer.utils.errors import DataError, UserError
from tests.support.commands import gridformer_here
from tests.support.data import documents, sentences
from tests.support.foreign import megatron_bytes

APP = typer.Typer()
APP.command("prepare")(prepare)
APP.command("other")(lambda: None)  # makes `prepare` a subcommand here too


def run(*arguments: str | Path) -> str:
    """Return the command's output; its errors are raised."""
    words = ["prepare", *map(str, arguments)]
    result = CliRunner().invoke(APP, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(sentences(40)):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "binary.txt").write_bytes(b"\0\1")
    return folder


def test_a_refusal_off_a_terminal_is_one_line(tmp_path: Path) -> None:
    done = gridformer_here("prepare", str(tmp_path / "gone"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_text_that_is_not_utf8_is_told(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for a path that fits into one line
    (corpus / "old.txt").write_bytes("Käse".encode("latin-1"))
    output = run("corpus", "--out", "tokens", "--vocab-size", "280")
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "left out 1 files with NUL bytes" in rows, "the text is not left out"
    table = " ".join(rows)
    told = "damaged 1 documents with bytes that are not UTF-8 text (first: corpus/old.txt)"
    assert told in table


def test_few_documents_for_validation_are_told_with_a_fraction_that_works(
    corpus: Path, tmp_path: Path
) -> None:
    told = run(corpus, "--out", tmp_path / "few", "--vocab-size", "280")
    few = TokenFolder.open(tmp_path / "few").index.val
    (line,) = (line for line in told.splitlines() if "--val-fraction" in line)
    assert f"here {few.documents} of 40 with {few.tokens:,} tokens" in line
    options = line.partition(": ")[2].partition(" holds out ")
    again = run(corpus, "--out", tmp_path / "few", "--vocab-size", "280", *options[0].split())
    assert "--val-fraction" not in again
    more = TokenFolder.open(tmp_path / "few").index.val.documents
    assert options[2] == f"{more}."
    assert more >= 5 > few.documents


def test_summary(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "[tokens]"
    output = run(corpus, "--out", out, "--vocab-size", "280", "--val-fraction", "0.2")
    folder = TokenFolder.open(out)
    index = folder.index
    assert f"{index.train.documents} train, {index.val.documents} val" in output
    assert f"{index.train.tokens:,} train, {index.val.tokens:,} val" in output
    assert "280 (byte-level BPE" in output
    assert "1 files with NUL bytes" in output
    assert "damaged" not in output
    command = output.rstrip().splitlines()[-1].removeprefix("next: ")
    words = ["gridformer", "train", "demo", f"data.path={out}", "--out", "runs/[tokens]"]
    assert shlex.split(command) == words, "brackets are quoted"
    assert index.train.documents + index.val.documents == 40


def test_it_says_that_it_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop it says how much is kept, and the next time from where it goes on."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 5)
    monkeypatch.setattr(atomic_folder, "SAVE_EVERY_S", 0.0)
    out = tmp_path / "tokens"
    command = ["prepare", str(corpus), "--out", str(out), "--vocab-size", "280"]

    def stop(bar: Bar, now: PrepareProgress) -> None:
        if now.documents > 20:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "show", stop)
        stopped = CliRunner().invoke(APP, command)
    kept = documents_kept(out)
    assert kept > 10
    assert f"done: {kept} documents; the same command goes on from there" in stopped.output
    assert not out.exists()
    output = run(*command[1:])
    assert output.count("going on after") == 1
    assert f"going on after {kept} documents" in output
    assert "going on" not in run(*command[1:], "--overwrite")


def test_options_arrive(corpus: Path, tmp_path: Path) -> None:
    (corpus / "a.jsonl").write_text('{"body": "from json"}\n{"body": "again"}\n')
    run(corpus / "*.txt", "--out", tmp_path / "a", "--vocab-size", "290", "--seed", "7")
    options = ("--suffix", ".jsonl", "--text-key", "body", "--tokenizer", tmp_path / "a")
    run(corpus, "--out", tmp_path / "b", *options)
    a, b = TokenFolder.open(tmp_path / "a"), TokenFolder.open(tmp_path / "b")
    assert (a.index.seed, b.index.seed) == (7, 1234)
    assert b.vocab_size == 290
    assert b.index.tokenizer.origin == str(tmp_path / "a")
    got = documents(b)
    assert sorted(got["train"] + got["val"]) == ["again", "from json"]
    run(corpus / "*.txt", "--out", tmp_path / "b", "--overwrite", "--tokenizer-sample-mb", "0.001")
    assert TokenFolder.open(tmp_path / "b").index.sources[0].documents == 40


def test_pairs_out_of_records(tmp_path: Path) -> None:
    records = [{"en": f"word number {i}", "de": f"Wort Nummer {i}"} for i in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    output = run(tmp_path / "p.jsonl", "--out", tmp_path / "t", "--pair-keys", "en, de")
    folder = TokenFolder.open(tmp_path / "t")
    assert folder.kind == "pairs"
    pairs = folder.index.train.documents // 2
    assert f"{pairs} train, {40 - pairs} val" in output
    assert "en to de" in output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("next: gridformer train translate ")
    assert last.endswith("--out runs/t")
    assert "data.source_len=8 data.seq_len=8" in last.replace("16", "8")
    for wrong in ("en", "en,de,fr", "en,", "en,en"):
        with pytest.raises(UserError, match="--pair-keys en,de"):
            run(tmp_path / "p.jsonl", "--out", tmp_path / "u", "--pair-keys", wrong)


def test_catalogs(tmp_path: Path) -> None:
    (tmp_path / "de.po").write_text('msgid "too short"\nmsgstr "zu kurz"\n')
    with pytest.raises(DataError, match=r"left out: 1 messages of less than 4 words"):
        run(f"gettext:de:{tmp_path}", "--out", tmp_path / "t")
    messages = [
        f'msgid "this is message number {n}"\nmsgstr "dies ist Nachricht {n}"' for n in range(30)
    ]
    (tmp_path / "de.po").write_text("\n\n".join(messages))
    output = run(f"gettext:de:{tmp_path}", "--out", tmp_path / "t")
    assert "0 train" not in output.splitlines()[0]
    assert "catalogs" in output
    assert "not stated, GPL for the most part (30)" in output.replace("\n", " ").replace("  ", "")


def test_labels(tmp_path: Path) -> None:
    for label in ("bad", "good"):
        (tmp_path / "in" / label).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "in" / label / f"{number}.txt").write_text(f"{label} {number}")
    output = run(tmp_path / "in", "--out", tmp_path / "t", "--labels-from-folders")
    assert "2: bad, good" in output
    assert output.rstrip().endswith(f"data.path={tmp_path / 't'} model.n_labels=2 --out runs/t")
    records = [{"text": f"text {i}", "kind": i % 3} for i in range(30)]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    output = run(tmp_path / "l.jsonl", "--out", tmp_path / "u", "--label-key", "kind")
    assert "3: 0, 1, 2" in output


LETTERS = ("a b c", "b", "a a", "c b a b c", "c", "c c c c")  # different ones


def words_tokenizer(folder: Path, size: int) -> Path:
    """Write a tokenizer whose words are a, b, ... with the ids 0, 1, ...; others are w6, w7, ..."""
    words = [*"abcd", "<d>", "</d>", "<|endoftext|>", *(f"w{i}" for i in range(7, size))]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def written(folder: Path) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    one, other = (
        ((folder / f"{split}.bin").read_bytes(), (folder / f"{split}.idx").read_bytes())
        for split in ("train", "val")
    )
    return one, other


@pytest.mark.parametrize(
    ("options", "size", "code", "begin", "end"),
    [
        ((), 7, 8, [], [6]),
        (("--eos", "</d>"), 7, 8, [], [5]),
        (("--eos", "</d>", "--bos", "<d>"), 7, 8, [4], [5]),
        (("--bos", "<d>"), 7, 8, [4], [6]),
        (("--eos", "none"), 7, 8, [], []),
        (("--eos", "none", "--bos", "<d>"), 70_000, 4, [4], []),
    ],
)
def test_the_bytes_are_those_of_the_format(
    tmp_path: Path, options: tuple[str, ...], size: int, code: int, begin: list[int], end: list[int]
) -> None:
    """Each document is one sequence of uint16 (code 8), or of int32 (4) for many words."""
    (tmp_path / "in").mkdir()
    for number, text in enumerate(LETTERS):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    tokenizer = words_tokenizer(tmp_path, size)
    output = run(
        tmp_path / "in", "--out", tmp_path / "t", "--tokenizer", tokenizer, "--val-fraction", "0.4",
        *options,
    )  # fmt: skip
    assert "next: gridformer train" in output
    tokens = [[[*begin, *("abc".index(word) for word in text.split()), *end]] for text in LETTERS]
    found = []
    # Which documents are for validation is a matter of the seed; they keep their order.
    for held_out in itertools.product((False, True), repeat=len(tokens)):
        train, val = (
            [one for one, is_val in zip(tokens, held_out) if is_val == wanted]
            for wanted in (False, True)
        )
        if written(tmp_path / "t") == (megatron_bytes(train, code), megatron_bytes(val, code)):
            found.append(held_out)
    assert len(found) == 1
    assert 0 < sum(found[0]) < len(tokens)
    again = TokenFolder.open(tmp_path / "t").tokenizer
    assert again.begin_ids == begin
    assert again.eos_id == (end or [6])[0], "generation ends there"


def test_options_of_tokenizers_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b c")
    tokenizer = words_tokenizer(tmp_path, 7)
    there = (tmp_path / "a.txt", "--out", tmp_path / "t")
    given = (*there, "--tokenizer", tokenizer)
    says = "says what begins and ends a document, so omit"
    for option in ("--eos", "--bos"):
        for words, said in (
            ((*there, option, "</d>"), "--eos and --bos name tokens of a given tokenizer: add"),
            ((*given, option, "</e>"), f"the tokenizer has no token '</e>': use {option} with"),
            ((*given, option, "</d>", "--chat", "chatml"), f"--chat {says}"),
            ((*given, option, "</d>", "--format", "mnli"), f"--format {says}"),
        ):
            with pytest.raises(UserError, match=said):
                run(*words)
    for option in ("--vocab-size", "--tokenizer-sample-mb"):
        with pytest.raises(UserError, match=f"--tokenizer names a tokenizer, and {option} would"):
            run(*given, option, "280")
    assert not (tmp_path / "t").exists()


def test_bytes_per_token_count_the_tokens_of_text(tmp_path: Path) -> None:
    """A begin-of-text token and an end-of-text token are no text, and either may be missing."""
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text("a b c")
    given = ("--tokenizer", words_tokenizer(tmp_path, 7), "--val-fraction", "0.5")
    for number, options in enumerate(((), ("--eos", "none"), ("--bos", "<d>"))):
        output = run(tmp_path / "texts", "--out", tmp_path / f"t{number}", *given, *options)
        assert "bytes per token  1.67 " in output, options  # 5 bytes, 3 words
