"""Data sets for fine-tuning are read as they are distributed; folders of examples are written."""

import json
import shlex
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gridformer.cli.prepare_output import next_command
from gridformer.data.prepare import tasks
from gridformer.data.side_texts import read_questions
from gridformer.launch.plan import check_run
from gridformer.utils.errors import DataError
from tests.support.tasks import (
    examples,
    words_tokenizer,
    write_mnli,
    write_qqp,
    write_race,
    write_squad,
    write_sts_b,
)


def test_rows_of_glue(tmp_path: Path) -> None:
    """Columns go by their names; rows without a known label or with fewer columns are left out."""
    file = tmp_path / "dev.tsv"
    skipped: Counter[str] = Counter()
    file.write_bytes(
        b"\xef\xbb\xbfid\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\r\n"
        b'0\t1\t2\tHow \xc2\x85 old?\tWhat "age"?\t1\r\n'
        b"1\t3\t4\tonly one\r\n"
        b"2\t5\t6\tA\tB\t0\n"
    )
    found = [*tasks.read_glue(tasks.GLUE["qqp"], file, skipped)]
    assert found == [
        tasks.Example(("How \x85 old?", 'What "age"?'), "1"),
        tasks.Example(("A", "B"), "0"),
    ]
    assert skipped == {tasks.BAD_ROWS: 1}
    file.write_text("gj04\t1\t\tThey drank.\ngj04\t0\t*\tThem drank.\n", encoding="utf-8")
    assert [*tasks.read_glue(tasks.GLUE["cola"], file, skipped)] == [
        tasks.Example(("They drank.", ""), "1"),
        tasks.Example(("Them drank.", ""), "0"),
    ]


def test_files_that_are_not_of_a_data_set(tmp_path: Path) -> None:
    rte, sst_2 = (partial(tasks.read_glue, tasks.GLUE[name]) for name in ("rte", "sst-2"))
    read_folder: Any = lambda file, skipped: tasks.read_race(file.parent, skipped)  # noqa: E731
    rows: list[tuple[Any, str, str, str]] = [
        (rte, "a.tsv", "index\tsentence1\n", "sentence2"),
        (sst_2, "t.tsv", "sentence\tlabel\n", "no row"),
        (tasks.read_squad, "s.json", '{"version": "1.1"}', "KeyError: 'data'"),
        (tasks.read_squad, "u.json", "{", "u.json"),
        (read_folder, "r.txt", '{"article": "a"}', "questions"),
    ]
    for read, name, text, told in rows:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=told):
            [*read(tmp_path / name, Counter())]
    with pytest.raises(DataError, match=r"has no train\.tsv, which --format mnli reads"):
        tasks.prepare_task("mnli", tmp_path, tmp_path / "out", words_tokenizer())


def test_answers_that_are_not_at_their_place_are_left_out(tmp_path: Path) -> None:
    answers = [{"text": "sea", "answer_start": 4}, {"text": "sea", "answer_start": 8}]
    asked = [
        {"id": str(i), "question": "Where?", "answers": [one]} for i, one in enumerate(answers)
    ]
    raw = {"data": [{"paragraphs": [{"context": "The sea is far.", "qas": asked}]}]}
    file = tmp_path / "dev-v1.1.json"
    file.write_text(json.dumps(raw), encoding="utf-8")
    skipped: Counter[str] = Counter()
    assert [question.id for question, _ in tasks.read_squad(file, skipped)] == ["0"]
    assert skipped == {tasks.MISPLACED: 1}


def test_blanks_of_race_are_filled(tmp_path: Path) -> None:
    raw = {
        "article": "Text.",
        "questions": ["The _ is _ red.", "Who?"],
        "options": [["fox", "owl", "cat", "dog"], ["a", "b", "c", "d"]],
        "answers": ["C", "A"],
    }
    (tmp_path / "1.txt").write_text(json.dumps(raw), encoding="utf-8")
    first, second = tasks.read_race(tmp_path, Counter())
    assert first.texts[3] == "The cat is _ red."
    assert (first.values, second.texts[2], second.values) == ({"right": 2}, "Who? b", {"right": 0})


