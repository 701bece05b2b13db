"""Reports what a run does to the callbacks of its first rank."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gridformer.checkpoint import weights
from gridformer.data.chat import CHAT_FILE
from gridformer.data.foreign import open_tokens, tokenizer_path
from gridformer.data.side_texts import write_label_names
from gridformer.data.tokenizer import SETTINGS
from gridformer.parallel.registry import describe_layout
from gridformer.train.callbacks import Callback, Callbacks, RunEnd, RunStart, Saved, State
from gridformer.train.console import Reporter, title_of
from gridformer.train.heartbeat import Heartbeat
from gridformer.train.loggers import open_loggers
from gridformer.train.metrics import Events, MetricsFile, plot_loss

if TYPE_CHECKING:
    from gridformer.checkpoint.save import SaveOutcome
    from gridformer.data import Batches
    from gridformer.mesh.process_group import World
    from gridformer.train.plan import Plan


class Journal:
    """Tells callbacks what a run does. Every rank has a journal, but only rank 0 tells.

    When it is created it tells that the run is starting; everything else it tells after `begin`.
    """

    def __init__(self, plan: Plan, world: World, callbacks: Sequence[Callback] = ()) -> None:
        self.run, self.out, self.world = plan.run, plan.out, world
        self.users = callbacks
        self.step = plan.resume_step
        self.told = Callbacks([], [])
        self.heart = Heartbeat(plan.out, plan.run.train.timeout_s)
        if world.rank == 0:
            self.told.own.append(self.heart)
            self.state("starting", plan.resume_step)

    def begin(self, plan: Plan, n_train_tokens: int, *batches: Batches) -> None:
        """Writes config and tokenizer to the run directory, opens its logs, and says what runs."""
        if self.world.rank:
            return
        self._prepare_folder(plan)
        metrics = MetricsFile(self.out, plan.resume_step)
        console = Reporter(plan, self.world, n_train_tokens, *batches)
        needed, loggers = open_loggers(self.run, self.out, plan.resume_step)
        self.told.own += [metrics, console, Events(self.out), *needed]
        self.told.others += [*loggers, *self.users]
        device = self.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        layout = self.run.layout
        start = RunStart(
            self.run, self.out, plan.resume_step, describe_layout(layout), layout.n_processes, name
        )
        self.told.tell(lambda callback: callback.on_start(start))

    def _prepare_folder(self, plan: Plan) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.yaml").write_text(self.run.to_yaml(), encoding="utf-8")
        data = self.run.data
        tokenizer = tokenizer_path(data)
        copies = {
            "tokenizer.json": tokenizer,
            SETTINGS: tokenizer.with_name(SETTINGS),
            CHAT_FILE: data.first_path / CHAT_FILE,
        }
        for name, source in copies.items():
            target = self.out / name
            if source.is_file() and not (target.exists() and source.samefile(target)):
                shutil.copyfile(source, target)
        if self.run.model.n_labels:
            folder = open_tokens(data.first_path, data.tokenizer, data.val_fraction)
            if folder.index.labels:
                write_label_names(self.out, folder.index.labels)
        if plan.start is not None:
            weights.keep_files(plan.start, self.out)

    def state(self, state: State, step: int | None = None, loss: float | None = None) -> None:
        """Tells what the run does now, or how it ended."""
        self.told.tell(lambda callback: callback.on_state(state, step, loss))

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Tells the metrics of one step, and of the evaluation after it."""
        self.step = metrics["step"]
        self.told.tell(lambda callback: callback.on_step(dict(metrics)))
        results = {
            name: value for name, value in metrics.items() if name.startswith(("val_", "test_"))
        }
        if results:
            self.told.tell(lambda callback: callback.on_evaluation(self.step, dict(results)))

    def skipped(self, step: int, scale: float) -> None:
        """Tells that the gradients of a step overflowed float16, and the new loss scale."""
        self.note(
            f"step {step}: gradients overflowed float16; nothing was updated, and the loss is now "
            f"scaled by {scale:g}"
        )

    def traced(self, path: Path, idle: float | None) -> None:
        """Tells where the timeline of a step was written, and how long pipeline ranks waited.

        `idle` is a fraction of the time that they computed; None if it is not known.
        """
        text = f"timeline of this step: {path} (open it in ui.perfetto.dev)"
        layout = self.run.layout
        if layout.pp > 1 and idle is not None:
            text += f"; ranks waited for {idle:.0%} of the time that they computed "
            text += f"({layout.ideal_idle:.0%} with equal stages)"
        self.note(text)

    def note(self, sentence: str) -> None:
        """Tells a sentence that a reader of the terminal wants to know."""
        self.told.tell(lambda callback: callback.on_note(sentence))

    def saved(self, outcome: SaveOutcome) -> None:
        """Tells what became of a save."""
        saved = Saved(
            outcome.step,
            outcome.target,
            outcome.n_bytes,
            outcome.seconds,
            outcome.stalled_s,
            outcome.waited_s,
            outcome.failure,
            tuple(outcome.removed),
            outcome.not_copied,
        )
        self.told.tell(lambda callback: callback.on_saved(saved))

    def diverged(self, step: int, why: str, back_to: int | None) -> None:
        """Tells what becomes of a step that was not finite."""
        self.told.tell(lambda callback: callback.on_diverged(step, why, back_to))

    def end(self, step: int, saved: int, done: bool) -> None:
        """Plots the losses and says how the run has ended."""
        if self.world.rank == 0:
            plot_loss(self.out, title_of(self.run), self.run)
        end = RunEnd("done" if done else "stopped", step, saved)
        self.told.tell(lambda callback: callback.on_end(end))

    def close(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Tells the error that ends the run, if there is one, and closes all callbacks.

        Raises:
            FullDiskError: A file of the run directory could not be completed.
        """
        if error is not None:
            self.state("failed")
            said = str(error).strip().splitlines()
            why = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
            end = RunEnd("failed", self.step, why=why)
            self.told.tell(lambda callback: callback.on_end(end))
        try:
            self.told.close()
        except Exception:
            self.heart.on_state("failed")
            raise
