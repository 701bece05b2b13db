"""The terminal output of a training run. Used on rank 0 only."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from gridformer.config import FINE_TUNING
from gridformer.data.samples.batches import alike, remarks
from gridformer.models import describe_parameters
from gridformer.parallel.auto.decisions import notes
from gridformer.parallel.registry import describe_layout
from gridformer.train.callbacks import Callback, RunEnd, Saved, State
from gridformer.train.metrics import spelled, token_perplexity
from gridformer.utils.units import GIB, counted, format_bytes, format_count, three_digits

if TYPE_CHECKING:
    from gridformer.config import RunConfig
    from gridformer.data import Batches
    from gridformer.mesh.process_group import World
    from gridformer.train.plan import Plan

_LINE_EVERY_S = 5.0  # if the output is not a terminal
_BAR_LEAST = 10  # columns of a terminal that the bar itself has


class _RunConsole(Console):
    """Stops printing if the reader of the output is gone, such as `head`; the run goes on."""

    def on_broken_pipe(self) -> None:
        """Closes standard output, where Console would end the process."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Reporter(Callback):
    """Prints a summary, a progress bar (without a terminal, lines now and then), and the end."""

    def __init__(self, plan: Plan, world: World, n_train_tokens: int, *batches: Batches) -> None:
        self.plan = plan
        self.on_gpu = world.device.type == "cuda"
        self.console = _RunConsole(highlight=False)
        self._last_line = 0.0
        run = plan.run
        self._print(f"{title_of(run)}, vocabulary {run.model.vocab_size:,}")
        self._print(f"  {world.why}; {run.train.dtype}")
        lengths = f"{run.source_len} + {run.seq_len}" if run.source_len else str(run.seq_len)
        self._print(
            f"  {format_count(n_train_tokens)} tokens of text, "
            f"{counted(batches[0].n_samples, 'sample')}; "
            f"batches of {run.train.global_batch} x {lengths} tokens"
        )
        for note in notes(run):
            self._print(f"  {note}")
        for remark in [*remarks(batches[0]), *alike(*batches)]:
            self._print(f"  {remark}")
        if plan.start is not None:
            self._print(f"  {plan.start.describe()}")
        if plan.resume is not None:
            self._print(f"  resuming after step {plan.resume_step} from {plan.resume}")
        for change in plan.changes:
            self._print(f"    {change}")
        if plan.data_start:
            self._print(f"  the order of samples began anew after step {plan.data_start}")
        self.progress = bar_of_steps(self.console, disable=not sys.stdout.isatty())
        self._task = self.progress.add_task(
            "starting", total=run.train.steps, completed=plan.resume_step
        )
        self.progress.start()

    def on_state(self, state: State, step: int | None = None, loss: float | None = None) -> None:
        if state in ("evaluating", "saving"):
            self.progress.update(self._task, description=state)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of one step, given its line of metrics.jsonl."""
        step = metrics["step"]
        parts = [f"loss {metrics['loss']:.3f}"] if "loss" in metrics else []
        if "val_loss" in metrics:
            val = metrics["val_loss"]
            words = token_perplexity(self.plan.run, metrics)
            scores = _scores(metrics) or (f"perplexity {words:,.1f}" if words else "")
            of_sets = set_losses(self.plan.run, metrics)
            details = "; ".join(filter(None, (scores, of_sets)))
            parts.append(f"val {val:.3f}" + (f" ({details})" if details else ""))
        parts += [
            f"{spelled(key.removeprefix('val_'))} {value:.1f}"
            for key, value in metrics.items()
            if key.startswith("val_bleu")
        ]
        if "experts_fullest" in metrics:
            parts.append(f"experts {metrics['experts_fullest']:.1f}x")
        if "tokens_per_s" in metrics:
            parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
            parts.append(_speed(metrics, "GPU" if self.on_gpu else "process"))
        if "peak_memory_gib" in metrics:
            parts.append(f"peak {format_bytes(metrics['peak_memory_gib'] * GIB)}")
        text = "  ".join(parts)
        beside = beside_bar(parts, self.console.width, self.plan.run.train.steps)
        self.progress.update(self._task, completed=step, description=beside)
        now = time.monotonic()
        if "val_loss" in metrics or (
            self.progress.disable and now - self._last_line > _LINE_EVERY_S
        ):
            self._last_line = now
            self._print(f"  step {step:>5}/{self.plan.run.train.steps}  {text}")

    def on_note(self, sentence: str) -> None:
        self._print(f"  {sentence}")

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        self._print(f"  {why}")

    def on_saved(self, saved: Saved) -> None:
        waited = f"training waited for {three_digits(saved.stalled_s)} s"
        if saved.waited_s > 0.5 * saved.stalled_s and saved.waited_s > 0.1:
            waited += ", mostly for the save before it"
        if saved.removed:
            self._print(f"  the disk was full: removed {', '.join(saved.removed)}")
        if saved.failure:
            self._print(
                f"  step {saved.step}: no checkpoint was saved ({saved.failure}); {waited}. The "
                "run goes on, and its next save tries again"
            )
        else:
            self._print(
                f"  checkpoint of step {saved.step} is complete: {format_bytes(saved.n_bytes)} in "
                f"{three_digits(saved.seconds)} s; {waited}"
            )

        if saved.not_copied:
            self._print(
                f"  checkpoint of step {saved.step} could not be copied to "
                f"{self.plan.run.train.checkpoint_to} ({saved.not_copied}): the next save, the "
                "end of all steps or the next start of the run copies the newest one"
            )

    def on_end(self, end: RunEnd) -> None:
        """Stops the progress bar and prints how the run ended; the launcher says why one failed."""
        self.close()
        out = self.plan.out
        if end.how == "stopped":
            self._print(
                f"  stopped after step {end.step}; checkpoint of step {end.saved} saved: run the "
                "same command to resume from it"
            )
        elif end.how == "done":
            self._print(
                f"  done: {out}/loss.png, metrics.jsonl, tensorboard/, checkpoints/\n"
                f"  next: {command_after(self.plan)}"
            )

    def close(self) -> None:
        self.progress.stop()

    def _print(self, text: str) -> None:
        """Prints a line without folding it, so that it can be searched and copied."""
        self.console.print(text, soft_wrap=True)


def bar_of_steps(console: Console, *, disable: bool = False) -> Progress:
    """Returns a bar between the number of steps, and a text and the time left; only it shrinks."""
    return Progress(
        TextColumn("  step"),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        console=console,
        disable=disable,
    )


def beside_bar(parts: Sequence[str], width: int, n_steps: int) -> str:
    """Returns the text beside a bar: as many of the first parts as a terminal has room for.

    With more of them rich would cut the number of steps and the time left.
    """
    around = len(f"  step {n_steps}/{n_steps}   0:00:00") + _BAR_LEAST
    shown = list(parts)
    while len(shown) > 1 and around + len("  ".join(shown)) > width:
        shown.pop()
    return "  ".join(shown)


def title_of(run: RunConfig) -> str:
    """Returns a title such as `demo: demo-4m (3.87M parameters) on optimus 2x2`."""
    model = run.model.family if run.model.name == "custom" else run.model.name
    size = describe_parameters(run.model)  # this rank may hold only some stages
    return f"{run.name}: {model} ({size}) on {describe_layout(run.layout)}"


def set_losses(run: RunConfig, metrics: Mapping[str, Any]) -> str:
    """Returns the losses of named sets, such as `web 2.310, code 1.204, test news 2.115`."""
    losses = {one.name: metrics.get(f"val_loss_{one.name}") for one in run.data.validation_sets}
    losses |= {f"test {one.name}": metrics.get(f"test_loss_{one.name}") for one in run.data.test}
    return ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items() if name and loss)


def command_after(plan: Plan) -> str:
    """Returns a command that uses the model of a run that is over."""
    out = shlex.quote(str(plan.out))
    if plan.run.task in FINE_TUNING:
        tasks = shlex.quote(f"examples:{plan.run.data.first_path}")
        return f"gridformer evaluate {out} --tasks {tasks}"
    chat = " --chat" if plan.run.task == "chat" else ""
    return f'gridformer generate {out}{chat} --prompt "..."'


def _scores(metrics: Mapping[str, Any]) -> str:
    """Returns the scores of an evaluation, such as `accuracy 0.843, F1 0.791`; empty if none."""
    others = re.compile("val_(loss|bleu)|.*_(has|no)_answer")
    return ", ".join(
        f"{spelled(name.removeprefix('val_'))} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("val_") and not others.match(name)
    )


def _speed(metrics: Mapping[str, Any], device: str) -> str:
    """Returns `312 TFLOP/s per GPU`, or with a known peak `312 TFLOP/s per GPU (MFU 32%)`.

    Below 0.1 TFLOP/s, the unit is GFLOP/s or MFLOP/s.

    With recomputation, the utilization of the hardware is larger and is added.
    """
    speed = metrics["model_tflops"]
    size, unit = (1.0, "T") if speed >= 0.1 else (1e3, "G") if speed >= 1e-4 else (1e6, "M")
    text = f"{three_digits(size * speed)} {unit}FLOP/s per {device}"
    if "mfu" not in metrics:
        return text
    rest = "" if metrics["hfu"] == metrics["mfu"] else f", HFU {metrics['hfu']:.1%}"
    return f"{text} (MFU {metrics['mfu']:.1%}{rest})"
