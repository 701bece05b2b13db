"""Sub-graph parallelism of any network: its branch sections go to sub-grids."""

from gridformer.parallel.branches.network import Common, parallelize_branches
from gridformer.parallel.branches.placed import Placed

__all__ = ["Common", "Placed", "parallelize_branches"]
