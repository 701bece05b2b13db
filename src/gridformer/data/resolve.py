"""Completes a run's config from its token folder, and checks that both fit together."""

from __future__ import annotations

from gridformer.config import FINE_TUNING, RunConfig
from gridformer.data.samples.batches import open_batches, special_ids
from gridformer.data.samples.spans import SHORTEST_SOURCE, target_length
from gridformer.data.tokenfolder import SPLITS, TokenFolder
from gridformer.utils.errors import ConfigError, DataError


def resolve(run: RunConfig, folder: TokenFolder) -> RunConfig:
    """Returns the run with its vocabulary size, task and lengths filled in.

    The vocabulary consists of the folder's and of the special ids that the task adds.

    Raises:
        ConfigError: The run and the folder do not fit together: the folder's kind or labels, the
            vocabulary, the lengths, or too little data. It lists all problems at once.
    """
    if run.data.sources or run.data.validation:
        raise ConfigError(["data.sources and data.validation cannot be read yet: use data.path"])
    try:
        folder.check()
    except DataError as error:
        raise ConfigError([str(error)]) from None
    problems = [*_kind_problems(run, folder), *_label_problems(run, folder)]
    needed = folder.vocab_size
    if run.task != "causal" or run.model.n_labels:
        try:
            needed = special_ids(run, folder.tokenizer).vocab_size
        except DataError as error:
            problems.append(str(error))
    vocab_size = run.model.vocab_size or needed
    if vocab_size < needed:
        special = needed - folder.vocab_size
        added = f" and the {special} special ones of data.task={run.task}" if special else ""
        problems.append(
            f"model.vocab_size={vocab_size} is smaller than the {folder.vocab_size} words of "
            f"{run.data.path}{added}: use model.vocab_size={needed}, or 0 for the data's"
        )
    too_short = _length_problems(run)
    problems += too_short
    seq_len = run.seq_len
    if run.task == "spans" and not run.data.seq_len and not too_short:
        seq_len = target_length(run.source_len)
    values = {"task": run.task, "seq_len": seq_len, "source_len": run.source_len}
    resolved = run.model_copy(
        update={
            "model": run.model.model_copy(update={"vocab_size": vocab_size}),
            "data": run.data.model_copy(update=values),
        }
    )
    if not problems:
        for split in SPLITS:
            try:
                open_batches(resolved, folder, split)
            except DataError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return resolved


def _kind_problems(run: RunConfig, folder: TokenFolder) -> list[str]:
    path, family = run.data.path, run.model.family
    if run.task in FINE_TUNING:
        return _example_problems(run, folder)
    if run.task == "pairs" and folder.kind != "pairs":
        other = ", or use data.task=spans for text" if family == "t5" else ""
        return [
            f"data.path={path} contains no pairs, which data.task=pairs needs: write some with "
            f"`gridformer prepare gettext:de --out FOLDER`, or from your own records with "
            f"--pair-keys{other}"
        ]
    if run.task != "pairs" and folder.kind == "pairs":
        one, other = folder.index.languages or ("one text", "another")
        remedy = (
            "use data.task=pairs"
            if family == "t5"
            else "use a model of family t5 or transformer, or a folder written by `gridformer "
            "prepare SOURCE --out FOLDER`"
        )
        return [
            f"data.path={path} contains pairs ({one} to {other}), but data.task={run.task} needs "
            f"running text: {remedy}"
        ]
    return []


def _example_problems(run: RunConfig, folder: TokenFolder) -> list[str]:
    return [f"{run.data.path} has no examples for data.task={run.task}"]


def _label_problems(run: RunConfig, folder: TokenFolder) -> list[str]:
    model, n_labels = run.model, run.model.n_labels
    if not n_labels or run.task in FINE_TUNING:
        return []
    problems = []
    found = len(folder.index.labels)
    if folder.kind != "labeled":
        problems.append(
            f"model.n_labels={n_labels}: {run.data.path} has no labels; write them with "
            f"`gridformer prepare SOURCE --label-key KEY`, or --labels-from-folders, or use "
            f"model.n_labels=0"
        )
    elif n_labels < found:
        problems.append(
            f"model.n_labels={n_labels} is less than the {found} labels of {run.data.path}: use "
            f"model.n_labels={found}"
        )
    if model.family == "bert" and model.sentence_pair:
        problems.append(
            f"model.n_labels={n_labels}: labeled documents have no sentence B, which "
            f"model.sentence_pair=true needs; use model.sentence_pair=false"
        )
    return problems


def _length_problems(run: RunConfig) -> list[str]:
    """Checks that samples are long enough for their special tokens and some text."""
    problems = []
    seq_len, source_len = run.seq_len, run.source_len
    shortest, why = 1, ""
    if run.task == "masked":
        if run.model.n_labels:
            shortest, why = 3, "[CLS], a word and [SEP]"
        elif run.model.sentence_pair:
            shortest, why = 5, "[CLS], and a word and a [SEP] for each sentence"
        else:
            shortest, why = 4, "[CLS], two words and [SEP]"
    elif run.task == "pairs":
        shortest, why = 2, "a word and the end of text"
        if source_len < shortest:
            problems.append(
                f"data.source_len={source_len} does not hold {why}: use {shortest} or more"
            )
    elif run.task == "spans":
        if source_len < SHORTEST_SOURCE:
            return [
                f"data.source_len={source_len} does not hold a word, a sentinel and the end of "
                f"text: use {SHORTEST_SOURCE} or more"
            ]
        shortest, why = target_length(source_len), f"the spans of data.source_len={source_len}"
        if not run.data.seq_len:
            return []
    if seq_len < shortest:
        at_least = f"{shortest} or more" + (", or 0" if run.task == "spans" else "")
        problems.append(f"data.seq_len={seq_len} does not hold {why}: use {at_least}")
    return problems
