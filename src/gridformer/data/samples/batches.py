"""The batches of a run, made from the samples of its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gridformer.config import FINE_TUNING, RunConfig
from gridformer.config.data import whole_weights
from gridformer.data.run_data import RunData
from gridformer.data.samples.examples import (
    VALUE,
    AnswerExamples,
    ChoiceExamples,
    LabeledDocuments,
    Reading,
    TextExamples,
)
from gridformer.data.samples.masked import MaskedSamples, SpanSamples, sentinels_of
from gridformer.data.samples.order import Order, Rows, Stage, generator_of, row_numbers
from gridformer.data.samples.sample import Arrays, Samples, SpecialIds, stacked
from gridformer.data.samples.texts import (
    ChatSamples,
    PackedDocuments,
    PairSamples,
    WindowSamples,
)
from gridformer.data.tokenfolder import SplitName, TokenSplit
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.batch import IGNORE
from gridformer.utils.units import counted

_WANTED = ("labels", "answer", "targets")


class Batches(Protocol):
    """The global batches of a run, one for every step without end."""

    @property
    def n_samples(self) -> int:
        """The samples of an epoch."""

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """Returns rows of the global batch of a step, with the keys of `gridformer.utils.batch`.

        Each row is a function of (seed, step, row) alone, so it is the same whichever other rows
        are read with it, under every layout, and after every resume. Steps are counted from 0.

        Raises:
            DataError: A file is damaged.
        """


@dataclass(frozen=True)
class ShuffledBatches:
    """Batches of samples in a given order. Each epoch draws the random choices of a sample anew."""

    samples: tuple[Samples, ...]  # of each source, of one shape and with the same keys
    order: Order
    purpose: str  # makes random numbers differ from those of other uses
    start: int = 0  # the step at which the order begins

    @property
    def n_samples(self) -> int:
        return sum(one.n_samples for one in self.samples)

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        step -= self.start
        wanted, made = _made(self.order.global_batch, rows)
        sources, numbers = self.order.places(step, made)
        out: Arrays = {}
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)

            def draw(place: int, made: NDArray[np.int64] = made[here]) -> np.random.Generator:
                number = step * self.order.global_batch + int(made[place])
                return generator_of(self.order.seed, self.purpose, number)

            read = self.samples[source].read(numbers[here], draw)
            if len(here) == len(made):
                out = read
                break
            for key, value in read.items():
                if key not in out:
                    out[key] = np.empty((len(made), *value.shape[1:]), value.dtype)
                out[key][here] = value
        return {key: value[: len(wanted)] for key, value in out.items()}


@dataclass(frozen=True)
class SequentialBatches:
    """Batches that hold every sample of a set once, in order: what an exact evaluation reads.

    Batch i holds the samples from i * global_batch on, with their numbers as key `item` [b]. Rows
    after the last sample repeat the first one. Their number is n_samples, and nothing is predicted
    for them, so that they count in no loss.
    """

    samples: Samples  # which must not depend on random choices
    global_batch: int

    @property
    def n_samples(self) -> int:
        return self.samples.n_samples

    @property
    def numbers(self) -> range:
        """The numbers of the batches."""
        return range(-(-self.n_samples // self.global_batch))

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        wanted, made = _made(self.global_batch, rows)
        items = np.minimum(step * self.global_batch + made, self.n_samples)
        read = stacked([self._sample(int(item)) for item in items])
        return {key: rows[: len(wanted)] for key, rows in read.items()}

    def _sample(self, item: int) -> Arrays:
        filler = item == self.n_samples
        sample = self.samples.sample(0 if filler else item, np.random.default_rng(0))
        if filler:
            for key in {*_WANTED} & {*sample}:
                ignored = np.nan if sample[key].dtype.kind == "f" else IGNORE
                sample[key] = np.full_like(sample[key], ignored)
        return sample | {"item": np.array(item, dtype=np.int64)}


def _made(global_batch: int, rows: Rows | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers of the rows, and of those to make: the first, if there are none."""
    wanted = row_numbers(global_batch, rows)
    return wanted, wanted if len(wanted) else np.zeros(1, dtype=np.int64)


def special_ids(run: RunConfig, tokenizer: Tokenizer) -> SpecialIds:
    """Returns the special ids of a run; for spans it assumes a source of at least 3 tokens."""
    needed = sentinels_of(max(3, run.source_len)) if run.task == "spans" else 0
    return SpecialIds.of(run.model.family, run.task, tokenizer, needed)


