"""The training loop: steps, data, evaluation, checkpoints, metrics, and stopping between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gridformer.checkpoint import checkpoint, weights
from gridformer.checkpoint.copies import with_copy
from gridformer.checkpoint.manifest import Manifest
from gridformer.comm import progress
from gridformer.comm.agree import first_text
from gridformer.data import RunData, open_training
from gridformer.data.samples.order import Rows
from gridformer.mesh.launch_env import rank_env
from gridformer.mesh.process_group import World
from gridformer.mesh.rendezvous import store_of
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.fsdp import drop_copies
from gridformer.parallel.pipeline import Event
from gridformer.train.attention import choose
from gridformer.train.callbacks import Callback
from gridformer.train.compile import agreed_uncompiled, compile_model
from gridformer.train.divergence import Recovery, diagnose, not_finite
from gridformer.train.evaluation import Evaluator, Measure, validation_sets
from gridformer.train.flops import Utilization
from gridformer.train.forward_backward import ReadRows
from gridformer.train.in_flight_steps import (
    StartedStep,
    StepResult,
    max_in_flight,
    start_largest_peak,
)
from gridformer.train.journal import Journal
from gridformer.train.loader import BatchLoader
from gridformer.train.metrics import expert_metrics
from gridformer.train.plan import Plan
from gridformer.train.saves import Saves, intact_checkpoint
from gridformer.train.step import Stepper
from gridformer.train.stop_protocol import StepDropped, StopProtocol
from gridformer.train.trace import StepTrace
from gridformer.utils.batch import Batch
from gridformer.utils.errors import CheckpointError, DivergedError
from gridformer.utils.signals import install
from gridformer.utils.tensors import DeviceEvent
from gridformer.utils.units import GIB

_SAVED_PER_S = 200e6  # bytes that a rank is expected to write in a second before it has written any


class Trainer:
    """Trains one run from its start, or from a checkpoint, to its last step."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        measures: Sequence[Measure] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        run = plan.run
        self.plan, self.run, self.world = plan, run, world
        self.stop = install()
        self.journal = Journal(plan, world, callbacks)
        decisions = plan.decisions
        self.axes = build_axes(run.layout, world.device.type, decisions.block)
        self.plan, verified = intact_checkpoint(plan, self.axes)
        plan = self.plan
        data = RunData.open(run.data)
        self.batches = open_training(run, data, plan.data_start)
        self.model = build_parallel(
            run.model,
            run.layout,
            self.axes,
            run.train.seed,
            world.device,
            run.train.dtype,
            decisions.choices,
        )
        uncompiled = agreed_uncompiled(run, world.device.type, self.axes.world)
        if not uncompiled:
            compile_model(self.model, splits=run.layout.splits_backward)
        train = run.train.model_copy(update={"compile": not uncompiled})
        self.stepper = Stepper(self.model, train, self.axes, run.layout)
        self.stepper.attention, chosen = choose(run, world.device, self.axes.world)
        sets = validation_sets(run, data)
        self.evaluate = Evaluator(
            self.stepper, sets, world.device, measures, run.train.sanity_checks
        )
        self.utilization = Utilization.of(run, world.device, self.model.recompute.stops_early)
        self.in_flight: deque[StartedStep] = deque()  # launched, and not read yet, oldest first
        self.max_in_flight = max_in_flight(run.train, world.device)
        self.tokens = 0
        self.evaluated = plan.resume_step if plan.done else -1  # the step of the last evaluation
        self.recovery = Recovery(train, plan.out, self.axes, plan.data_start)
        if plan.start is not None:
            weights.load_initial_weights(plan.start, self.model, self.axes)
        if plan.resume is not None:
            try:
                self.recovery.done = self._load(plan.resume, verified).divergences
            except CheckpointError as error:
                raise with_copy(error, run.train, plan.out) from None
            self.stepper.train = self.recovery.present
        self.saves = Saves(plan, self.stepper, self.axes, self.stop, self.journal)
        evaluated = [each.batches for each in sets]
        self.journal.begin(plan, data.n_train_tokens, self.batches, *evaluated)
        if run.train.compile == "auto" and world.device.type == "cuda":
            how = f"not compiled, because {uncompiled}" if uncompiled else "compiled"
            self.journal.note(f"train.compile=auto: blocks are {how}")
        if chosen:
            self.journal.note(chosen)

    def _load(self, folder: Path, verified: Manifest | None = None) -> Manifest:
        """Puts the model, the optimizer and the counts into the state of a checkpoint."""
        loaded = checkpoint.load(folder, self.model, self.stepper.updates, self.axes, verified)
        self.tokens = loaded.tokens
        self.stepper.scale.skipped = loaded.skipped
        if loaded.run["train"]["dtype"] == "float16":
            self.stepper.scale.go_on(loaded.loss_scale, loaded.good_steps)
        return loaded

    def fit(self) -> None:
        """Runs the remaining steps. When told to stop, it saves a checkpoint and returns early.

        Raises:
            DivergedError: The loss or the gradient norm of a step is not finite.
            SaveError: The last checkpoint could not be written.
        """
        train, step = self.run.train, self.plan.resume_step
        saved, told = step, False
        with ExitStack() as at_end:
            at_end.push(self.journal.close)
            self.stopping = self._stop_protocol()
            at_end.callback(self.stopping.close)
            self.stepper.executor.stops_before = self.stopping.stops_before
            self.ahead = self._loader(range(step, train.steps))
            at_end.callback(lambda: self.ahead.close())  # a rollback opens another
            at_end.callback(self.saves.finish)
            at_end.push(self.saves.note_error)
            if (step == 0 and train.eval_every) or self.evaluated < step == train.steps:
                with suppress(StepDropped):
                    evaluated = self._evaluate(step)
                    self.journal.metrics({"step": step, "tokens": self.tokens, **evaluated})
            while step < train.steps and not told:
                if self.stopping.begins("step", self.stepper.micro_batches):
                    break
                try:
                    self._start(step)
                except StepDropped:
                    break
                step, metrics, told = self._results(step + 1)
                self.stopping.ended()
                if metrics is None:
                    saved = step
                if not metrics:
                    continue
                if not told and self._is_due(step, train.eval_every):
                    with suppress(StepDropped):  # the next stop point ends the run
                        metrics |= self._evaluate(step)
                self.journal.metrics(metrics)
                self.journal.state("training", metrics["step"], metrics.get("loss"))
                if self._is_due(step, train.save_every):
                    try:
                        self._save(step, step == train.steps)
                    except DivergedError as error:
                        step, _ = self._diverged(error)
                    saved = step
            step, metrics, _ = self._results(step, left=0)
            if metrics:
                self.journal.metrics(metrics)
            with self.stop.held():  # until it is told, too, that all work is saved
                if saved < step or not self.saves.saver.all_saved():
                    self._save(step, last=True)
                    saved = step
                if self.evaluated == train.steps:
                    self.journal.state("done", step)
                    self.stop.done()
                else:
                    self.journal.state("stopped", step)
                    self.stopping.adopt_cause()
                    self.stop.saved()
            self.journal.end(step, saved, self.evaluated == train.steps)

    def _stop_protocol(self) -> StopProtocol:
        """Returns the object that decides where this run stops if it is told to."""
        place = rank_env()
        store = store_of(place) if place and self.world.size > 1 else None
        ends_at = self.stop.policy.ends_at
        n_bytes = sum(3 * p.numel() * p.element_size() for p in self.model.parameters())
        save_s, world = n_bytes / _SAVED_PER_S, self.world
        return StopProtocol(self.stop, world.rank, world.size, store, ends_at, save_s)

    def _start(self, step: int) -> None:
        """Launches a step, or runs it if its timeline is written."""
        began = DeviceEvent(self.stepper.device)
        progress.at_step(step + 1)
        read = partial(self.ahead.read, step)
        if step + 1 == self.run.train.trace_step:
            started = self._traced(step, read)
        else:
            started = self.stepper.start(step, read, self.stop.requested)
        waited_from, waited_to = self.ahead.waited
        started.began, started.data_wait_s = began, waited_to - waited_from
        started.peak = start_largest_peak(self.world.device, self.axes.world)
        self.in_flight.append(started)

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether what is done after each `every` steps is done after this one."""
        return step == self.run.train.steps or (every > 0 and step % every == 0)

    def _results(
        self, step: int, left: int | None = None
    ) -> tuple[int, dict[str, Any] | None, bool]:
        """Waits for the results of started steps, and does what is due if one was not finite.

        If a rank was told to stop, it waits for all of them.

        Args:
            step: How many steps have been started.
            left: How many of them may be left in flight; None decides.

        Returns:
            How many steps are started or done now; the metrics of the last step that it waited for,
            not written yet, empty if there is none, and None after going back to a checkpoint; and
            whether a rank was told to stop.
        """
        if left is None:
            train = self.run.train
            due = any(self._is_due(step, every) for every in (train.eval_every, train.save_every))
            left = 0 if due else self.max_in_flight
        metrics: dict[str, Any] = {}
        told = False
        try:
            while len(self.in_flight) > (0 if told else left):
                started = self.in_flight.popleft()
                try:
                    result = started.result()
                finally:
                    if metrics:  # of the step before it
                        self.journal.metrics(metrics)
                told = told or result.flagged
                metrics = self._metrics_of(started, result)
        except DivergedError as error:
            return *self._diverged(error), False
        return step, metrics, told

    def _metrics_of(self, started: StartedStep, result: StepResult) -> dict[str, Any]:
        """Counts a step that is over, and returns its line of metrics.jsonl."""
        step, seconds = started.step, started.seconds
        peak = {} if started.peak is None else {"peak_memory_gib": started.peak.read()[0] / GIB}
        self.recovery.succeeded()
        self.tokens += result.tokens
        self.saves.tell()
        self.stopping.save_s = self.saves.save_s or self.stopping.save_s
        scale: dict[str, Any] = {}
        if self.run.train.dtype == "float16":
            scale = {"loss_scale": self.stepper.scale.scale, "skipped": result.skipped}
            if result.skipped:
                self.journal.skipped(step + 1, self.stepper.scale.scale)
        parts = {f"loss_{part}": loss for part, loss in result.losses.items()}
        metrics = {
            "step": step + 1,
            "loss": result.loss,
            **(parts if len(parts) > 1 else {}),
            **({} if result.skipped else {"grad_norm": result.grad_norm}),
            "lr": result.lr,
            **scale,
            "tokens": self.tokens,
            "tokens_per_s": result.tokens / seconds,
            "step_time_s": seconds,
            "data_wait_s": started.data_wait_s,
            **expert_metrics(result.experts, step),
            **self.utilization.metrics(seconds),
            **peak,
            **self.saves.saver.metrics(),
        }
        if self.recovery.done.rollbacks:
            metrics["rollbacks"] = self.recovery.done.rollbacks
        return metrics

    def _diverged(self, error: DivergedError) -> tuple[int, dict[str, Any] | None]:
        """Does what `train.on_divergence` says about a step that was not finite.

        Returns:
            How many steps are done now, and the metrics of a step that is left out; None after
            going back to a checkpoint.

        Raises:
            DivergedError: The run ends.
        """
        step = error.step
        with self._loader(range(step, step + 1)) as again:
            diagnosis = diagnose(self.stepper, step, partial(again.read, step))
        self.saves.finish()  # it may be the checkpoint to go back to
        told, back_to, folder = self.recovery.decide(error, diagnosis)
        self.ahead.close()
        self.in_flight.clear()  # those after it have updated nothing
        self.journal.diverged(step + 1, told, back_to)
        left_out = None
        if folder is None:
            step += 1
            self.stepper.scale.skipped += 1
            self.tokens += diagnosis.tokens
            left_out = {"step": step, "left_out": diagnosis.cause, "tokens": self.tokens}
        else:
            step = self._load(folder).step
            self.evaluated = min(self.evaluated, step)
            for parameter in self.model.parameters():
                drop_copies(parameter)
            self.stepper.train = self.recovery.present
        self.ahead = self._loader(range(step, self.run.train.steps))
        return step, left_out

    def _traced(self, step: int, read: ReadRows) -> StartedStep:
        """Runs a step and writes its timeline to the run directory."""
        trace = StepTrace(self.axes)
        with trace.record() as told:

            def read_told(rows: Rows) -> Batch:
                batch = read(rows)
                told(Event("wait for data", -1, -1, *self.ahead.waited))
                return batch

            self.stepper.executor.on_action = told
            try:
                started = self.stepper.start(step, read_told, self.stop.requested)
                started.wait()  # `_results` judges it
            finally:
                self.stepper.executor.on_action = None
        path = self.plan.out / f"trace-step-{step + 1}.json"
        idle = trace.write(path)
        self.journal.traced(path, idle)
        return started

    def _evaluate(self, step: int) -> dict[str, float]:
        self.journal.state("evaluating")
        metrics = self.evaluate(step, self.stopping, last=step == self.run.train.steps)
        self.evaluated = step
        return metrics

    def _save(self, step: int, last: bool) -> None:
        """Saves a checkpoint. All ranks call it together.

        Raises:
            DivergedError: A parameter or moment is not finite.
            SaveError: It is the last one and could not be written.
        """
        if first_text(not_finite(self.stepper), self.axes.world):
            why = f"step {step}: what is to be saved is not finite, so it is not saved"
            raise DivergedError(why, step - 1, done=True)
        manifest = checkpoint.manifest_of(
            step,
            self.tokens,
            self.run,
            self.stepper.scale,
            self.plan.data_start,
            self.plan.data,
            self.recovery.done,
        )
        self.saves.save(manifest, self.stepper, last)
        self.stopping.save_s = self.saves.save_s or self.stopping.save_s

    def _loader(self, steps: Sequence[int]) -> BatchLoader:
        """Starts to make this device's rows of some global batches."""
        return BatchLoader(self.batches, self.stepper.split.all_rows, steps, self.world.device)
