"""The demo: prepares real text, trains a small GPT-2 on a 2x2 grid, and prints a summary."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gridformer.checkpoint import find
from gridformer.config import load_run
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.data.tokenfolder import TokenFolder
from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.continuing import Sampling
from gridformer.evaluate.generate import answer
from gridformer.evaluate.loading import load_model
from gridformer.launch.plan import check_run_dir, plan_run
from gridformer.launch.processes import warm_up
from gridformer.launch.run import execute
from gridformer.launch.run_lock import RunLock
from gridformer.train.metrics import PLOT, TENSORBOARD, perplexity, read_metrics
from gridformer.utils.errors import DataError
from gridformer.utils.units import format_count

RUN_FILE = "demo"
CORPUS = "python-stdlib"
VOCABULARY = 512
PROMPT = 'class Reader:\n    """'
SAMPLING = Sampling(temperature=0.7, top_p=0.9, seed=2)


def run_demo(out: Path, run_file: Path | str = RUN_FILE) -> None:
    """Prepares the corpus if it is missing, trains or resumes the run, and prints a summary.

    Args:
        out: Run directory.
        run_file: Path of a run file, or the name of a shipped one.

    Raises:
        UserError: The run cannot be prepared, planned or trained; see `plan_run` and `execute`.
    """
    check_run_dir(out)
    out.mkdir(parents=True, exist_ok=True)  # or the error of it, before the text is prepared
    console = Console(highlight=False)
    warm_up("gridformer.launch.run")
    data = load_run(run_file).data.path
    console.rule("1. text", align="left")
    _prepare(data, console)
    console.rule("2. training", align="left")
    with RunLock() as lock:
        execute(plan_run(run_file, out=out, lock=lock))
    console.rule("3. result", align="left")
    show_summary(out, console)


def show_summary(out: Path, console: Console) -> None:
    """Prints losses, speed, a generated sample, and the paths of what the run wrote."""
    metrics = read_metrics(out)
    steps = [m for m in metrics if "loss" in m]
    evaluations = [m for m in metrics if "val_loss" in m]
    first, last = evaluations[0]["val_loss"], evaluations[-1]["val_loss"]
    recent = [m["loss"] for m in steps[-20:]]
    train_loss = sum(recent) / len(recent)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # wraps long paths instead of truncating them
    for name, value in (
        (
            "validation loss",
            f"{first:.2f} -> {last:.2f}  (perplexity {perplexity(first):,.0f} -> "
            f"{perplexity(last):.1f})",
        ),
        (
            "training loss",
            f"{train_loss:.2f}  (perplexity {perplexity(train_loss):.1f}; mean of the "
            f"last {len(recent)} steps)",
        ),
        ("speed", _speed(steps)),
        ("loss curve", str(out / PLOT)),
        ("checkpoint", str(find.latest(out))),
        (
            "TensorBoard",
            f"{_command('tensorboard')} --logdir {shlex.quote(str(out / TENSORBOARD))}",
        ),
    ):
        table.add_row(name, value)
    trained = load_model(out, torch.device("cpu"))
    sample = "".join(answer(trained, PROMPT, SAMPLING, BeamSearch(max_tokens=160)))
    console.print(table)
    title = f"the model's continuation of 'class Reader:' at temperature {SAMPLING.temperature}"
    console.print(Panel(Text(sample.rstrip()), title=title, title_align="left"))
    later, typed = metrics[-1]["step"] + 100, shlex.quote(str(out))
    console.print(
        Text.assemble(
            ("try next\n", "bold"),
            "  more text:     ",
            (f'{_command()} generate {typed} --prompt "import "\n', "cyan"),
            "  continue training from the same checkpoint with another layout:\n                 ",
            (f"{_command()} train {RUN_FILE} --out {typed} train.steps={later} ", "cyan"),
            ("layout.scheme=megatron layout.rows=1 layout.cols=4", "cyan"),
        ),
        soft_wrap=True,
    )


def _command(name: str = "gridformer") -> str:
    """Returns what to type to run a command of this environment: its path if it is not on PATH."""
    if shutil.which(name):
        return name
    return shlex.quote(os.path.relpath(Path(sys.executable).with_name(name)))


def _prepare(path: Path, console: Console) -> None:
    try:
        folder = TokenFolder.open(path)
    except DataError:
        sources = open_sources([CORPUS])
        with console.status("reading the source code of the Python standard library"):
            folder = prepare_corpus(sources, path, vocab_size=VOCABULARY)
    index = folder.index
    source = index.sources[0]
    console.print(
        f"{source.source}: {format_count(folder.train.n_tokens)} tokens for training, "
        f"{format_count(folder.val.n_tokens)} held out, vocabulary {folder.vocab_size:,} ({path})",
        soft_wrap=True,
    )


def _speed(steps: list[dict[str, Any]]) -> str:
    median = statistics.median(m["tokens_per_s"] for m in steps)
    seconds = sum(m["step_time_s"] for m in steps)
    return (
        f"{median:,.0f} tokens/s (median step); {format_count(steps[-1]['tokens'])} tokens in "
        f"{seconds:.0f} s of training steps"
    )
