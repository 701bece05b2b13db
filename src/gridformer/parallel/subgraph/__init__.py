"""Sub-graph parallelism: the scheme for transformers, and branch sections of any network."""

from gridformer.parallel.subgraph.network import Common, Placed, parallelize
from gridformer.parallel.subgraph.transformer import apply

__all__ = ["Common", "Placed", "apply", "parallelize"]
