"""SUMMA: the three matrix products of 2-D tensor parallelism, their schedules and gradients.

Start with `products`, which holds the three algorithms of the Optimus paper. The other modules:

    panels, transport    which panels exist, and how they are broadcast and reduced
    gather               the same products with all panels gathered at once
    chunks, chunked      the same, with activations gathered chunk by chunk
    operands             blocks of matrices, and the one-hot matrix of token ids
    autograd             gradients of the products, and the embedding lookup
    prefetch             weights that are gathered early, or kept gathered
"""

from gridformer.parallel.tensor.summa.autograd import (
    lookup,
    product_ab,
    product_abt,
    product_atb,
    whole_column,
)
from gridformer.parallel.tensor.summa.chunked import ChunkedGather
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.panels import Panel, panels
from gridformer.parallel.tensor.summa.prefetch import KeepGathered, WeightPrefetcher
from gridformer.parallel.tensor.summa.products import Broadcast, Pipelined, Schedule

__all__ = [
    "Broadcast",
    "ChunkedGather",
    "Gather",
    "KeepGathered",
    "Panel",
    "Pipelined",
    "Schedule",
    "WeightPrefetcher",
    "lookup",
    "panels",
    "product_ab",
    "product_abt",
    "product_atb",
    "whole_column",
]
