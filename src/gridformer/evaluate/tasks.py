"""The tasks of `gridformer evaluate`: their names, and whether a model can do them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gridformer.config import FINE_TUNING, ModelConfig, RunConfig, any_of, closest
from gridformer.evaluate import measures
from gridformer.evaluate.examples import (
    check_examples,
    check_named_set,
    measure_set,
    read_labeled,
    score_examples,
)
from gridformer.evaluate.generate import continues
from gridformer.evaluate.loading import Job, Trained
from gridformer.evaluate.measures import Numbers, Options, read_pages
from gridformer.evaluate.prompts import read_input_text, read_texts
from gridformer.parallel.registry import describe_layout
from gridformer.utils.errors import ConfigError, DataError, UserError, require


@dataclass(frozen=True)
class Task:
    """A kind of task."""

    what: str  # what follows the name, for messages
    # Returns why a model cannot do it, or an empty text.
    problem: Callable[[RunConfig], str]
    # Reads what it needs, given the run and the names of the model's labels, or raises a UserError.
    check: Callable[[str, RunConfig, Sequence[str]], object]
    # Measures a model. All processes call it together.
    measure: Callable[[Trained, str, Options], Numbers]
    # The options `stride`, `limit`, `length` and `search` that change what it measures.
    uses: tuple[str, ...] = ()


class TaskArgument(NamedTuple):
    """One task on the command line: `kind:what`."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.what}"

    @property
    def task(self) -> Task:
        return TASKS[self.kind]


def _check_lm_eval(task: str, *_: object) -> None:
    require("lm_eval", "--tasks lm-eval:TASK", "lm-eval")
    if task.endswith(".yaml"):
        read_input_text(Path(task))
        return
    from gridformer.evaluate.harness import knows

    if not knows(task):
        raise UserError(
            f"--tasks lm-eval:{task}: the installed lm-eval has no such task; `lm-eval ls tasks` "
            "lists all of them, and the path of a YAML file names one of your own"
        )


def _check_bleu(file: str, *_: object) -> None:
    require("sacrebleu", "--tasks bleu:FILE", "bleu")
    read_texts(Path(file), "source", "target")


def _check_text(file: str, *_: object) -> None:
    if not re.search(r"\S", read_input_text(Path(file))):
        raise DataError(f"{file}: has no text")


def _predicts(run: RunConfig) -> str:
    if continues(run.model):
        return ""
    if not run.model.token_head:
        return f"needs a model that predicts tokens, and this one learned data.task={run.task}"
    return f"needs a model that predicts next tokens, and this one is a {run.model.family}"


def _was_fine_tuned(run: RunConfig) -> str:
    if run.task in FINE_TUNING:
        return ""
    return f"needs a model that was fine-tuned, not one that learned data.task={run.task}"


def _classifies(run: RunConfig) -> str:
    if run.task in ("choice", "regression"):
        return f"needs a classifier of texts, not a model of data.task={run.task}"
    return "" if run.model.n_labels else "needs a model with a classifier, but model.n_labels=0"


def _translates(run: RunConfig) -> str:
    if run.task != "pairs":
        return f"needs a model that was trained on pairs of texts, not on data.task={run.task}"
    return ""


TASKS: dict[str, Task] = {
    "text": Task("FILE", _predicts, _check_text, measures.text, uses=("stride", "length")),
    "wikitext": Task(
        "FILE",
        _predicts,
        lambda file, *_: read_pages(Path(file)),
        measures.wikitext,
        uses=("stride", "limit", "length"),
    ),
    "lambada": Task(
        "FILE",
        _predicts,
        lambda file, *_: read_texts(Path(file), "text"),
        measures.lambada,
        uses=("limit", "length"),
    ),
    "labels": Task(
        "FILE",
        _classifies,
        lambda file, run, names: read_labeled(Path(file), run, names),
        measures.labels,
        uses=("limit",),
    ),
    "set": Task(
        "NAME",
        lambda run: "",
        lambda name, run, _: check_named_set(name, run),
        lambda trained, name, _: measure_set(trained, name),
    ),
    "examples": Task(
        "FOLDER",
        _was_fine_tuned,
        lambda folder, run, _: check_examples(folder, run),
        lambda trained, folder, options: score_examples(trained, folder, options.batch_size),
    ),
    "bleu": Task("FILE", _translates, _check_bleu, measures.bleu, uses=("limit", "search")),
    "lm-eval": Task("TASK", _predicts, _check_lm_eval, measures.lm_eval, uses=("limit", "length")),
}


