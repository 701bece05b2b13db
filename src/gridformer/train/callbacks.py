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
    """A run that starts, or that goes on from a checkpoint."""

    run: RunConfig  # its settings, resolved
    run_dir: Path
    step: int  # the steps that are done already; 0 for a new run
    layout: str  # A short description of the layout, such as `optimus 2x2`
    devices: int  # the number of processes, each of which has one device
    device: str  # the name of the device, such as `cpu`


@dataclass(frozen=True)
class Saved:
    """The result of a save."""

    step: int  # the step of the checkpoint
    path: str  # the folder of the checkpoint
    n_bytes: int  # the bytes of all its files
    seconds: float  # the time from its start to its end
    stalled_s: float  # the seconds for which training waited for it and for the save before it
    waited_s: float  # the part of `stalled_s` for which training waited for the save before it
    failure: str = ""  # why there is no checkpoint; empty if it is complete
    removed: tuple[str, ...] = ()  # checkpoints that were removed to make room on a full disk
    # Why it is not at `train.checkpoint_to`; empty if it is, or if there is no such place
    not_copied: str = ""


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended."""

    # `done` with all steps, `stopped` before the last one with its work saved, or `failed`
    how: Literal["done", "stopped", "failed"]
    step: int  # the last step that is done
    saved: int | None = None  # the step of the last checkpoint; None if the run has failed
    why: str = ""  # the error of a run that has failed


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
        """Tells all callbacks of an event, which calls the method of a callback."""
        for callback in self.own:
            event(callback)
        for callback in [*self.others]:
            try:
                event(callback)
            except Exception as error:
                self.others.remove(callback)
                self._note(callback, error)

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
                    self._note(callback, error)
        self.own, self.others = [], []
        if raised:
            raise raised[0]

    def _note(self, failed: Callback, error: Exception) -> None:
        """Says what a callback has raised."""
        last, said = traceback.extract_tb(error.__traceback__)[-1], str(error).strip().splitlines()
        what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
        text = (
            f"the callback {failed.name} has failed ({what}, in {Path(last.filename).name}, line "
            f"{last.lineno}); it gets no more events, and the run goes on"
        )
        for callback in self.own:
            callback.on_note(text)
        if not self.own:
            print(f"gridformer: {text}", file=sys.stderr, flush=True)
