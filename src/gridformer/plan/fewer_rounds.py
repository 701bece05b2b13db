"""Pipelines with fewer micro-batches, from whose times those of the whole step follow.

A pipeline that is full takes the same time for each further round of pp micro-batches. So a step
with many of them is traced twice, with two and with three rounds, and its times are extended along
a line, as those of models with many layers are (gridformer.trace.fewer_layers).
"""

from __future__ import annotations

from gridformer.config import RunConfig

KEPT = 2  # rounds of the shorter step; the other one has one more
_LEAST = KEPT + 3  # steps with fewer rounds are traced whole


def removable_rounds(run: RunConfig) -> int:
    """Returns how many rounds of pp micro-batches may be left out; 0 if all are traced."""
    layout = run.layout
    rounds, rest = divmod(layout.micro_batches, layout.pp)
    if rest and layout.stages_per_rank > 1:
        return 0
    return rounds - KEPT if layout.pp > 1 and rounds >= _LEAST else 0


def without_rounds(run: RunConfig, n: int) -> RunConfig:
    """Returns the run with n rounds fewer, whose micro-batches are as large as before.

    Args:
        run: The run.
        n: At most what `removable_rounds` returns.
    """
    layout, batch = run.layout, run.train.global_batch
    m = layout.micro_batches - n * layout.pp
    return run.model_copy(
        update={
            "layout": layout.model_copy(update={"micro_batches": m}),
            "train": run.train.model_copy(
                update={"global_batch": batch // layout.micro_batches * m}
            ),
        }
    )
