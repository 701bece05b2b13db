"""What one rank's code shows of a run: the memory of its ranks, and their messages in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from gridformer import comm
from gridformer.config import RunConfig
from gridformer.memory.estimate import MemoryBreakdown, estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.auto.decisions import decide_run
from gridformer.record.rank import trace_rank
from gridformer.record.step import KINDS
from gridformer.report.steptrace import PurposeTraffic, traffic_of


@dataclass(frozen=True)
class Estimates:
    """Memory and messages by the code of a step, which ran on tensors without memory, if any."""

    rank: int = 0  # the fullest rank
    stands_for: str = ""  # what it represents, such as a stage; empty if all ranks are alike
    memory: dict[str, int] = field(default_factory=dict)  # bytes at the peak by kind
    peak: int = 0  # the sum of them
    moment: str = ""  # what the rank does at the peak
    traffic: list[PurposeTraffic] = field(default_factory=list)  # in a step, the most bytes first
    problem: str = ""  # why there are no estimates


def estimates_of(run: RunConfig) -> Estimates:
    """Estimates memory and messages of the fullest rank of a run.

    It registers a device type in this process, which must not belong to a process group.

    Raises:
        UserError: The run is impossible.
    """
    decisions = decide_run(run)
    ranks = largest_ranks(run, decisions)
    fullest: MemoryBreakdown = max(
        estimate_ranks(run, [*ranks], decisions), key=lambda breakdown: breakdown.peak
    )
    with comm.record_messages() as recorder:
        trace_rank(run, fullest.rank, decisions)
    messages = [(x.axis, x.op, x.label, x.bytes) for x in recorder.records if x.size > 1]
    by_kind = {kind: fullest.by_kind[kind] for kind in KINDS if fullest.by_kind.get(kind)}
    return Estimates(
        fullest.rank,
        ranks[fullest.rank],
        by_kind,
        fullest.peak,
        fullest.moment,
        traffic_of(messages),
    )
