"""The tasks of `gridformer evaluate`: what they read, and what they measure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gridformer.config import ModelConfig, RunConfig, any_of, closest
from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.examples import check_examples, example_problem, score_examples
from gridformer.evaluate.generate import continues, translate
from gridformer.evaluate.labels import predicted, read_labeled
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.prompts import read_input_text, read_texts
from gridformer.evaluate.scoring import ScoredWindow, score
from gridformer.evaluate.sets import check_named_set, measure_set
from gridformer.evaluate.team import Team
from gridformer.evaluate.wikitext import n_words, read_pages, restored
from gridformer.evaluate.windows import continuation, prefix_id, sliding
from gridformer.utils.errors import ConfigError, DataError, UserError
from gridformer.utils.extras import require

Item = TypeVar("Item")

Numbers = dict[str, float]


@dataclass(frozen=True)
class Options:
    """Settings of an evaluation.

    Attributes:
        batch_size: about how many windows or texts go through the model together.
        stride: see `gridformer.evaluate.windows.sliding`; 0 means what the model reads at once.
        limit: only this number of documents is measured, the first ones; 0 means all.
        length: the model reads at most this number of tokens at once; 0 means `max_seq_len`.
        search: settings of the search of tasks that translate.
    """

    batch_size: int = 8
    stride: int = 0
    limit: int = 0
    length: int = 0
    search: BeamSearch = field(default_factory=lambda: BeamSearch(max_tokens=256))

    def length_for(self, model: ModelConfig) -> int:
        """Returns how many tokens a model reads at once."""
        return self.length or model.max_seq_len


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
        what: what follows the name, for messages.
        problem: returns why a model cannot do it, or an empty text.
        check: reads what it needs, given the run and the names of the model's labels; raises a
            UserError if that does not work.
        measure: measures a model. All processes call it together.
        searches: whether it translates with `Options.search`.
        uses: those of the options `stride`, `limit` and `length` that change what it measures.
    """

    what: str
    problem: Callable[[RunConfig], str]
    check: Callable[[str, RunConfig, Sequence[str]], object]
    measure: Callable[[Trained, str, Options], Numbers]
    searches: bool = False
    uses: tuple[str, ...] = ()


# --------------------------------------------------------------------------- likelihood of texts


@dataclass(frozen=True)
class ScoredText:
    """A text to score, and by how many words and bytes its likelihood is divided."""

    text: str
    words: int
    bytes: int


def likelihood(
    trained: Trained, documents: Sequence[ScoredText], options: Options, begin: Sequence[int] = ()
) -> tuple[float, int]:
    """Returns the log-likelihood of all documents, and their number of tokens.

    Args:
        trained, options: the model, and the settings.
        documents: the documents.
        begin: tokens of each document before those of its text.
    """
    length = options.length_for(trained.model.config)
    windows: list[ScoredWindow] = []
    prefix = prefix_id(trained.tokenizer)
    for ids in trained.tokenizer.encode_batch([document.text for document in documents]):
        windows += sliding([*begin, *ids], prefix, length, options.stride or length)
    found = score(trained, windows, options.batch_size)
    n_tokens = sum(window.n_targets for window in windows)
    return sum(one.log_likelihood for one in found), n_tokens


def perplexities(total: float, n_tokens: int, documents: Sequence[ScoredText]) -> Numbers:
    """Returns the measures that are computed from a log-likelihood.

    Args:
        total: the log-likelihood of all documents, in nats.
        n_tokens: their number of tokens.
        documents: the documents, whose words and bytes it is divided by.
    """
    words, size = sum(d.words for d in documents), sum(d.bytes for d in documents)
    return {
        "word_perplexity": _exp(-total / words) if words else math.nan,
        "byte_perplexity": _exp(-total / size),
        "bits_per_byte": -total / size / math.log(2),
        "token_perplexity": _exp(-total / n_tokens),
        "tokens": n_tokens,
        "words": words,
    }


def _exp(nats: float) -> float:
    """Returns a perplexity; it is infinite if no float is as large, as for one very long word."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def text(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on a file, as one text.

    This function and those below are the kinds of tasks. All ranks call them together.

    Args:
        trained: the model.
        file: the path of the file.
        options: the settings.

    Returns:
        The measures by name.

    Raises:
        UserError: the file cannot be read.
    """
    whole = read_input_text(Path(file))
    one = ScoredText(whole, len(whole.split()), len(whole.encode()))
    total, n_tokens = likelihood(trained, [one], options)
    return perplexities(total, n_tokens, [one])


