"""SUMMA: the three matrix products of 2-D tensor parallelism, their schedules and gradients.

`panels` says how a dimension is walked, `operands` what a product is made of, `schedules` how its
parts travel, `products` how it is differentiated.
"""

from gridformer.parallel.summa.gather import Gather
from gridformer.parallel.summa.norms import Norm, Normed, rms_norm_backward
from gridformer.parallel.summa.panels import Panel, panels
from gridformer.parallel.summa.products import (
    Keep,
    WeightCell,
    lookup,
    product_ab,
    product_abt,
    product_atb,
    whole_column,
)
from gridformer.parallel.summa.schedules import Broadcast, Pipelined, Schedule

__all__ = [
    "Broadcast",
    "Gather",
    "Keep",
    "Norm",
    "Normed",
    "Panel",
    "Pipelined",
    "Schedule",
    "WeightCell",
    "lookup",
    "panels",
    "product_ab",
    "product_abt",
    "product_atb",
    "rms_norm_backward",
    "whole_column",
]
