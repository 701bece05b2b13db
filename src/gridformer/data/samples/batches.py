"""The batches of a run, made from the samples of its task."""

from __future__ import annotations

from collections.abc import Mapping

from gridformer.config import FINE_TUNING, RunConfig
from gridformer.config.mixture import whole_weights
from gridformer.data.run_data import RunData
from gridformer.data.samples.answers import AnswerExamples
from gridformer.data.samples.chat import ChatSamples, PackedChats
from gridformer.data.samples.documents import DocumentWindows, PackedDocuments, WindowSamples
from gridformer.data.samples.examples import (
    ChoiceExamples,
    LabeledForDecoder,
    LabeledForEncoder,
    NumberExamples,
    TextExamples,
)
from gridformer.data.samples.masked import MaskedSamples
from gridformer.data.samples.mixture import Mixture, Stage
from gridformer.data.samples.order import Order
from gridformer.data.samples.samples import (
    Batches,
    Samples,
    SequentialBatches,
    ShuffledBatches,
)
from gridformer.data.samples.spans import SpanSamples, sentinels_of
from gridformer.data.samples.special import SpecialIds
from gridformer.data.samples.translation import PackedPairs, PairSamples
from gridformer.data.tokenfolder import SplitName, TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer


def special_ids(run: RunConfig, tokenizer: Tokenizer) -> SpecialIds:
    """Returns the special ids of a run; for spans it assumes a source of at least 3 tokens."""
    needed = sentinels_of(max(3, run.source_len)) if run.task == "spans" else 0
    return SpecialIds.of(run.model.family, run.task, tokenizer, needed)


def open_samples(
    run: RunConfig, text: TokenSplit, tokenizer: Tokenizer, evaluating: bool = False
) -> Samples:
    """Returns the samples that a run's task makes of one split.

    Args:
        run: The run, as `gridformer.data.resolve` returned it.
        text: The split.
        tokenizer: The tokenizer of the run.
        evaluating: Whether the samples have what only an evaluation needs.

    Raises:
        DataError: The split contains no sample.
    """
    if run.task == "chat":
        special = special_ids(run, tokenizer)
        if run.data.document_mask:
            return PackedChats(text, run.seq_len, special, run.data.reset_positions)
        return ChatSamples(text, run.seq_len, special)
    if run.data.document_mask and run.task == "causal":
        if run.data.packing == "documents":
            return PackedDocuments(text, run.seq_len, tokenizer.eos_id, run.data.reset_positions)
        return DocumentWindows(text, run.seq_len, run.data.reset_positions)
    if run.task == "causal" and not run.model.n_labels:
        return WindowSamples(text, run.seq_len)
    special = special_ids(run, tokenizer)
    if run.task == "classify":
        return TextExamples(text, run.seq_len, special, run.model.two_stacks)
    if run.task == "regression":
        return NumberExamples(text, run.seq_len, special, run.model.two_stacks)
    if run.task == "choice":
        n, two = run.data.n_choices, run.model.two_stacks
        return ChoiceExamples(text, run.seq_len, special, n, two)
    if run.task == "answer":
        stride, two = run.data.stride, run.model.two_stacks
        return AnswerExamples(text, run.seq_len, special, stride, evaluating, two)
    if run.model.n_labels:
        kind = LabeledForEncoder if run.task == "masked" else LabeledForDecoder
        return kind(text, run.seq_len, special)
    if run.task == "masked":
        return MaskedSamples(text, run.seq_len, special, run.model.sentence_pair)
    if run.task == "spans":
        return SpanSamples(text, run.source_len, run.seq_len, special)
    pairs = PackedPairs if run.data.packing == "documents" else PairSamples
    return pairs(text, run.source_len, run.seq_len, special)


def open_batches(run: RunConfig, folder: TokenFolder, split: SplitName) -> ShuffledBatches:
    """Opens batches of a run in one split of one folder.

    Validation batches also have global_batch rows, and batch i is the same in every evaluation.

    Args:
        run: The run, as `gridformer.data.resolve` returned it.
        folder: The token folder.
        split: The split.

    Raises:
        DataError: The split contains no sample.
    """
    text = folder.train if split == "train" else folder.val
    return _shuffled(run, open_samples(run, text, folder.tokenizer), split)


def open_training(run: RunConfig, data: RunData, start: int = 0) -> Batches:
    """Opens the training batches of a run.

    Args:
        run: The run, as `gridformer.data.resolve` returned it.
        data: Its token folders.
        start: The step, counted from 0, at which the order of samples begins.

    Raises:
        DataError: A source contains no sample.
    """
    tokenizer = data.first.tokenizer
    samples = [open_samples(run, one.train, tokenizer) for one in data.sources.values()]
    if not run.data.sources:
        return _shuffled(run, samples[0], "train", start)
    sizes = tuple(one.n_samples for one in samples)
    order = Mixture(
        tuple(data.sources), sizes, _stages(run, start), run.train.global_batch, run.train.seed
    )
    return ShuffledBatches(tuple(samples), order, f"{run.task}/train", start)


def open_validation(run: RunConfig, data: RunData) -> dict[str, Batches]:
    """Opens the batches of each validation set by its name, which is empty for data.path alone.

    Batch i of a set is the same in every evaluation, and has global_batch rows. Fine-tuning
    evaluates all samples of a set, so its batches are `SequentialBatches`.

    Raises:
        DataError: A set contains no sample.
    """
    return _open_sets(run, data, data.validation)


def open_tests(run: RunConfig, data: RunData) -> dict[str, Batches]:
    """Opens the batches of each test set by its name; see `open_validation`."""
    return _open_sets(run, data, data.test)


def _open_sets(run: RunConfig, data: RunData, sets: Mapping[str, TokenSplit]) -> dict[str, Batches]:
    tokenizer = data.first.tokenizer
    if run.task in FINE_TUNING:
        return {
            name: SequentialBatches(
                open_samples(run, text, tokenizer, True), run.train.global_batch
            )
            for name, text in sets.items()
        }
    return {
        name: _shuffled(run, open_samples(run, text, tokenizer), "val")
        for name, text in sets.items()
    }


def _shuffled(
    run: RunConfig, samples: Samples, split: SplitName, start: int = 0
) -> ShuffledBatches:
    order = Order(samples.n_samples, run.train.global_batch, run.train.seed)
    return ShuffledBatches((samples,), order, f"{run.task}/{split}", start)


def _stages(run: RunConfig, start: int) -> tuple[Stage, ...]:
    """Returns the stages of a run, with steps counted from `start`."""
    sources, later = run.data.sources, run.data.stages
    weights = [[one.weight for one in sources]]
    weights += [[stage.weights.get(one.name, 0.0) for one in sources] for stage in later]
    first = [0, *(stage.from_step - 1 for stage in later)]  # users count steps from 1
    found = [Stage(max(0, n - start), whole_weights(of)) for n, of in zip(first, weights)]
    # Of those that begin before the order does, the last one holds.
    return tuple(found[max(n for n, one in enumerate(found) if one.first_step == 0) :])
