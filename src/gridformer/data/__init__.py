"""From text to batches: sources -> pieces -> tokenizer -> token folder -> samples -> batches.

`prepare_corpus` writes a token folder, `TokenFolder.open` reads it, `resolve` fits a run to it,
`open_batches` gives the run's batches.
"""

from gridformer.data.batches import open_batches, special_ids
from gridformer.data.resolve import resolve
from gridformer.data.sampler import BatchSampler
from gridformer.data.samples import Batches
from gridformer.data.special import SpecialIds
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer

__all__ = [
    "BatchSampler",
    "Batches",
    "SpecialIds",
    "TokenFolder",
    "TokenSplit",
    "Tokenizer",
    "open_batches",
    "resolve",
    "special_ids",
]
