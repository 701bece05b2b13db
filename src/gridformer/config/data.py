"""The `data` section of a run: its sources, their weights, validation sets, and the task."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gridformer.config.base import AnyPath, Config, any_of, shortened_text
from gridformer.config.model import Family
from gridformer.utils.files import exists
from gridformer.utils.units import LARGEST_FLOAT, MOST_TOKENS

Task = Literal[
    "auto",
    "causal",
    "masked",
    "spans",
    "pairs",
    "classify",
    "regression",
    "choice",
    "answer",
    "chat",
]
# The tasks that each family can be trained on. The first one is what `auto` means.
TASKS: dict[Family, tuple[Task, ...]] = {
    "gpt2": ("causal", "classify", "regression", "choice", "answer", "chat"),
    "bert": ("masked", "classify", "regression", "choice", "answer"),
    "t5": ("spans", "pairs", "classify", "regression", "choice", "answer"),
    "transformer": ("pairs",),
    "llama": ("causal", "classify", "regression", "choice", "answer", "chat"),
    "network": ("causal",),
}
# The tasks that have a head of their own instead of the head that predicts tokens, and the keys of
# `model` that they set.
FINE_TUNING: dict[Task, dict[str, Any]] = {
    "classify": {},
    "regression": {"n_labels": 1},
    "choice": {"n_labels": 1},
    "answer": {"span_head": True},
}


# Samples after which the order of sources repeats. A table has an entry for each, and making it
# takes a few microseconds per entry.
LONGEST_CYCLE = 100_000
_OFFERED = 10_000  # messages suggest weights that are multiples of 1/10000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
# Metrics have keys val_loss_NAME, and with these names the keys already mean parts of a loss.
_TAKEN = ("tokens", "pair", "labels", "answer")


def _source_name(name: str) -> str:
    if name and not _NAME.fullmatch(name):
        raise ValueError(
            f"{shortened_text(ascii(name))} is not a source name: use at most 64 letters, digits, "
            "., - and _, with a letter or a digit first"
        )
    if name in _TAKEN:
        raise ValueError(f"{name} is the name of a loss: use another, such as {name}-1")
    return name


SourceName = Annotated[str, AfterValidator(_source_name)]
Weight = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]


class SourceConfig(Config):
    """Tokens that a run reads, and their weight in the mixture."""

    name: SourceName = ""
    """Stages, metrics and messages call the source by this name. By default it is that of the
    folder or file."""
    path: AnyPath
    """This is a token folder that `gridformer prepare` wrote, the PREFIX of Megatron-LM's
    PREFIX.bin and PREFIX.idx, or datatrove's NAME.ds."""
    weight: Weight = 1.0
    """The source's share of a run's samples is its weight divided by the sum of all weights."""


class StageConfig(Config):
    """The weights of sources from some step on."""

    from_step: int = Field(ge=2)
    """This step is the first one with these weights."""
    weights: dict[str, Weight]
    """These are weights by the names of sources. A source that is not named is not read in this
    stage."""


class ValidationConfig(Config):
    """A validation or test set: a split of a token folder, with a loss of its own."""

    name: SourceName = ""
    """The loss of the set is val_loss_NAME in metrics.jsonl, and that of a test set test_loss_NAME.
    By default it is the name of the folder or file."""
    path: AnyPath | None = None
    """This is a token folder, or files of Megatron-LM or datatrove. By default it is the path of
    the source of this name."""
    split: Literal["train", "val"] = "val"
    """The set consists of this split of the path."""


NO_PATH = "SET-ME"  # the data.path of a run made from a model's name alone


