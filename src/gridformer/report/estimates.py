"""What one rank's code shows of a run: the memory of its ranks, and their messages in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from gridformer import comm
from gridformer.config import RunConfig
from gridformer.memory.breakdown import MemoryBreakdown
from gridformer.memory.estimate import estimate_ranks
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.auto.decisions import decide_run
from gridformer.record.rank import trace_rank
from gridformer.record.step import KINDS
from gridformer.report.steptrace import PurposeTraffic


@dataclass(frozen=True)
class Estimates:
    """What was found by running the code of a step on tensors without memory.

    Attributes:
        rank: The fullest rank.
        stands_for: What it represents, such as a stage; empty if all ranks are alike.
        memory: Its bytes at the peak by kind, the largest last in a stack as `gridformer memory`
            lists them.
        peak: The sum of them.
        moment: What the rank does at the peak.
        traffic: The messages of the rank in a step, the most bytes first.
        problem: Why there are no estimates; empty if there are.
    """

    rank: int = 0
    stands_for: str = ""
    memory: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    moment: str = ""
    traffic: list[PurposeTraffic] = field(default_factory=list)
    problem: str = ""


def estimates_of(run: RunConfig) -> Estimates:
    """Estimates memory and messages of the fullest rank of a run.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.

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
    counts: dict[tuple[str, str, str], list[float]] = {}
    for record in recorder.records:
        if record.size > 1:
            found = counts.setdefault((record.axis, record.op, record.label), [0, 0.0])
            found[0] += 1
            found[1] += record.bytes
    by_kind = {kind: fullest.by_kind[kind] for kind in KINDS if fullest.by_kind.get(kind)}
    return Estimates(
        fullest.rank,
        ranks[fullest.rank],
        by_kind,
        fullest.peak,
        fullest.moment,
        [
            PurposeTraffic(*key, count, n_bytes)
            for key, (count, n_bytes) in sorted(counts.items(), key=lambda item: -item[1][1])
        ],
    )
