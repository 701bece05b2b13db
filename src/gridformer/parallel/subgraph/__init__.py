"""Sub-graph parallelism of any network: its branch sections go to sub-grids."""

from gridformer.parallel.subgraph.network import Common, parallelize
from gridformer.parallel.subgraph.placed import Placed

__all__ = ["Common", "Placed", "parallelize"]
