"""All saves of a run: one at a time, in a thread while training goes on, or waited for.

A save under way is never abandoned: the next one, the end of the run, a stop and an error wait for
it. Ranks agree in the main thread only, when all of them are between two steps anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gridformer import comm
from gridformer.checkpoint.blocks import (
    Shards,
    Snapshot,
    TensorBlock,
    bytes_of,
    written_here,
)
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.save import Save, SaveOutcome
from gridformer.checkpoint.store import Kept, LocalStore
from gridformer.comm import progress
from gridformer.config import RunConfig
from gridformer.mesh import Axes
from gridformer.mesh.groups import objects_group
from gridformer.utils.errors import SaveError

LABEL = "checkpoint"
_RETRY_S = 5.0  # between two attempts to write a last checkpoint for which there is no space
_LOOK_S = 0.25


class Saver:
    """Saves the checkpoints of a run.

    Args:
        run_dir: The run directory, on storage that all ranks share.
        hold, release: Called when a save begins and when this rank has done its part of it, the
            latter maybe in another thread. In between the process should not be ended.
        hopeless: Returns whether a rank has failed or was killed.
        seconds_left: Returns after how many seconds the process must have ended.
        no_space: Called on the first rank when there is no space for the last checkpoint, with the
            reason, before each pause until the next attempt.
    """

    def __init__(
        self,
        run_dir: Path,
        run: RunConfig,
        axes: Axes,
        hold: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
        hopeless: Callable[[], bool] = lambda: False,
        seconds_left: Callable[[], float] = lambda: float("inf"),
        no_space: Callable[[str], None] = lambda why: None,
    ) -> None:
        train = run.train
        self._seconds_left, self._no_space = seconds_left, no_space
        self._full_disk_wait_s = train.full_disk_wait_s
        self._hold, self._release, self._hopeless = hold, release, hopeless
        self.axes = axes
        self._first = axes.world.index == 0  # which publishes checkpoints
        self.store = LocalStore(run_dir)
        self._new_save = partial(
            Save,
            self.store,
            kept=Kept.of(train),
            timeout_s=train.timeout_s,
            copy_to=train.checkpoint_to,
            hopeless=hopeless,
        )
        self._copies = Snapshot()
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._last_step = -1
        self._failure = ""  # of the last save, on the first rank
        self._failed = False  # whether the last save has failed, as far as all ranks know
        self._news: list[SaveOutcome] = []
        self._metrics: dict[str, float] = {}

    @property
    def busy(self) -> bool:
        """Whether a save is under way, so that this process should not be ended."""
        save, thread = self._save, self._thread
        if save is None:
            return False
        return (thread is not None and thread.is_alive()) or not save.has_ended()

    def reserve(self, shards: Shards) -> None:
        """Takes the memory for copies of what is saved, which takes seconds with a GPU."""
        if any(tensor.is_cuda for tensor, _ in shards.values()):
            self._copies.reserve(bytes_of(written_here(shards, self.axes)), pinned=True)

    def save(
        self, manifest: Manifest, shards: Shards, wait: bool = True, last: bool = True
    ) -> None:
        """Saves a checkpoint. All ranks call it together, between two steps.

        Args:
            wait: Whether to wait until the checkpoint is complete. Otherwise this waits for the
                save before this one and for copies in host memory.
            last: Whether the run ends after it. It is then waited for, also for space on a disk.

        Raises:
            SaveError: It is the last one and could not be written. All ranks raise it.
        """
        until = time.monotonic() + self._full_disk_wait_s
        while True:
            save = self._once(manifest, shards, wait or last)
            if not (wait or last):
                return
            self.finish()
            self._failed = not self._all(not save.outcome.failure)
            if not (self._failed and last):
                return
            self._news = self._news[:-1]
            if not self._all(self._may_wait(save.outcome, until)):
                raise SaveError(
                    f"the checkpoint of step {manifest.step} could not be saved: "
                    + (save.outcome.failure or "the first rank says why"),
                    elsewhere=not save.outcome.failure,
                )
            self._pause(save.outcome.failure)

    def _may_wait(self, outcome: SaveOutcome, until: float) -> bool:
        """Returns whether, as far as this rank knows, the save may be tried again."""
        again_s = 2 * _RETRY_S  # a pause, and an attempt
        may = self._seconds_left() > again_s and not self._hopeless()
        return may and (not self._first or (outcome.full and time.monotonic() + _RETRY_S < until))

    def _pause(self, why: str) -> None:
        if self._first:
            self._no_space(why)
        until = time.monotonic() + _RETRY_S
        while time.monotonic() < until and self._seconds_left() > _RETRY_S:
            progress.waits_on_purpose()
            time.sleep(_LOOK_S)

    def _once(self, manifest: Manifest, shards: Shards, wait: bool) -> Save:
        began = time.monotonic()
        self.finish()
        waited = time.monotonic() - began
        if self._last_step == manifest.step:
            self._all(True)  # else a rank could take the new draft for the old one
        self._last_step = manifest.step
        world = self.axes.world
        save = self._new_save(manifest, world.index, world.size)
        self._save, self._failed = save, True
        self._hold()
        try:
            if not self._all(not self._first or save.begin()):
                save.no_draft = True
                self._release()
            elif wait:
                save.run(written_here(shards, self.axes))
                self._release()
            else:
                copies = self._copies.take(written_here(shards, self.axes))
                self._thread = threading.Thread(
                    target=self._write, args=(save, copies), name="checkpoint", daemon=True
                )
                self._thread.start()
        except BaseException:
            save.no_draft = True  # there is nothing to wait for
            self._release()
            raise
        save.outcome.stalled_s, save.outcome.waited_s = time.monotonic() - began, waited
        if self._first and not wait:
            self._metrics["save_stall_s"] = save.outcome.stalled_s
        return save

    def all_saved(self) -> bool:
        """Waits for the save under way, and returns whether it, if there was one, has succeeded.

        All ranks call it together.
        """
        if not self._failed:
            return True  # all ranks know it
        self.finish()
        self._failed = not self._all(not self._failure)
        return not self._failed

    def news(self) -> list[SaveOutcome]:
        """Returns, on the first rank, what became of saves since the last call."""
        if self._save is not None and self._first and not self.busy:
            self.finish()
        news, self._news = self._news, []
        return news

    def metrics(self) -> dict[str, float]:
        """Returns seconds for metrics.jsonl since the last call: `save_stall_s` and `save_s`."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def finish(self) -> None:
        """Waits for the save under way, if there is one. It sends no messages."""
        save = self._save
        if save is None:
            return
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)
            progress.waits_on_purpose()  # it may take longer than a message may
        save.wait_for_the_end()
        self._save = self._thread = None
        self._failure = save.outcome.failure
        if self._first:
            self._news.append(save.outcome)
            if not save.outcome.failure:
                self._metrics["save_s"] = save.outcome.seconds

    def _write(self, save: Save, copies: Mapping[str, TensorBlock]) -> None:
        try:
            self._copies.wait()
            save.run(copies)
        finally:
            self._release()

    def _all(self, holds: bool) -> bool:
        """Returns whether something holds on all ranks. All ranks call it together."""
        world = replace(self.axes.world, group=objects_group())
        return bool(comm.all_reduce(torch.tensor([int(holds)]), world, "min", label=LABEL))
