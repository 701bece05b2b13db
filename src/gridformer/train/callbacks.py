"""`Callback`: the base class of objects that are told what a run does while it trains.

The terminal, metrics.jsonl, TensorBoard, events.jsonl and the loggers are callbacks, and so are a
user's own. They run on the first rank, in its main thread between two steps. Nothing here imports
torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gridformer.config import RunConfig

State = Literal["starting", "training", "evaluating", "saving", "stopped", "failed", "done"]


@dataclass(frozen=True)
class RunStart:
    """A run that starts, or that goes on from a checkpoint.

    Attributes:
        run: Its settings, resolved.
        run_dir: The run directory.
        step: The steps that are done already; 0 for a new run.
        layout: A short description of the layout, such as `optimus 2x2`.
        devices: The number of processes, each of which has one device.
        device: The name of the device, such as `cpu`.
    """

    run: RunConfig
    run_dir: Path
    step: int
    layout: str
    devices: int
    device: str


@dataclass(frozen=True)
class Saved:
    """The result of a save.

    Attributes:
        step: The step of the checkpoint.
        path: The folder of the checkpoint.
        n_bytes: The bytes of all its files.
        seconds: The time from its start to its end.
        stalled_s: The seconds for which training waited for it and for the save before it.
        waited_s: The part of `stalled_s` for which training waited for the save before it.
        failure: Why there is no checkpoint; empty if it is complete.
        removed: Checkpoints that were removed to make room on a full disk.
        not_copied: Why it is not at `train.checkpoint_to`; empty if it is, or if there is no such
            place.
    """

    step: int
    path: str
    n_bytes: int
    seconds: float
    stalled_s: float
    waited_s: float
    failure: str = ""
    removed: tuple[str, ...] = ()
    not_copied: str = ""


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended.

    Attributes:
        how: `done` with all steps, `stopped` before the last one with its work saved, or `failed`.
        step: The last step that is done.
        saved: The step of the last checkpoint; None if the run has failed.
        why: The error of a run that has failed.
    """

    how: Literal["done", "stopped", "failed"]
    step: int
    saved: int | None = None
    why: str = ""


class Callback:
    """Is told what a run does. A subclass overrides the methods for what it wants to know.

    If a method raises an exception, the terminal shows a sentence about it, the callback gets no
    more events, and the run goes on.
    """

    @property
    def name(self) -> str:
        """The name of the callback in messages."""
        return type(self).__name__

    def on_start(self, start: RunStart) -> None:
        """The first step of this process, or an evaluation before it, is about to run."""

    def on_state(self, state: State, step: int | None = None, loss: float | None = None) -> None:
        """The run begins to do something else, or goes on with the next step.

        Args:
            state: What it does now.
            step: The last step that is done; None if it is the same as before.
            loss: The loss of that step; None if it is the same as before.
        """

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done, and so is the evaluation after it, if there is one.

        Args:
            metrics: The step's line of metrics.jsonl, which has its number as `step`.
        """

    def on_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """The model was evaluated. The metrics of the `on_step` before contain the results, too.

        Args:
            step: The number of steps before the evaluation.
            results: `val_loss`, and all other metrics whose names begin with `val_` or `test_`.
        """

    def on_saved(self, saved: Saved) -> None:
        """A checkpoint is complete, or could not be saved."""

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        """The loss or the gradients of a step were not finite, and the run goes on.

        Args:
            step: The number of the step.
            why: A sentence about it.
            back_to: The step of the checkpoint to which the run goes back; steps after it are run
                and reported again. None leaves the step out.
        """

    def on_note(self, sentence: str) -> None:
        """Something happened that a reader of the terminal wants to know."""

    def on_end(self, end: RunEnd) -> None:
        """The run is over."""

    def close(self) -> None:
        """Called once at the end, also after an error. No other method is called afterward."""


class Callbacks:
    """Tells all callbacks of a run.

    Args:
        own: Callbacks without which a run cannot go on, such as metrics.jsonl: their errors end it.
        others: All other callbacks: if one raises an error, this is reported, and it gets no more
            events.
    """

    def __init__(self, own: Sequence[Callback], others: Sequence[Callback]) -> None:
        self.own, self.others = [*own], [*others]

    def tell(self, event: Callable[[Callback], None]) -> None:
        """Tells all callbacks of an event.

        Args:
            event: Calls the method of a callback.
        """
        for callback in self.own:
            event(callback)
        for callback in [*self.others]:
            try:
                event(callback)
            except Exception as error:
                self.others.remove(callback)
                self._note(callback_failure(callback, error))

    def close(self) -> None:
        """Closes all callbacks, whatever one of them raises.

        Raises:
            Exception: The error that the first of `own` has raised.
        """
        raised: list[Exception] = []
        for callback in [*self.others, *self.own]:
            try:
                callback.close()
            except Exception as error:
                if callback in self.own:
                    raised.append(error)
                else:
                    self._note(callback_failure(callback, error))
        self.own, self.others = [], []
        if raised:
            raise raised[0]

    def _note(self, text: str) -> None:
        for callback in self.own:
            callback.on_note(text)
        if not self.own:
            print(f"gridformer: {text}", file=sys.stderr, flush=True)


def callback_failure(callback: Callback, error: Exception) -> str:
    """Returns a sentence about what a callback has raised."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return (
        f"the callback {callback.name} has failed ({text}, in {Path(last.filename).name}, line "
        f"{last.lineno}); it gets no more events, and the run goes on"
    )