def test_a_folder_of_pairs_with_labels(tmp_path: Path) -> None:
    """The splits are those of the files, and the parts of a document are its two texts."""
    folder = examples("mnli", tmp_path)
    assert (folder.kind, folder.index.labels) == (
        "examples",
        ("contradiction", "entailment", "neutral"),
    )
    assert (folder.train.n_documents, folder.val.n_documents) == (60, 21)
    assert folder.index.skipped == {tasks.BAD_ROWS: 2}
    rows = (tmp_path / "mnli" / "dev_matched.tsv").read_text(encoding="utf-8").split("\n")
    for number in (0, 20):
        _, a, b, _, label = rows[1 + number].split("\t")
        ids = folder.val.document(number)[:-1]
        n_a, n_b = folder.val.columns["parts"][number]
        assert n_a + n_b == len(ids)
        decode = folder.tokenizer.decode
        assert (decode(ids[:n_a].tolist()), decode(ids[n_a:].tolist())) == (a, b)
        assert folder.index.labels[folder.val.columns["labels"][number]] == label
    other = tasks.prepare_task(
        "mnli-mismatched", write_mnli(tmp_path / "again"), tmp_path / "other", words_tokenizer()
    )
    assert other.val.n_documents == 10


def test_scores_of_pairs_are_numbers(tmp_path: Path) -> None:
    folder = examples("sts-b", tmp_path)
    assert (folder.index.labels, folder.index.skipped) == ((), {tasks.BAD_ROWS: 2})
    rows = (tmp_path / "sts-b" / "dev.tsv").read_text(encoding="utf-8").split("\n")
    assert folder.val.columns["value"][3] == float(rows[4].split("\t")[-1])
    (tmp_path / "sts-b" / "dev.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tnan\n")
    with pytest.raises(DataError, match="no row has texts and a number"):
        tasks.prepare_task("sts-b", tmp_path / "sts-b", tmp_path / "again", words_tokenizer())


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_tokens_of_answers_spell_the_answers(tmp_path: Path, version: str) -> None:
    path = write_squad(tmp_path / "squad", version)
    folder = tasks.prepare_task("squad", path, tmp_path / "out", words_tokenizer())
    for split, n in ((folder.train, 20), (folder.val, 9)):
        questions = read_questions(folder.path, split.name)
        assert len(questions) == split.n_documents == (n if version == "v1.1" else 2 * n)
        for number, question in enumerate(questions):
            n_question, n_context = split.columns["parts"][number]
            low, high = split.columns["answer"][number]
            context = split.document(number)[n_question:-1]
            assert len(context) == n_context
            if not question.answers:
                assert (low, high) == (-1, -1)
                continue
            said = folder.tokenizer.decode(context[low : high + 1].tolist())
            assert said.strip() == question.answers[0]
    again = tasks.prepare_task("squad", path, tmp_path / "out", words_tokenizer(), overwrite=True)
    assert again.val.n_documents == folder.val.n_documents


FORMATS = {
    "mnli": (write_mnli, "mnli"),
    "qqp": (write_qqp, "qqp"),
    "sts-b": (write_sts_b, "sts-b"),
    "squad": (write_squad, "squad2"),
    "race": (write_race, "race"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_command_that_comes_next_reads_what_was_written(tmp_path: Path, name: str) -> None:
    write, shipped = FORMATS[name]
    out = tmp_path / "my data"
    folder = tasks.prepare_task(name, write(tmp_path / "from"), out, words_tokenizer())
    program, train, run, *words = shlex.split(next_command(folder, out))
    assert (program, train, run) == ("gridformer", "train", shipped)
    settings = words[: words.index("--out")]
    # Pretrained weights, which are not here, say how large the model is.
    checked = check_run(run, [*settings, "train.init_from=", "model.vocab_size=0"])
    assert checked.data.path == out
    assert not checked.data.validation
