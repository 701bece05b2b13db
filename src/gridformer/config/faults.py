"""The keys of the `train` section that say how a run saves its work and meets faults."""

from __future__ import annotations

from pydantic import Field

from gridformer.config.base import Config


class FaultsConfig(Config):
    """When a run saves checkpoints, and what it does when something fails."""

    save_every: int = Field(
        default=500,
        ge=0,
        description="A checkpoint is saved each time after this number of steps; 0 saves only at "
        "the end.",
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, description="This number of the most recent checkpoints is kept."
    )
    fallback: bool = Field(
        default=False,
        description="true lets a run whose newest checkpoint is damaged resume from the newest one "
        "that is not; the damaged one is kept under another name. false refuses to resume.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0.0,
        description="A collective that waits longer than this number of seconds ends the run "
        "with an error.",
    )
