# ruff: noqa: F401
"""SUMMA: the three matrix products of 2-D tensor parallelism, their schedules and gradients.

panels      the three algorithms of the Optimus paper, panel by panel
gathered    the same products of whole operands, in chunks or at once; boundaries of sections
weights     weights that are gathered ahead, or kept gathered
autograd    gradients of the products, and the embedding lookup
"""

from gridformer.parallel.tensor.summa.autograd import (
    Schedule,
    lookup,
    product_ab,
    product_abt,
    whole_column,
)
from gridformer.parallel.tensor.summa.gathered import (
    Chunk,
    Gathered,
    InRankOrder,
    Operand,
    Replicated,
    Sharded,
    boundary_of,
)
from gridformer.parallel.tensor.summa.panels import Broadcast, Panel, Pipelined
from gridformer.parallel.tensor.summa.weights import (
    GatheredWeight,
    GatheredWeightsScope,
    gathered_weights_scope,
    sum_within_blocks,
)
