"""Sub-graph parallelism: the scheme for transformers, and branch sections of any network."""

from gridformer.parallel.subgraph.network import Common, parallelize
from gridformer.parallel.subgraph.placed import Placed
from gridformer.parallel.subgraph.transformer import apply

__all__ = ["Common", "Placed", "apply", "parallelize"]
