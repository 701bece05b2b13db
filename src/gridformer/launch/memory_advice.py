"""What a run that ran out of memory was estimated to need, and which settings need less."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from gridformer.utils.units import format_bytes

if TYPE_CHECKING:
    from gridformer.train.plan import Plan

_SEARCH_S, _LIMIT_S = 8.0, 20.0  # a user waits for it
_LESS = 0.85  # of the estimate: settings that need no more than this are offered
GENERAL = "try a smaller batch, more micro_batches, or a layout that shards the model further"


def memory_advice(plan: Plan) -> str:
    """Returns the estimate of a run's memory and settings that lower it, in a sentence's words.

    This takes seconds, and must not be called in a process of the run.
    """
    found: list[str] = []

    def look() -> None:
        found.append(_estimate(plan))

    thread = threading.Thread(target=look, name="memory advice", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return found[0] if found else GENERAL


def _estimate(plan: Plan) -> str:
    from gridformer.memory.budget import Patience, nearest
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.ranks import largest_ranks

    run, decisions = plan.run, plan.decisions
    ranks = [*largest_ranks(run, decisions)]
    worst = max(estimate_ranks(run, ranks, decisions), key=lambda one: one.needed)
    text = (
        f"the estimate is {format_bytes(worst.needed)} on rank {worst.rank} (`gridformer memory`)"
    )
    patience = Patience(time.monotonic() + _SEARCH_S)
    offers = nearest(run, worst, round(_LESS * worst.needed), patience=patience)
    less = ", or ".join(f"{offer.settings} ({format_bytes(offer.peak)})" for offer in offers)
    return f"{text}: try {less}" if less else f"{text}: {GENERAL}"