def wikitext(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures perplexity on pages of WikiText, per word of the original.

    Args:
        trained: the model.
        file: a file of WikiText as it is published.
        options: the settings.
    """
    pages = _first(read_pages(Path(file)), options)
    if not any(page.strip() for page in pages):
        raise DataError(f"{file}: its first {len(pages)} pages have no text: use a larger --limit")
    documents = [ScoredText(restored(p), n_words(p), len(p.encode())) for p in pages]
    # As in lm-evaluation-harness, a begin-of-text token of the tokenizer is predicted, too.
    total, n_tokens = likelihood(trained, documents, options, trained.tokenizer.begin_ids)
    return perplexities(total, n_tokens, documents) | {"documents": len(pages)}


def lambada(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how well a model predicts the last word of each text (Paperno et al. 2016).

    Args:
        trained: the model.
        file: JSON lines with the key `text`.
        options: the settings.
    """
    texts = _first(read_texts(Path(file), "text"), options)
    windows, length = [], options.length_for(trained.model.config)
    for (whole,) in texts:
        before, _, word = whole.rpartition(" ")
        windows.append(continuation(trained.tokenizer, before, f" {word}", length))
    found = score(trained, windows, options.batch_size)
    mean = sum(one.log_likelihood for one in found) / len(found)
    return {
        "accuracy": sum(one.greedy for one in found) / len(found),
        "perplexity": _exp(-mean),
        "documents": len(texts),
    }


def labels(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures how often the classifier gives the right label.

    Args:
        trained: the model, which has a classifier.
        file: JSON lines with a text, or two, and a label.
        options: the settings.
    """
    records = _first(read_labeled(Path(file), trained.run, trained.label_names), options)
    found = predicted(trained, [text for text, _ in records], options.batch_size)
    right = sum(label == wanted for label, (_, wanted) in zip(found, records))
    return {"accuracy": right / len(records), "documents": len(records)}


def examples(trained: Trained, folder: str, options: Options) -> Numbers:
    """Measures a fine-tuned model on the validation split of a folder of examples.

    Args:
        trained: the model.
        folder: the token folder of the examples.
        options: the settings, of which `batch_size` counts.
    """
    return score_examples(trained, folder, options.batch_size)


def named_set(trained: Trained, name: str, options: Options) -> Numbers:
    """Measures the loss of a named set of the run, and its scores.

    Args:
        trained: the model.
        name: the name of the set in data.validation or data.test.
        options: not used: the run says how a set is read.
    """
    return measure_set(trained, name)


def bleu(trained: Trained, file: str, options: Options) -> Numbers:
    """Measures BLEU (Papineni et al. 2002; Post 2018) of generated second texts of pairs.

    Args:
        trained: the model, which has learned pairs.
        file: JSON lines with the keys `source` and `target`.
        options: the settings, those of the search among them.
    """
    import sacrebleu

    pairs = _first(read_texts(Path(file), "source", "target"), options)
    sources = [source for source, _ in pairs]
    # Searches end at about the same time if the sources are about equally long.
    order = sorted(range(len(pairs)), key=lambda i: len(sources[i]))
    said = [""] * len(pairs)
    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        found = translate(trained, trained.special, [sources[i] for i in batch], options.search)
        for i, words in zip(batch, found):
            said[i] = words
    result = sacrebleu.corpus_bleu(said, [[target for _, target in pairs]])
    return {"bleu": result.score, "documents": len(pairs)}


def lm_eval(trained: Trained, task: str, options: Options) -> Numbers:
    """Measures a task of lm-evaluation-harness, which runs on rank 0.

    Args:
        trained: the model.
        task: the name of the task there.
        options: the settings.

    Returns:
        The measures by name; nothing on other ranks than 0.
    """
    team = Team(trained, options.batch_size)
    if trained.axes.world.index:
        team.follow()
        return {}
    from gridformer.evaluate.harness import measured

    found = measured(team, task, options.limit, options.length)
    team.release()
    return found


def _first(values: Sequence[Item], options: Options) -> Sequence[Item]:
    return values[: options.limit] if options.limit else values


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
    "text": Task("FILE", _predicts, _check_text, text, uses=("stride", "length")),
    "wikitext": Task(
        "FILE",
        _predicts,
        lambda file, *_: read_pages(Path(file)),
        wikitext,
        uses=("stride", "limit", "length"),
    ),
    "lambada": Task(
        "FILE",
        _predicts,
        lambda file, *_: read_texts(Path(file), "text"),
        lambada,
        uses=("limit", "length"),
    ),
    "labels": Task(
        "FILE",
        _classifies,
        lambda file, run, names: read_labeled(Path(file), run, names),
        labels,
        uses=("limit",),
    ),
    "set": Task("NAME", lambda run: "", lambda name, run, _: check_named_set(name, run), named_set),
    "examples": Task(
        "FOLDER", example_problem, lambda folder, run, _: check_examples(folder, run), examples
    ),
    "bleu": Task("FILE", _translates, _check_bleu, bleu, searches=True, uses=("limit",)),
    "lm-eval": Task("TASK", _predicts, _check_lm_eval, lm_eval, uses=("limit", "length")),
}


# --------------------------------------------------------------------------- the command line


def parse_tasks(words: str) -> list[TaskArgument]:
    """Returns the tasks of `--tasks`, which are separated by commas.

    Raises:
        ConfigError: a task is unknown or incomplete. It lists all such tasks.
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
        raise ConfigError(problems)
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
        run: the run that trained the model.
        asked: the tasks.
        options: the settings.
        label_names: what the labels of a classifier are called, if that is stored with the model.
        given: names of fields of `BeamSearch` that the user has set.

    Raises:
        ConfigError: a model cannot do a task, or no task uses a setting. It lists all problems.
        UserError: what a task needs is missing.
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
        raise ConfigError(problems)
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
