"""From text to batches: sources -> chunks -> tokenizer -> token folder -> samples -> batches.

`prepare_corpus` writes a token folder, `RunData.open` opens those of a run, `resolve` completes the
run's config from them, and `open_training` and `open_validation` open its batches.
"""

from gridformer.data.resolve import resolve
from gridformer.data.run_data import RunData
from gridformer.data.samples.batches import (
    Batches,
    open_samples,
    open_training,
    open_validation,
    special_ids,
)
from gridformer.data.samples.sample import SpecialIds
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer

__all__ = [
    "Batches",
    "RunData",
    "SpecialIds",
    "TokenFolder",
    "TokenSplit",
    "Tokenizer",
    "open_samples",
    "open_training",
    "open_validation",
    "resolve",
    "special_ids",
]
