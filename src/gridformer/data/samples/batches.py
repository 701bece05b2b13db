"""The batches of a run, made from the samples of its task."""

from __future__ import annotations

import numpy as np

from gridformer.config import RunConfig
from gridformer.data.samples.labeled import LabeledForDecoder, LabeledForEncoder
from gridformer.data.samples.masked import MaskedSamples
from gridformer.data.samples.order import Order, Rows
from gridformer.data.samples.sampler import BatchSampler
from gridformer.data.samples.samples import Arrays, Batches, Dealt, Samples
from gridformer.data.samples.spans import SpanSamples, sentinels_of
from gridformer.data.samples.special import SpecialIds
from gridformer.data.samples.translation import PairSamples
from gridformer.data.tokenfolder import SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer


def special_ids(run: RunConfig, tokenizer: Tokenizer) -> SpecialIds:
    """Returns the special ids of a run; for spans it assumes a source of at least 3 tokens."""
    needed = sentinels_of(max(3, run.source_len)) if run.task == "spans" else 0
    return SpecialIds.of(run.model.family, run.task, tokenizer, needed)


def open_batches(run: RunConfig, folder: TokenFolder, split: SplitName) -> Batches:
    """Opens the batches of a run in one split of its folder.

    Validation batches also have global_batch rows, and batch i is the same in every evaluation.

    Args:
        run: The run, as `gridformer.data.resolve` returned it.
        folder: The token folder.
        split: The split.

    Raises:
        DataError: The split contains no sample.
    """
    text = folder.train if split == "train" else folder.val
    batch, seed = run.train.global_batch, run.train.seed
    if run.task == "causal" and not run.model.n_labels:
        return CausalBatches(BatchSampler(text, run.seq_len, batch, seed))
    special = special_ids(run, folder.tokenizer)
    samples: Samples
    if run.model.n_labels:
        kind = LabeledForEncoder if run.task == "masked" else LabeledForDecoder
        samples = kind(text, run.seq_len, special)
    elif run.task == "masked":
        samples = MaskedSamples(text, run.seq_len, special, run.model.sentence_pair)
    elif run.task == "spans":
        samples = SpanSamples(text, run.source_len, run.seq_len, special)
    else:
        samples = PairSamples(text, run.source_len, run.seq_len, special)
    return Dealt(samples, Order(samples.n_samples, batch, seed), f"{run.task}/{split}")


class CausalBatches:
    """Windows of running text, with the next tokens as targets. They have no random choices."""

    n_left_out = 0

    def __init__(self, windows: BatchSampler) -> None:
        self.windows = windows
        self.n_samples = windows.n_samples

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        """Returns tokens and targets [rows, seq_len]; see Batches."""
        ids = self.windows.batch(step, rows)
        tokens, targets = ids[:, :-1], ids[:, 1:]
        return {"tokens": np.ascontiguousarray(tokens), "targets": np.ascontiguousarray(targets)}
