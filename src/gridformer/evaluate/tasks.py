"""The tasks of `gridformer evaluate`: their names, and whether a model can do them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.config import ModelConfig, RunConfig, any_of, closest
from gridformer.evaluate import measures
from gridformer.evaluate.examples import (
    check_examples,
    check_named_set,
    example_problem,
    read_labeled,
)
from gridformer.evaluate.generate import continues
from gridformer.evaluate.loading import Job, Trained
from gridformer.evaluate.measures import Numbers, Options, read_pages
from gridformer.evaluate.prompts import read_input_text, read_texts
from gridformer.parallel.registry import describe_layout
from gridformer.utils.errors import ConfigError, DataError, UserError, require


@dataclass(frozen=True)
class TaskArgument:
    """One task on the command line: `kind:what`."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.what}"


@dataclass(frozen=True)
class Task:
    """A kind of task.

    Attributes:
        what: What follows the name, for messages.
        problem: Returns why a model cannot do it, or an empty text.
        check: Reads what it needs, given the run and the names of the model's labels; raises a
            UserError if that does not work.
        measure: Measures a model. All processes call it together.
        searches: Whether it translates with `Options.search`.
        uses: Those of the options `stride`, `limit` and `length` that change what it measures.
    """

    what: str
    problem: Callable[[RunConfig], str]
    check: Callable[[str, RunConfig, Sequence[str]], object]
    measure: Callable[[Trained, str, Options], Numbers]
    searches: bool = False
    uses: tuple[str, ...] = ()


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
        measures.named_set,
    ),
    "examples": Task(
        "FOLDER",
        example_problem,
        lambda folder, run, _: check_examples(folder, run),
        measures.examples,
    ),
    "bleu": Task("FILE", _translates, _check_bleu, measures.bleu, searches=True, uses=("limit",)),
    "lm-eval": Task("TASK", _predicts, _check_lm_eval, measures.lm_eval, uses=("limit", "length")),
}


def parse_tasks(words: str) -> list[TaskArgument]:
    """Returns the tasks of `--tasks`, which are separated by commas.

    Raises:
        ConfigError: A task is unknown or incomplete. It lists all such tasks.
    """
    found, problems = [], []
    for word in words.split(","):
        kind, _, what = word.strip().partition(":")
        if kind not in TASKS:
            problems.append(f"--tasks {word}: unknown task '{kind}'{closest(kind, TASKS)}")
        elif not what:
            problems.append(f"--tasks {word}: write {kind}:{TASKS[kind].what}")
        else:
            found.append(TaskArgument(kind, what))
    if problems:
        raise ConfigError(*problems)
    return found


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
        label_names: What the labels of a classifier are called, if that is stored with the model.
        given: Names of fields of `BeamSearch` that the user has set.

    Raises:
        ConfigError: A model cannot do a task, or no task uses a setting. It lists all problems.
        UserError: What a task needs is missing.
    """
    problems = []
    for one in asked:
        if problem := TASKS[one.kind].problem(run):
            able = [kind for kind, task in TASKS.items() if not task.problem(run)]
            instead = f"; this model can do {any_of(able)}" if able else ""
            problems.append(f"--tasks {one}: {one.kind} {problem}{instead}")
    problems += _search_problems(run.model, asked, given)
    problems += _useless(asked, options)
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
        TASKS[one.kind].check(one.what, run, label_names)


def _search_problems(
    model: ModelConfig, asked: Sequence[TaskArgument], given: Sequence[str]
) -> list[str]:
    """Returns why settings of a search are of no use."""
    if not model.two_stacks:
        why = f"is for t5 and transformer, which use beam search; this model is a {model.family}"
    elif not any(TASKS[one.kind].searches for one in asked):
        kinds = any_of(f"{kind}:{task.what}" for kind, task in TASKS.items() if task.searches)
        why = f"is for {kinds}, which translates, and none of the tasks does"
    else:
        return []
    return [f"--{name.replace('_', '-')} {why}: leave it out" for name in given]


def _useless(asked: Sequence[TaskArgument], options: Options) -> list[str]:
    """Returns which options are set that none of the tasks uses."""
    problems = []
    for name in ("stride", "limit", "length"):
        value = getattr(options, name)
        kinds = [f"{kind}:{task.what}" for kind, task in TASKS.items() if name in task.uses]
        if value and not any(name in TASKS[one.kind].uses for one in asked):
            problems.append(
                f"--{name} {value} is for {any_of(kinds)}, and has no effect on "
                f"{', '.join(map(str, asked))}: leave it out"
            )
    return problems


def timeout_of(asked: Sequence[TaskArgument]) -> float:
    """Returns the seconds that a process may wait for others.

    For lm-evaluation-harness, rank 0 may download and prepare data for a long time.
    """
    return 6 * 3600.0 if any(one.kind == "lm-eval" for one in asked) else 600.0


def measure(
    trained: Trained, asked: Sequence[TaskArgument], options: Options
) -> dict[str, Numbers]:
    """Measures a model on tasks. All processes call it together and get the same numbers.

    Args:
        trained: The model.
        asked: The tasks.
        options: Settings of the tasks.

    Returns:
        The numbers of each task, by the name that it has on the command line.
    """
    return {str(one): TASKS[one.kind].measure(trained, one.what, options) for one in asked}


_MANY = 1e9  # from here on, numbers are shown as powers of ten


def evaluate_worker(
    job: Job, asked: Sequence[TaskArgument], options: Options, as_json: bool
) -> None:
    """The entrypoint of every process of `gridformer evaluate`; rank 0 prints the results.

    Args:
        job: The model and its layout.
        asked: The tasks.
        options: Settings of the tasks.
        as_json: Whether to print one JSON object, and no table.
    """
    with job.open() as (trained, rank):
        began = time.perf_counter()
        found = measure(trained, asked, options)
        seconds = time.perf_counter() - began
        if rank == 0 and as_json:
            print(json.dumps(as_dict(job, found, seconds), indent=2))
        elif rank == 0:
            show(job, found, seconds)


def as_dict(job: Job, found: Mapping[str, Numbers], seconds: float) -> dict[str, Any]:
    """Returns the results for --json, which has no numbers that are not finite: they are null.

    Args:
        job: The model and its layout.
        found: The numbers of each task by name, as `measure` returns them.
        seconds: How long the tasks took.
    """
    return {
        "model": job.name or str(job.folder),
        "layout": job.run.layout.model_dump(mode="json", exclude_defaults=True),
        "tasks": {
            task: {name: value if math.isfinite(value) else None for name, value in one.items()}
            for task, one in found.items()
        },
        "seconds": seconds,
    }


def show(job: Job, found: Mapping[str, Numbers], seconds: float) -> None:
    """Prints the results as a table.

    Args:
        job: The model and its layout.
        found: The numbers of each task by name, as `measure` returns them.
        seconds: How long the tasks took.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "measure", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    for task, numbers in found.items():
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
    return f"{value:.4f}" if abs(value) < _MANY else f"{value:.4e}"
