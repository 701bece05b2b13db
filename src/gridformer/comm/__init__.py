"""All communication: raw collectives, their autograd pairs, and the recorder that counts them."""

from gridformer.comm.axis import Axes, Axis
from gridformer.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from gridformer.comm.recorder import Record, Recorder, record

__all__ = [
    "Axes",
    "Axis",
    "Record",
    "Recorder",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "record",
    "reduce",
    "reduce_scatter",
]
