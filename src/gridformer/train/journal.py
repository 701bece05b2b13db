"""What a run tells about itself: heartbeat, metrics, TensorBoard, and lines on the terminal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.checkpoint import weights
from gridformer.data.chat import CHAT_FILE
from gridformer.data.opening import tokenizer_of
from gridformer.train.console import Reporter, title_of
from gridformer.train.heartbeat import Heartbeat, State
from gridformer.train.metrics import MetricsLog, plot_loss

if TYPE_CHECKING:
    from gridformer.checkpoint.saver import Report
    from gridformer.data import Batches
    from gridformer.mesh.process_group import World
    from gridformer.train.plan import Plan


class Journal:
    """Tells what a run does. Every rank has one, and all but that of rank 0 say nothing.

    It tells that the run is starting as soon as it is made, and the rest from `begin` on.

    Args:
        plan: The checked run.
        world: The processes of the run.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self.run, self.out, self.world = plan.run, plan.out, world
        self.heart: Heartbeat | None = None
        self.log: MetricsLog | None = None
        self.report: Reporter | None = None
        if world.rank == 0:
            self.heart = Heartbeat(plan.out, plan.run.train.timeout_s)
            self.heart.tell("starting", plan.resume_step)

    def begin(self, plan: Plan, n_train_tokens: int, batches: Batches) -> None:
        """Writes config and tokenizer to the run directory, opens its logs, and says what runs.

        Args:
            plan: The run, with the checkpoint that it resumes from.
            n_train_tokens: Tokens of training text.
            batches: The training batches.
        """
        if self.world.rank:
            return
        self._prepare_folder(plan)
        self.log = MetricsLog(self.out, plan.resume_step)
        self.report = Reporter(plan, self.world, n_train_tokens, batches)

    def _prepare_folder(self, plan: Plan) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.yaml").write_text(self.run.to_yaml(), encoding="utf-8")
        shutil.copyfile(tokenizer_of(self.run.data), self.out / "tokenizer.json")
        if (self.run.data.first_path / CHAT_FILE).is_file():
            shutil.copyfile(self.run.data.first_path / CHAT_FILE, self.out / CHAT_FILE)
        if plan.start is not None:
            weights.keep_files(plan.start, self.out)

    def state(self, state: State, step: int | None = None, loss: float | None = None) -> None:
        """Tells what the run does now, or how it ended; see `Heartbeat.tell`."""
        if self.heart:
            self.heart.tell(state, step, loss)
        if state in ("evaluating", "saving"):
            self.say(state)

    def say(self, what: str) -> None:
        """Shows on the terminal what the run does between steps."""
        if self.report:
            self.report.say(what)

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Writes and shows the metrics of one step."""
        if self.log and self.report:
            self.log.write(metrics)
            self.report.step(metrics)

    def skipped(self, step: int, scale: float) -> None:
        """Tells that the gradients of a step overflowed float16, and the new loss scale."""
        if self.report:
            self.report.skipped(step, scale)

    def traced(self, path: Path, idle: float | None) -> None:
        """Tells where the timeline of a step was written, and how long pipeline ranks waited."""
        if self.report:
            self.report.traced(path, idle, self.run.layout)

    def saved(self, one: Report) -> None:
        """Tells what became of a save."""
        if self.report:
            self.report.saved(one)

    def tell(self, sentence: str) -> None:
        """Tells what has happened to the run."""
        if self.report:
            self.report.tell(sentence)

    def back_to(self, step: int) -> None:
        """Removes the metrics of the steps after `step`, which run again."""
        if self.log:
            self.log.close()
            self.log = MetricsLog(self.out, step)

    def end(self, step: int, saved: int) -> None:
        """Plots the losses and says how the run has ended.

        Args:
            step: The last step that is done.
            saved: The step of the last checkpoint.
        """
        if self.report:
            plot_loss(self.out, title_of(self.run))
            self.report.end(step, saved, stopped=step < self.run.train.steps)

    def close(self) -> None:
        """Closes what `begin` has opened."""
        for opened in (self.report, self.log):
            if opened:
                opened.close()