def parse_tasks(words: str) -> list[TaskArgument]:
    """Returns the tasks of `--tasks`, which are separated by commas.

    Raises:
        ConfigError: Tasks are unknown or incomplete.
    """
    tasks, problems = [], []
    for word in words.split(","):
        kind, _, what = word.strip().partition(":")
        if kind not in TASKS:
            problems.append(f"--tasks {word}: unknown task '{kind}'{closest(kind, TASKS)}")
        elif not what:
            problems.append(f"--tasks {word}: write {kind}:{TASKS[kind].what}")
        else:
            tasks.append(TaskArgument(kind, what))
    if problems:
        raise ConfigError(*problems)
    return tasks


def check_tasks(
    run: RunConfig,
    asked: Sequence[TaskArgument],
    options: Options,
    label_names: Sequence[str] = (),
    given: Sequence[str] = (),
) -> None:
    """Checks whether a model can do tasks, and reads what they need.

    Args:
        run: The run that trained the model.
        asked: The tasks.
        options: The settings.
        label_names: The names of the labels of a classifier, if they are stored with the model.
        given: The fields of `BeamSearch` that the user has set.

    Raises:
        ConfigError: A model cannot do a task, or no task uses a setting. It lists all problems.
        UserError: What a task needs is missing.
    """
    problems = []
    for one in asked:
        if problem := one.task.problem(run):
            able = [kind for kind, task in TASKS.items() if not task.problem(run)]
            instead = f"; this model can do {any_of(able)}" if able else ""
            problems.append(f"--tasks {one}: {one.kind} {problem}{instead}")
    problems += _unused_search(run.model, asked, given)
    for name in ("stride", "limit", "length"):
        value = getattr(options, name)
        if value and not any(name in one.task.uses for one in asked):
            problems.append(
                f"--{name} {value} is for {_kinds_that_use(name)}, and has no effect on "
                f"{', '.join(map(str, asked))}: leave it out"
            )
    length, longest = options.length_for(run.model), run.model.max_seq_len
    if length > longest:
        problems.append(f"--length {length}: the model reads {longest} tokens at once; use less")
    if options.stride > length:
        problems.append(
            f"--stride {options.stride}: the model reads {length} tokens at once; "
            f"use --stride {length} or less"
        )
    if problems:
        raise ConfigError(*problems)
    for one in asked:
        one.task.check(one.what, run, label_names)


def _kinds_that_use(option: str) -> str:
    return any_of(f"{kind}:{task.what}" for kind, task in TASKS.items() if option in task.uses)


def _unused_search(
    model: ModelConfig, asked: Sequence[TaskArgument], given: Sequence[str]
) -> list[str]:
    """Returns sentences about settings of a search that none of the tasks uses."""
    if not model.two_stacks:
        why = f"is for t5 and transformer, which use beam search; this model is a {model.family}"
    elif not any("search" in one.task.uses for one in asked):
        why = f"is for {_kinds_that_use('search')}, which translates, and none of the tasks does"
    else:
        return []
    return [f"--{name.replace('_', '-')} {why}: leave it out" for name in given]


def measure(
    trained: Trained, asked: Sequence[TaskArgument], options: Options
) -> dict[str, Numbers]:
    """Returns the numbers of each task by its name on the command line.

    All processes call it together and get the same numbers, but of lm-eval only rank 0.
    """
    return {str(one): one.task.measure(trained, one.what, options) for one in asked}


def evaluate_worker(
    job: Job, asked: Sequence[TaskArgument], options: Options, as_json: bool
) -> None:
    """The entrypoint of every process of `gridformer evaluate`; rank 0 prints the results."""
    with job.open() as (trained, rank):
        began = time.perf_counter()
        results = measure(trained, asked, options)
        seconds = time.perf_counter() - began
        if rank == 0 and as_json:
            print(json.dumps(as_dict(job, results, seconds), indent=2))
        elif rank == 0:
            show(job, results, seconds)


def as_dict(job: Job, results: Mapping[str, Numbers], seconds: float) -> dict[str, Any]:
    """Returns the results of `measure` for --json, where numbers that are not finite are null."""
    return {
        "model": job.name or str(job.folder),
        "layout": job.run.layout.model_dump(mode="json", exclude_defaults=True),
        "tasks": {
            task: {name: value if math.isfinite(value) else None for name, value in one.items()}
            for task, one in results.items()
        },
        "seconds": seconds,
    }


def show(job: Job, results: Mapping[str, Numbers], seconds: float) -> None:
    """Prints the results of `measure` as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "measure", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    for task, numbers in results.items():
        for place, (name, value) in enumerate(numbers.items()):
            table.add_row("" if place else task, name, _shown(value))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{job.name or job.folder} on {describe_layout(job.run.layout)}: {seconds:.1f} s",
        soft_wrap=True,
    )


def _shown(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) < 1e9 else f"{value:.4e}"
