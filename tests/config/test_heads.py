"""The heads that a task of fine-tuning gives a model, and epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridformer.config import RunConfig, parse_run
from gridformer.data import resolve
from gridformer.utils.errors import ConfigError
from tests.support.tasks import examples

BERT = {"family": "bert", "n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 32}


def run_of(task: str, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return parse_run(
        {"model": BERT | (model or {}), "data": {"path": ".", "task": task}, "train": train}
    )


def test_tasks_choose_heads() -> None:
    for task, n_labels, spans in (
        ("classify", 3, False),
        ("choice", 1, False),
        ("regression", 1, False),
        ("answer", 0, True),
    ):
        model = run_of(task, {"n_labels": 3} if task == "classify" else {}).model
        assert (model.token_head, model.sentence_pair) == (False, False)
        assert (model.n_labels, model.span_head) == (n_labels, spans)
    again = parse_run(run_of("answer").model_dump(mode="json"))
    assert again == run_of("answer")
    gpt2 = run_of("classify", {"family": "gpt2", "n_labels": 2}).model
    assert (gpt2.token_head, gpt2.pooled_labels) == (False, False)
    assert gpt2.model_copy(update={"token_head": True}).pooled_labels


def test_both_stacks_of_t5_read_the_same_tokens() -> None:
    model = {"family": "t5", "n_labels": 2}
    run = run_of("classify", model)
    assert (run.source_len, run.seq_len) == (32, 32)
    values = {"model": BERT | model, "data": {"path": ".", "task": "classify", "source_len": 16}}
    with pytest.raises(ConfigError, match=r"read the same 32 tokens; use data\.source_len=0"):
        parse_run(values)
    assert parse_run(values, ["data.seq_len=16"]).source_len == 16


def test_epochs_and_warm_up_become_steps(tmp_path: Path) -> None:
    """60 pairs in batches of 8: 15 steps for 2 epochs, of which a fifth warms up."""
    folder = examples("mnli", tmp_path)
    run = run_of("classify", {"n_labels": 3}, epochs=2, warmup_fraction=0.2, global_batch=8)
    run = run.model_copy(update={"data": run.data.model_copy(update={"path": folder.path})})
    train = resolve(run, folder).train
    assert (train.steps, train.warmup_steps) == (15, 3)
    assert resolve(resolve(run, folder), folder) == resolve(run, folder)


def test_folders_of_other_examples(tmp_path: Path) -> None:
    folder = examples("race", tmp_path)
    for task, told in (
        ("classify", "contains no examples for data.task=classify.*--format mnli.*task=choice"),
        ("masked", "contains examples for fine-tuning.*use data.task=choice"),
    ):
        run = run_of(task, {"n_labels": 3} if task == "classify" else {})
        with pytest.raises(ConfigError, match=told):
            resolve(run, folder)
    run = parse_run({"model": BERT, "data": {"path": ".", "task": "choice", "n_choices": 3}})
    with pytest.raises(ConfigError, match=r"use data\.n_choices=4"):
        resolve(run, folder)
