"""Sub-graph parallelism for any network: places its branch sections on sub-grids of processes."""

from gridformer.parallel.branches.network import Common, parallelize_branches
from gridformer.parallel.branches.placed import Placed

__all__ = ["Common", "Placed", "parallelize_branches"]
