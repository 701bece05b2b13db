"""Completes a run's config from its token folders, and checks that they fit together."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable
from functools import partial

from pydantic import ValidationError

from gridformer.config import FINE_TUNING, RunConfig, Task, TrainConfig
from gridformer.config.data import TASKS
from gridformer.data.run_data import RunData
from gridformer.data.samples.batches import open_samples, special_ids
from gridformer.data.samples.examples import ANSWER, RIGHT, VALUE
from gridformer.data.samples.masked import SHORTEST_SOURCE, target_length
from gridformer.data.side_texts import without_questions
from gridformer.data.tokenfolder import TokenFolder
from gridformer.data.tokensplit import LABELS
from gridformer.utils.errors import ConfigError, DataError

# The column of the examples of each task of fine-tuning, and what `prepare --format` reads.
_EXAMPLES: dict[Task, tuple[str, str]] = {
    "classify": (LABELS, "mnli, or from your own records with --label-key"),
    "regression": (VALUE, "sts-b"),
    "choice": (RIGHT, "race"),
    "answer": (ANSWER, "squad"),
}


def resolve(run: RunConfig, data: RunData | TokenFolder) -> RunConfig:
    """Returns the run with its vocabulary size, task and lengths filled in.

    The vocabulary consists of the folders' and of the special ids that the task adds.

    Raises:
        ConfigError: The run and the folders do not fit together. It lists all problems at once.
    """
    if isinstance(data, TokenFolder):
        data = RunData.of(data)
    if problems := _problems_of(folder.check for folder in data.folders.values()):
        raise ConfigError(*problems)
    first = data.first
    for key, folder in data.folders.items():
        problems += _folder_problems(run, key, folder)
    model = run.model
    if model.n_labels and model.family == "bert" and model.sentence_pair:
        problems.append(
            f"model.n_labels={model.n_labels}: labeled documents have no sentence B, which "
            f"model.sentence_pair=true needs; use model.sentence_pair=false"
        )
    problems += _unequal(run, data)
    needed = first.vocab_size
    if run.task != "causal" or run.model.n_labels:
        needed = special_ids(run, first.tokenizer).vocab_size
    vocab_size = run.model.vocab_size or needed
    if vocab_size < needed:
        special = needed - first.vocab_size
        added = f" and the {special} special ones of data.task={run.task}" if special else ""
        problems.append(
            f"model.vocab_size={vocab_size} is smaller than the {first.vocab_size} words of "
            f"{first.path}{added}: use model.vocab_size={needed}, or 0 for the data's"
        )
    too_short = _length_problems(run)
    problems += too_short
    seq_len = run.seq_len
    if run.task == "spans" and not run.data.seq_len and not too_short:
        seq_len = target_length(run.source_len)
    values = {"task": run.task, "seq_len": seq_len, "source_len": run.source_len}
    model = run.model.model_copy(update={"vocab_size": vocab_size})
    resolved = run.model_copy(update={"model": model, "data": run.data.model_copy(update=values)})
    if not problems:
        trained = [folder.train for folder in data.sources.values()]
        splits = (*trained, *data.validation.values(), *data.test.values())
        problems = _problems_of(
            partial(open_samples, resolved, split, first.tokenizer) for split in splits
        )
        problems += _unscored(resolved, data)
    if problems:
        raise ConfigError(*problems)
    return _with_steps(resolved, data)


def check_set(run: RunConfig, key: str, data: RunData) -> None:
    """Checks that a set which `RunData.open_set` has opened fits a resolved run."""
    data.first.check()
    problems = _folder_problems(run, key, data.first)
    if not problems:
        for split in data.validation.values():
            open_samples(run, split, data.first.tokenizer)
        problems += _unscored(run, data)
    if problems:
        raise ConfigError(*problems)


def _with_steps(run: RunConfig, data: RunData) -> RunConfig:
    """Returns the run with the steps of its epochs and of its warm-up filled in."""
    train = run.train
    if not train.epochs and not train.warmup_fraction:
        return run
    if train.epochs and run.data.sources:
        said = f"train.epochs={train.epochs:g}: a mixture of data.sources has no epochs"
        raise ConfigError(f"{said}; use train.steps with train.epochs=0")
    steps, warmup = train.steps, train.warmup_steps
    if train.epochs:
        n = open_samples(run, data.first.train, data.first.tokenizer).n_samples
        steps = max(1, math.ceil(train.epochs * n / train.global_batch))
    if train.warmup_fraction:
        warmup = round(train.warmup_fraction * steps)
        if train.lr_schedule == "inverse_sqrt":
            warmup = max(1, warmup)
    chosen = train.model_copy(update={"steps": steps, "warmup_steps": warmup})
    plain = {"epochs": 0.0, "warmup_fraction": 0.0}  # so that the schedule is checked
    try:
        TrainConfig.model_validate({**chosen.model_dump(), **plain})
    except ValidationError as error:
        texts = [one["msg"].removeprefix("Value error, ") for one in error.errors()]
        raise ConfigError(*(f"train: {text}" for text in texts)) from None
    return run.model_copy(update={"train": chosen})


def _problems_of(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Returns the different messages of checks that fail."""
    problems = []
    for check in checks:
        try:
            check()
        except DataError as error:
            problems.append(str(error))
    return [*dict.fromkeys(problems)]


