"""From text to batches: sources -> pieces -> tokenizer -> token folder -> sampler.

`prepare_corpus` writes a token folder, `TokenFolder.open` reads it, `BatchSampler` cuts batches.
"""

from gridformer.data.sampler import BatchSampler
from gridformer.data.tokenfolder import TokenFolder, TokenSplit
from gridformer.data.tokenizer import Tokenizer

__all__ = ["BatchSampler", "TokenFolder", "TokenSplit", "Tokenizer"]
