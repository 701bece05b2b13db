"""Runs one rank's real code on fake tensors and records what it does."""

from gridformer.record.events import Kernel, Part, Place, Read, Start, Trace, Trouble, Wait
from gridformer.record.rank import trace_rank
from gridformer.record.ranks import trace_ranks

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
    "trace_ranks",
]
