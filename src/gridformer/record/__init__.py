"""Runs one rank's real code on fake tensors and records what it does."""

from gridformer.record.events import Kernel, Part, Place, Read, Start, Trace, Trouble, Wait
from gridformer.record.rank import trace_rank

__all__ = [
    "Kernel",
    "Part",
    "Place",
    "Read",
    "Start",
    "Trace",
    "Trouble",
    "Wait",
    "trace_rank",
]
