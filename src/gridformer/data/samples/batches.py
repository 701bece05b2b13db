"""The batches of a run: which samples its task takes, out of which folder."""

from __future__ import annotations

import numpy as np

from gridformer.config import RunConfig
from gridformer.data.samples.labeled import LabeledForDecoder, LabeledForEncoder
from gridformer.data.samples.masked import MaskedSamples
from gridformer.data.samples.order import Order
from gridformer.data.samples.sampler import BatchSampler
from gridformer.data.samples.samples import Arrays, Batches, Dealt, Samples
from gridformer.data.samples.spans import SpanSamples, sentinels_of
from gridformer.data.samples.special import SpecialIds
from gridformer.data.samples.translation import PairSamples
from gridformer.data.tokenfolder import SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer


def special_ids(run: RunConfig, tokenizer: Tokenizer) -> SpecialIds:
    """The special ids of a run. Spans: a source of at least 3 tokens is assumed."""
    needed = sentinels_of(max(3, run.source_len)) if run.task == "spans" else 0
    return SpecialIds.of(run.model.family, run.task, tokenizer, needed)


def open_batches(run: RunConfig, folder: TokenFolder, split: SplitName) -> Batches:
    """The batches of a resolved run (gridformer.data.resolve) out of one split of its folder.

    Validation has batches too, of global_batch rows; those of step i are the same at every
    evaluation. Raises DataError where the split holds no sample.
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
    """Windows of running text, and the same a token later. Nothing is random in them."""

    n_left_out = 0

    def __init__(self, windows: BatchSampler) -> None:
        self.windows = windows
        self.n_samples = windows.n_samples

    def batch(self, step: int, rows: slice | None = None) -> Arrays:
        """tokens, targets [rows, seq_len]; see Batches."""
        ids = self.windows.batch(step, rows)
        tokens, targets = ids[:, :-1], ids[:, 1:]
        return {"tokens": np.ascontiguousarray(tokens), "targets": np.ascontiguousarray(targets)}