def open_samples(
    run: RunConfig, text: TokenSplit, tokenizer: Tokenizer, evaluating: bool = False
) -> Samples:
    """Returns the samples of one split for a run's task, or for its evaluation.

    Raises:
        DataError: The split contains no sample.
    """
    task, n, data, two = run.task, run.seq_len, run.data, run.model.two_stacks
    mask, reset, packed = data.document_mask, data.reset_positions, data.packing == "documents"
    if task == "causal" and mask and packed:
        return PackedDocuments(text, n, tokenizer.eos_id, reset)
    if task == "causal" and (mask or not run.model.n_labels):
        return WindowSamples(text, n, mask, reset)
    special = special_ids(run, tokenizer)
    if run.model.n_labels and task in ("causal", "masked"):
        return LabeledDocuments(text, n, special)
    match task:
        case "chat":
            return ChatSamples(text, n, special, mask, reset)
        case "classify":
            return TextExamples(text, Reading(n, special, two))
        case "regression":
            return TextExamples(text, Reading(n, special, two), VALUE)
        case "choice":
            return ChoiceExamples(text, Reading(n, special, two), data.n_choices)
        case "answer":
            return AnswerExamples(text, n, special, data.stride, evaluating, two)
        case "masked":
            return MaskedSamples(text, n, special, run.model.sentence_pair)
        case "spans":
            return SpanSamples(text, run.source_len, n, special)
        case _:
            return PairSamples(text, run.source_len, n, special, packed)


def open_training(run: RunConfig, data: RunData, start: int = 0) -> Batches:
    """Opens the training batches of a run.

    Args:
        start: The step, counted from 0, at which the order of samples begins.
    """
    tokenizer = data.first.tokenizer
    samples = [open_samples(run, one.train, tokenizer) for one in data.sources.values()]
    sources, later = run.data.sources, run.data.stages
    if not sources:
        return _shuffled(run, samples[0], "train", start)
    weights = [[one.weight for one in sources]]
    weights += [[stage.weights.get(one.name, 0.0) for one in sources] for stage in later]
    first = [0, *(stage.from_step - 1 for stage in later)]  # users count steps from 1
    stages = [Stage(max(0, n - start), whole_weights(of)) for n, of in zip(first, weights)]
    # Of those that begin before the order does, the last one holds.
    stages = stages[max(n for n, one in enumerate(stages) if one.first_step == 0) :]
    sizes = tuple(one.n_samples for one in samples)
    size, seed = run.train.global_batch, run.train.seed
    order = Order(tuple(data.sources), sizes, tuple(stages), size, seed)
    return ShuffledBatches(tuple(samples), order, f"{run.task}/train", start)


def open_validation(
    run: RunConfig, data: RunData, sets: Mapping[str, TokenSplit] | None = None
) -> dict[str, Batches]:
    """Opens the batches of sets by name, by default of the validation sets.

    Batch i of a set is the same in every evaluation, and has global_batch rows. Fine-tuning
    evaluates all samples of a set, so its batches are `SequentialBatches`.
    """
    opened: dict[str, Batches] = {}
    for name, text in (data.validation if sets is None else sets).items():
        samples = open_samples(run, text, data.first.tokenizer, evaluating=True)
        if run.task in FINE_TUNING:
            opened[name] = SequentialBatches(samples, run.train.global_batch)
        else:
            opened[name] = _shuffled(run, samples, "val")
    return opened


def _shuffled(
    run: RunConfig, samples: Samples, split: SplitName, start: int = 0
) -> ShuffledBatches:
    order = Order.of_one(samples.n_samples, run.train.global_batch, run.train.seed)
    return ShuffledBatches((samples,), order, f"{run.task}/{split}", start)


def remarks(batches: Batches) -> list[str]:
    """Returns sentences without a period about the samples of a run."""
    said, samples = [], _samples_of(batches)
    if isinstance(batches, ShuffledBatches) and any(batches.order.names):
        order = batches.order
        for number, stage in enumerate(order.stages):
            shares = [
                f"{weight / sum(stage.weights):.1%} {name}"
                + ("" if number else f" ({counted(one.n_samples, 'sample')})")
                for name, weight, one in zip(order.names, stage.weights, samples)
            ]
            since = f"from step {batches.start + stage.first_step + 1} on "
            said.append((since if number else "a mixture of ") + ", ".join(shares))
    if left_out := sum(one.n_left_out for one in samples):
        pairs = any(isinstance(one, PairSamples) for one in samples)
        what, why = (
            ("pair", "longer than that")
            if pairs
            else ("conversation", "no answer begins within that length")
        )
        said.append(f"left out: {counted(left_out, what)} ({why})")
    if truncated := sum(one.n_truncated for one in samples):
        said.append(f"truncated: {counted(truncated, 'conversation')} (longer than that)")
    if positions := sum(one.n_samples * one.n_positions for one in samples):
        held = sum(one.n_held for one in samples)
        said.append(f"{1 - held / positions:.0%} of the positions are padding")
    return said


def alike(*read: Batches) -> list[str]:
    """Returns a warning about questions whose choices truncation makes equal, if there are any."""
    samples = [one for batches in read for one in _samples_of(batches)]
    questions = [one for one in samples if isinstance(one, ChoiceExamples)]
    if not (n := sum(one.n_alike for one in questions)):
        return []
    return [
        f"Warning: at least {n:,} of {sum(one.n_samples for one in questions):,} questions have "
        f"choices that are equal once truncated to data.seq_len={questions[0].reading.seq_len}, so "
        "that rounding decides which one is chosen: use a larger data.seq_len or shorter choices"
    ]


def _samples_of(batches: Batches) -> tuple[Samples, ...]:
    if isinstance(batches, ShuffledBatches):
        return batches.samples
    return (batches.samples,) if isinstance(batches, SequentialBatches) else ()
