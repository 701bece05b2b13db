# ruff: noqa: F401
"""All communication: raw collectives, their autograd pairs, and the recorder that counts them."""

from gridformer.comm.collectives import (
    Pending,
    SumOfBlocks,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce,
    start_reduce_scatter,
)
from gridformer.comm.irregular import all_to_all, exchange, gather, scatter
from gridformer.comm.p2p import P2PChannel
from gridformer.comm.recorder import Record, Recorder, record_messages
