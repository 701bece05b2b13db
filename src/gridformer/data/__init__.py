"""From text to batches: sources -> pieces -> tokenizer -> token folder -> samples -> batches.

`prepare_corpus` writes a token folder, `TokenFolder.open` opens it, `resolve` completes a run's
config from it, and `open_batches` opens the run's batches.
"""

from gridformer.data.resolve import resolve
from gridformer.data.samples.batches import open_batches, special_ids
from gridformer.data.samples.sampler import BatchSampler
from gridformer.data.samples.samples import Batches, Restarted
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer

__all__ = [
    "BatchSampler",
    "Batches",
    "Restarted",
    "SpecialIds",
    "TokenFolder",
    "TokenSplit",
    "Tokenizer",
    "open_batches",
    "resolve",
    "special_ids",
]
