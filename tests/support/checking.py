"""Checks of runs in this process, with a fault that is put back, for several tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import torch

from gridformer.comm import P2PChannel
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.record import Trace, trace_rank
from gridformer.record.rank import RecordOptions, record_ranks


def traced_here(
    run: RunConfig,
    found: list[list[int]],
    decisions: Decisions,
    repeat: bool,
    limit_s: float,
    here: bool = False,
) -> list[Trace]:
    """Take the place of `trace_ranks`, in this process."""
    torch.set_num_threads(1)
    traces: list[Trace] = []
    for line in found:
        if repeat or len(line) > 1:
            records = record_ranks(run, [line], decisions, RecordOptions(all_layers=True))
            traces += [one.trace for one in records]
        else:
            traces.append(trace_rank(run, line[0], decisions))
    return sorted(traces, key=lambda trace: trace.rank)


def one_group_for_all_messages() -> AbstractContextManager[object]:
    """A pipeline's messages are those of one group, in which a receive blocks a send."""
    return patch.object(P2PChannel, "_group", lambda self, *_: self.axis.group)