def _unscored(run: RunConfig, data: RunData) -> list[str]:
    """Returns which sets lack the questions as text with which answers are scored."""
    if run.task != "answer":
        return []
    sets = (*data.validation.values(), *data.test.values())
    said = [without_questions(data.folder_of(split).path, split.name) for split in sets]
    return [*dict.fromkeys(problem for problem in said if problem)]


def _unequal(run: RunConfig, data: RunData) -> list[str]:
    """Returns which folders have another tokenizer or other labels than the first source."""
    problems, ((first_key, first), *others) = [], data.folders.items()
    for key, folder in others:
        if not folder.tokenizer.same_ids(first.tokenizer):
            path = shlex.quote(str(first.path))
            problems.append(
                f"{key}={folder.path} has another tokenizer than {first_key}={first.path}: write "
                f"it with gridformer prepare SOURCE --tokenizer {path} --out FOLDER"
            )
        if run.model.n_labels and folder.index.labels != first.index.labels:
            mine, theirs = (", ".join(one.index.labels) or "none" for one in (folder, first))
            problems.append(
                f"{key}={folder.path} has the labels {mine}, but {first_key}={first.path} has "
                f"{theirs}: use folders with the same labels"
            )
    return problems


def _folder_problems(run: RunConfig, key: str, folder: TokenFolder) -> list[str]:
    """Returns why a folder does not fit the task and the labels of a run."""
    problem = _kind_problem(run, folder)
    problems = [f"{key}={folder.path} contains {problem}"] if problem else []
    n_labels, n = run.model.n_labels, len(folder.index.labels)
    labeled = run.task == "classify" if run.task in FINE_TUNING else n_labels > 0
    if labeled and run.task not in FINE_TUNING and folder.kind != "labeled":
        problems.append(
            f"model.n_labels={n_labels}: {folder.path} has no labels; write them with "
            f"`gridformer prepare SOURCE --label-key KEY`, or --labels-from-folders, or use "
            f"model.n_labels=0"
        )
    elif labeled and n_labels < n:
        problems.append(
            f"model.n_labels={n_labels} is less than the {n} labels of {folder.path}: use "
            f"model.n_labels={n}"
        )
    return problems


def _kind_problem(run: RunConfig, folder: TokenFolder) -> str:
    """Returns what a folder contains instead of what the run's task needs, and a remedy."""
    task, kind, family = run.task, folder.kind, run.model.family
    fits = [name for name in FINE_TUNING if _EXAMPLES[name][0] in folder.index.columns]
    write, written = (
        "write some with `gridformer prepare",
        "a folder written by `gridformer prepare",
    )
    written += " SOURCE --out FOLDER`"
    if task in FINE_TUNING:
        other = f", or use data.task={' or '.join(fits)}" if fits else ""
        examples = f"{write} FOLDER --format {_EXAMPLES[task][1]}`{other}"
        return "" if task in fits else f"no examples for data.task={task}: {examples}"
    if kind == "examples":
        use = f"use {' or '.join(f'data.task={name}' for name in fits)}, or {written}"
        return f"examples for fine-tuning, but data.task={task} needs text: {use}"
    if task == "pairs" and kind != "pairs":
        other = ", or use data.task=spans for text" if family == "t5" else ""
        return (
            f"no pairs, which data.task=pairs needs: {write} gettext:de --out FOLDER`, or from "
            f"your own records with --pair-keys{other}"
        )
    if task != "pairs" and kind == "pairs":
        languages = " to ".join(folder.index.languages or ("one text", "another"))
        remedy = f"use a model of family t5 or transformer, or {written}"
        remedy = "use data.task=pairs" if family == "t5" else remedy
        return f"pairs ({languages}), but data.task={task} needs running text: {remedy}"
    if task == "chat" and kind != "chat":
        example = "FILE.jsonl --chat chatml --out FOLDER`"
        return f"no conversations, which data.task=chat needs: {write} {example}"
    if task != "chat" and kind == "chat":
        remedy = "use data.task=chat" if "chat" in TASKS[family] else "use a gpt2 or llama model"
        said = f"but data.task={task} does not tell their answers from the rest: {remedy}"
        return f"conversations, {said}"
    return ""


def _length_problems(run: RunConfig) -> list[str]:
    """Checks that samples are long enough for their special tokens and some text."""
    task, seq_len, source_len = run.task, run.seq_len, run.source_len
    problems, shortest, why, or_0 = [], 1, "", ""
    if task in FINE_TUNING:
        shortest, why = 5, "two texts of a word each and the tokens around them"
    elif task == "masked" and run.model.n_labels:
        shortest, why = 3, "[CLS], a word and [SEP]"
    elif task == "masked" and run.model.sentence_pair:
        shortest, why = 5, "[CLS], and a word and a [SEP] for each sentence"
    elif task == "masked":
        shortest, why = 4, "[CLS], two words and [SEP]"
    elif task == "pairs":
        shortest, why = 2, "a word and the end of text"
    elif task == "spans":
        shortest, why = SHORTEST_SOURCE, "a word, a sentinel and the end of text"
    if task in ("pairs", "spans") and source_len < shortest:
        problems = [f"data.source_len={source_len} does not hold {why}: use {shortest} or more"]
    if task == "spans":
        if problems or not run.data.seq_len:
            return problems
        shortest, why = target_length(source_len), f"the spans of data.source_len={source_len}"
        or_0 = ", or 0"
    if seq_len < shortest:
        problems.append(f"data.seq_len={seq_len} does not hold {why}: use {shortest} or more{or_0}")
    return problems