class DataConfig(Config):
    """The tokens that a run reads, and how samples are made from them."""

    path: AnyPath = Path()
    """This is the token folder that `gridformer prepare` wrote, the PREFIX of Megatron-LM's
    PREFIX.bin and PREFIX.idx, or datatrove's NAME.ds."""
    sources: tuple[SourceConfig, ...] = ()
    """Instead of data.path, these sources are mixed. Each has a name, a path and a weight, which is
    its share of the samples; data: [{path, weight}, ...] is short for this key."""
    stages: tuple[StageConfig, ...] = ()
    """From the step from_step on, the sources have these weights. A source that a stage does not
    name is not read in it."""
    validation: tuple[ValidationConfig, ...] = ()
    """These sets are read for the validation loss, each with a loss of its own. By default they are
    the validation splits of the sources."""
    test: tuple[ValidationConfig, ...] = ()
    """These sets are read once, after the last step, each with a loss of its own, test_loss_NAME.
    By default there are none."""
    task: Task = "auto"
    """The model learns to predict next tokens (causal, for gpt2 and llama), masked tokens (masked,
    for bert), masked spans (spans, for t5), or the second text of a pair from the first (pairs, for
    transformer and t5), or the answers of conversations (chat, for gpt2 and llama). Fine-tuning
    predicts no tokens, but the label of a text or of a pair of texts (classify), a number that
    belongs to it (regression), the right one of several answers (choice), or where a text answers a
    question (answer), all for bert, gpt2, llama and t5. auto means the first task of the family."""
    seq_len: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """A sample, or its target if it has a source, has this number of tokens. 0 means
    model.max_seq_len, or for spans as many tokens as the masked spans take."""
    source_len: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """For t5 and transformer, a source has this number of tokens; 0 means model.max_seq_len, or
    data.seq_len for the tasks of fine-tuning, in which encoder and decoder read the same tokens."""
    n_choices: int = Field(default=4, ge=2, le=64)
    """For choice, each question has this number of answers to choose from."""
    stride: int = Field(default=128, ge=1, le=MOST_TOKENS)
    """For answer, a context that is too long is read in windows, each of which begins this number
    of tokens after the one before."""
    max_answer_len: int = Field(default=30, ge=1, le=MOST_TOKENS)
    """For answer, an evaluation looks for answers of at most this number of tokens."""
    tokenizer: AnyPath | None = None
    """This is the tokenizer.json, or its folder, of token files that another program wrote. By
    default it is the one beside them. A folder of `gridformer prepare` has its own."""
    val_fraction: float = Field(default=0.02, ge=0, lt=1)
    """In token files that another program wrote, the last documents, with this fraction of the
    tokens, are for validation; 0 means none. A folder of `gridformer prepare` has its own
    validation split."""
    document_mask: bool = False
    """true keeps attention within documents, for gpt2 and llama on running text, and with
    packing=documents on conversations (data.task=chat), and for t5 and transformer on pairs
    (data.task=pairs). The last token of a document then predicts nothing."""
    reset_positions: bool = True
    """With document_mask, positions begin at 0 in each document; false counts them from the start
    of the sample, which is not possible for pairs."""
    packing: Literal["windows", "documents"] = "windows"
    """windows divides the text into samples of equal length, wherever documents begin. documents
    fills samples with whole documents, conversations or pairs, which needs document_mask: only
    documents that are longer than a sample are divided, and the rest of a sample is padding."""
    restart: bool = False
    """true lets a run that resumes have another train.global_batch, or other values of this
    section. If it does, the order of samples begins anew at that step."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: Any) -> Any:
        """Accepts a list of sources as the section, and names sources after their folders."""
        if isinstance(values, list | tuple):
            values = {"sources": values}
        if not isinstance(values, dict):
            return values
        named = {
            key: [_with_name(one) for one in values[key]]
            for key in ("sources", "validation", "test")
            if isinstance(values.get(key), list | tuple)
        }
        rest = {key: value for key, value in values.items() if (key, value) != ("path", None)}
        return {**rest, **named}

    def _problems(self) -> Iterator[str]:
        if not self.sources and "path" not in self.model_fields_set:
            yield "data.path is missing: set it to a folder that `gridformer prepare` wrote"
            return
        if self.sources and self.path != Path():
            yield (
                f"data.path={self.path} and data.sources are both set: use data.path=null with "
                "the sources, or name the folder as one of them"
            )
            return
        names = [source.name for source in self.sources]
        for number, name in enumerate(names):
            if not name:
                yield f"data.sources.{number}.name is missing: give the source a name"
        for name in _repeated(filter(None, names)):
            yield f"data.sources has two sources called {name}: give each a name of its own"
        if self.sources:
            weights = [source.weight for source in self.sources]
            yield from _weight_problems("the weights of data.sources", names, weights)
            yield from self._stage_problems(names)
        elif self.stages:
            yield "data.stages needs data.sources, whose weights it changes"
        yield from self._set_problems("data.validation", self.validation, names)
        yield from self._set_problems("data.test", self.test, names)

    def _stage_problems(self, names: list[str]) -> Iterator[str]:
        step = 1
        for number, stage in enumerate(self.stages):
            key = f"data.stages.{number}"
            if stage.from_step <= step:
                yield (
                    f"{key}.from_step={stage.from_step} is not after step {step}, with which the "
                    f"stage before it begins: use {step + 1} or more"
                )
            step = max(step, stage.from_step)
            unknown = [name for name in stage.weights if name not in names]
            for name in unknown:
                yield _unknown_source(f"{key}.weights", name, names)
            if not unknown:
                weights = [stage.weights.get(name, 0.0) for name in names]
                yield from _weight_problems(f"the weights of {key}", names, weights)

    def _set_problems(
        self, section: str, sets: Sequence[ValidationConfig], sources: list[str]
    ) -> Iterator[str]:
        for name in _repeated(one.name for one in sets if one.name):
            yield f"{section} has two sets called {name}: give each a name of its own"
        for number, one in enumerate(sets):
            key = f"{section}.{number}"
            if one.path is None and not sources:
                yield f"{key}.path is missing: set it to a token folder"
            elif one.path is None and one.name not in sources:
                yield _unknown_source(key, one.name, sources)
            elif not one.name:
                yield f"{key}.name is missing: give the set a name"

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        """The sources of training; data.path is a single one without a name."""
        return self.sources or (SourceConfig(path=self.path),)

    @property
    def validation_sets(self) -> tuple[ValidationConfig, ...]:
        """The validation sets, each with its path; that of data.path alone has no name."""
        if not self.validation:
            return tuple(
                ValidationConfig(name=one.name, path=one.path) for one in self.train_sources
            )
        return self._with_paths(self.validation)

    @property
    def test_sets(self) -> tuple[ValidationConfig, ...]:
        """The test sets, each with its path."""
        return self._with_paths(self.test)

    def _with_paths(self, sets: Sequence[ValidationConfig]) -> tuple[ValidationConfig, ...]:
        paths = {one.name: one.path for one in self.sources}
        return tuple(
            one if one.path else one.model_copy(update={"path": paths[one.name]}) for one in sets
        )

    @property
    def first_path(self) -> Path:
        """The folder of the first source, whose tokenizer is that of all sources."""
        return self.train_sources[0].path

    @property
    def missing(self) -> str:
        """The first token folder that is not there, as `data.path=FOLDER`; empty if all are."""
        named = [("data.sources", one.name, one.path) for one in self.train_sources]
        named += [("data.validation", one.name, one.path) for one in self.validation if one.path]
        named += [("data.test", one.name, one.path) for one in self.test if one.path]
        for section, name, path in named:
            if not exists(path) and not exists(path.with_name(f"{path.name or '.'}.bin")):
                return f"{section}.{name}={path}" if name else f"data.path={path}"
        return ""


def _with_name(entry: Any) -> Any:
    """Returns a source or a validation set with the name of its folder if it has none."""
    if not isinstance(entry, dict) or entry.get("name") or not entry.get("path"):
        return entry
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(str(entry["path"])).name).lstrip("._-")
    return {**entry, "name": name[:64]}


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the exact ratio of weights as they are written.

    Args:
        weights: Numbers >= 0, of which at least one is positive. 0.1 means 1/10, and not the
            nearest float.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    common = math.gcd(*whole)
    return tuple(one // common for one in whole)


def _weight_problems(where: str, names: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Returns what is wrong with the weights of a stage, with weights that work."""
    if not any(weights):
        return [f"{where} are all 0: give at least one source a positive weight"]
    cycle = sum(whole_weights(weights))
    if cycle <= LONGEST_CYCLE:
        return []
    offered = _rounded(weights)
    listed = ", ".join(f"{name}: {value:g}" for name, value in zip(names, offered))
    return [
        f"{where} have too many digits: the order of sources repeats only after "
        f"{shortened_text(cycle)} samples, and at most {LONGEST_CYCLE} are kept in memory: use "
        f"{{{listed}}}"
    ]


def _repeated(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [name for name, times in seen.items() if times > 1]


def _unknown_source(key: str, name: str, known: Sequence[str]) -> str:
    there = any_of(known)
    return f"{key} names {shortened_text(name)}, but data.sources has {there}: use one of these"


def _rounded(weights: Sequence[float]) -> list[float]:
    """Returns weights with sum 1 and at most four decimal places, positive ones staying so."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [max(1, round(one / total * _OFFERED)) if one else 0 for one in exact]
    largest = max(range(len(parts)), key=parts.__getitem__)
    parts[largest] += _OFFERED - sum(parts)
    return [part / _OFFERED for part in parts]
