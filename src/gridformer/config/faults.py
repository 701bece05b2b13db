"""The keys of the `train` section that say how a run saves its work and meets faults."""

from __future__ import annotations

import signal
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gridformer.config.base import Config, any_of

# Signals that clusters send before they end a job. SIGINT is Ctrl-C, the user.
STOP_SIGNALS = tuple(
    name
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "SIGQUIT")
    if hasattr(signal, name)
)


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
        description="true lets a run whose newest checkpoint is damaged resume from the newest "
        "undamaged one, in its run directory or among the copies at checkpoint_to; the damaged "
        "one is kept under another name. false refuses to resume.",
    )
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Besides, each checkpoint whose step is a multiple of this number is kept for "
        "good; 0 means none.",
    )
    checkpoint_to: str = Field(
        default="",
        description="Each checkpoint is also copied to this URL of any file system that fsspec "
        "knows, such as s3://bucket/run. A run whose directory has no checkpoint as new as the "
        "newest one there begins with a copy of that. A run whose last checkpoint cannot be copied "
        "ends with exit code 1. Empty means no copies.",
    )
    async_save: bool = Field(
        default=True,
        description="true copies what is saved to host memory and writes the files while training "
        "goes on; false lets training wait until they are written, and saves that memory. The last "
        "save of a run is always waited for.",
    )
    full_disk: Literal["go_on", "remove_oldest"] = Field(
        default="go_on",
        description="If there is no space for a checkpoint, the run goes on and the next save "
        "tries again (go_on), or the oldest checkpoint that is not kept for good is removed and "
        "the save is tried again (remove_oldest), but never the last complete one.",
    )
    full_disk_wait_s: float = Field(
        default=900.0,
        ge=0.0,
        le=1e7,
        description="If there is no space for the last checkpoint of a run, the run waits for it "
        "for at most this number of seconds before it ends without that checkpoint. During these "
        "seconds, the copy of the last checkpoint to checkpoint_to is tried again, too.",
    )
    on_divergence: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="If the loss or the gradients of a step are not finite, the run ends (stop), "
        "leaves out the update of that batch and goes on (skip), or goes back to an earlier "
        "checkpoint and on from there with a lower learning rate (rollback). With float16, "
        "gradients that overflow first lower the loss scale.",
    )
    divergences: int = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="The run ends after this number of skipped steps in a row, or after this "
        "number of rollbacks.",
    )
    rollback_checkpoints: int = Field(
        default=1,
        ge=1,
        le=1_000_000,
        description="A rollback goes back this number of checkpoints: 1 means the newest, 2 the "
        "one before it, and so on.",
    )
    rollback_lr: float = Field(
        default=0.5, gt=0.0, le=1.0, description="A rollback multiplies the learning rate by this."
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0.0,
        le=1e8,
        description="A collective that waits longer than this number of seconds ends the run "
        "with an error.",
    )
    stop_signals: tuple[str, ...] = Field(
        default=tuple(name for name in ("SIGTERM", "SIGUSR1") if name in STOP_SIGNALS),
        description="After one of these signals the run saves a checkpoint and exits with code "
        "75, which asks to be started again. Ctrl-C (SIGINT), SIGTERM and SIGHUP always save and "
        "stop, and those of them that are not listed here exit with 128 + their number.",
    )
    stop_grace_s: float = Field(
        default=30.0,
        gt=0.0,
        le=86_400.0,
        description="A run that is told to stop has this number of seconds until it is ended by "
        "force. A step that is not expected to end in time is dropped before its next "
        "micro-batch, and the state before it is saved. A save that has begun is never cut off.",
    )
    max_hours: float | None = Field(
        default=None,
        gt=0.0,
        description="The run saves a checkpoint and exits with code 75 early enough to end within "
        "this number of hours after its start. None means no limit.",
    )

    max_restarts: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="If a process of a local run fails, the run goes on from its newest "
        "checkpoint in new processes, up to this number of times. Under torchrun, its "
        "--max-restarts sets this number instead.",
    )

    elastic: bool = Field(
        default=False,
        description="true lets the run go on with another number of processes than the layout has, "
        "in another layout with the same global batch, and in its own layout as soon as there are "
        "enough processes. With layout.cluster, the planner searches for the fastest one.",
    )

    @field_validator("stop_signals")
    @classmethod
    def _known_signals(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name == "SIGINT":
                raise ValueError(
                    "SIGINT is Ctrl-C, after which a run exits with code 130 and is not started "
                    f"again: name {any_of(STOP_SIGNALS)}"
                )
            if name not in STOP_SIGNALS:
                raise ValueError(f"'{name}' cannot be caught here: name {any_of(STOP_SIGNALS)}")
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _can_roll_back(self) -> Self:
        if self.on_divergence == "rollback" and self.rollback_checkpoints > self.keep_checkpoints:
            raise ValueError(
                f"rollback_checkpoints={self.rollback_checkpoints}, but keep_checkpoints="
                f"{self.keep_checkpoints} keeps fewer; use rollback_checkpoints="
                f"{self.keep_checkpoints}, or keep_checkpoints={self.rollback_checkpoints}"
            )
        return self
