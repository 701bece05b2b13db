"""Runs are resolved against folders, and messages say why a run does not suit a folder."""

import re
from pathlib import Path
from typing import Any

import pytest

from gridformer.data import RunData, TokenFolder, resolve, special_ids
from gridformer.data.resolve import check_set
from gridformer.data.samples.masked import target_length
from gridformer.utils.errors import ConfigError
from tests.support.data import a_run
from tests.support.tasks import examples


def test_what_the_folder_decides(text_folder: TokenFolder, pairs_folder: TokenFolder) -> None:
    gpt2 = resolve(a_run(text_folder), text_folder)
    assert (gpt2.model.vocab_size, gpt2.data.task) == (300, "causal")
    assert (gpt2.data.seq_len, gpt2.data.source_len) == (32, 0)
    bert = resolve(a_run(text_folder, "bert"), text_folder)
    assert (bert.model.vocab_size, bert.data.task, bert.data.seq_len) == (304, "masked", 32)
    t5 = resolve(a_run(text_folder, "t5"), text_folder)
    assert (t5.model.vocab_size, t5.data.task) == (401, "spans")
    assert (t5.data.seq_len, t5.data.source_len) == (target_length(32), 32)
    transformer = resolve(a_run(pairs_folder, "transformer", data__seq_len=30), pairs_folder)
    assert (transformer.model.vocab_size, transformer.data.task) == (301, "pairs")
    assert (transformer.data.seq_len, transformer.data.source_len) == (30, 32)


def test_resolving_again_changes_nothing(text_folder: TokenFolder) -> None:
    for family in ("gpt2", "bert", "t5"):
        once = resolve(a_run(text_folder, family), text_folder)
        assert resolve(once, text_folder) == once


def test_long_sources_get_more_sentinels(text_folder: TokenFolder) -> None:
    run = a_run(text_folder, "t5", model__max_seq_len=2400)
    # A window of 2666 tokens has 400 noise tokens in 133 spans.
    assert special_ids(run, text_folder.tokenizer).vocab_size == 301 + 133


PROBLEMS: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("text", "bert", {"model__vocab_size": 300},
        ["300 words of .* and the 4 special ones of data.task=masked: use model.vocab_size=304"]),
    ("text", "gpt2", {"model__vocab_size": 299}, ["the 300 words of [^ ]*: use"]),
    ("text", "transformer", {}, [r"`gridformer prepare gettext:de --out FOLDER`[^\n]*keys$"]),
    ("text", "t5", {"data__task": "pairs"}, ["or use data.task=spans"]),
    ("pairs", "t5", {}, ["small to LARGE.* needs running text: use data.task=pairs$"]),
    ("pairs", "gpt2", {}, ["use a model of family t5 or transformer"]),
    ("text", "gpt2", {"model__n_labels": 2},
        ["has no labels; write them with `gridformer prepare SOURCE --label-key KEY`"]),
    ("labeled", "bert", {"model__n_labels": 2},
        ["less than the 10 labels.*use model.n_labels=10", "use model.sentence_pair=false"]),
    ("text", "bert", {"data__seq_len": 4}, ["data.seq_len=4 .* use 5 or more"]),
    ("text", "bert", {"data__seq_len": 3, "model__sentence_pair": False}, ["use 4 or more"]),
    ("text", "t5", {"data__source_len": 2}, ["data.source_len=2 .* use 3 or more"]),
    ("text", "t5", {"data__seq_len": 6}, ["data.seq_len=6 .* use 8 or more, or 0"]),
    ("pairs", "transformer", {"data__seq_len": 1, "data__source_len": 1},
        ["data.source_len=1 does not hold", "data.seq_len=1 does not hold"]),
    ("pairs", "transformer", {"data__seq_len": 3},
        [r"train.bin: none of its", r"val.bin: none of its"]),
    ("text", "gpt2", {"model__max_seq_len": 10**6, "model__vocab_size": 5},
        ["model.vocab_size=5"]),
    ("text", "gpt2", {"model__max_seq_len": 10**6},
        [r"train.bin: .*hold no sample of data.seq_len=1000000", r"val.bin: .* hold no sample"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "family", "values", "said"), PROBLEMS)
def test_problems_are_said_before_the_run(
    request: pytest.FixtureRequest, kind: str, family: str, values: dict[str, Any], said: list[str]
) -> None:
    folder: TokenFolder = request.getfixturevalue(f"{kind}_folder")
    with pytest.raises(ConfigError) as error:
        resolve(a_run(folder, family, **values), folder)
    for one in said:
        assert re.search(one, str(error.value), re.MULTILINE)
    assert len(error.value.problems) == len(said)


def test_labels_may_be_fewer_and_need_not_be_used(labeled_folder: TokenFolder) -> None:
    run = a_run(labeled_folder, "gpt2", model__n_labels=12)
    assert resolve(run, labeled_folder).model.n_labels == 12
    assert resolve(a_run(labeled_folder, "bert"), labeled_folder).data.task == "masked"


def test_answers_are_scored_only_with_the_questions_as_text(tmp_path: Path) -> None:
    """Folders of earlier versions have those of the validation split only."""
    folder = examples("squad2", tmp_path)
    seen = {"name": "seen", "path": folder.path, "split": "train"}
    run = a_run(folder, "bert", data__task="answer", data__validation=[seen])
    assert resolve(run, RunData.open(run.data)).task == "answer"
    asked = folder.path / "train.questions.jsonl"
    asked.unlink()
    told = re.escape(
        f"{asked}: is missing, with the right answers of the set: write the folder again with "
        f"`gridformer prepare FOLDER --format squad --out {folder.path} --overwrite`"
    )
    with pytest.raises(ConfigError, match=told):
        resolve(run, RunData.open(run.data))
    tested = a_run(folder, "bert", data__task="answer", data__test=[seen])
    with pytest.raises(ConfigError, match=told):
        resolve(tested, RunData.open(tested.data))
    plain = resolve(a_run(folder, "bert", data__task="answer"), folder)
    one_set = RunData.open_set(plain.data, run.data.validation_sets[0])
    with pytest.raises(ConfigError, match=told):
        check_set(plain, "--set seen", one_set)
