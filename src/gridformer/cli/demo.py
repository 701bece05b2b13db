"""`gridformer demo`: everything from text to a trained model, in one to two minutes."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.utils.errors import DataError
from gridformer.utils.units import format_count

if TYPE_CHECKING:
    from rich.console import Console

RUN_FILE = "demo"
CORPUS = "python-stdlib"
VOCABULARY = 512
PROMPT = 'class Reader:\n    """'


def demo(out: Path = Path("runs/demo")) -> None:
    """Prepare real text, train a small GPT-2 on a 2x2 grid of processes, and show the result.

    The demo needs no download, because its text is the source code of the Python standard library.
    If it is stopped, run it again to resume.

    Args:
        out: The run directory.
    """
    from rich.console import Console

    from gridformer.config import load_run
    from gridformer.launch.plan import check_run_dir, plan_run
    from gridformer.launch.processes import warm_up
    from gridformer.launch.run import execute
    from gridformer.launch.run_lock import RunLock

    check_run_dir(out)
    out.mkdir(parents=True, exist_ok=True)  # or the error of it, before the text is prepared
    console = Console(highlight=False)
    warm_up("gridformer.launch.run")
    data = load_run(RUN_FILE).data.path
    console.rule("1. text", align="left")
    _prepare(data, console)
    console.rule("2. training", align="left")
    with RunLock() as lock:
        execute(plan_run(RUN_FILE, out=out, lock=lock))
    console.rule("3. result", align="left")
    _show_summary(out, console)


def _prepare(path: Path, console: Console) -> None:
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources
    from gridformer.data.tokenfolder import TokenFolder

    try:
        folder = TokenFolder.open(path)
    except DataError:
        sources = open_sources([CORPUS])
        with console.status("reading the source code of the Python standard library"):
            folder = prepare_corpus(sources, path, vocab_size=VOCABULARY)
    console.print(
        f"{folder.index.sources[0].source}: {format_count(folder.train.n_tokens)} tokens for "
        f"training, {format_count(folder.val.n_tokens)} held out, "
        f"vocabulary {folder.vocab_size:,} ({path})",
        soft_wrap=True,
    )


def _show_summary(out: Path, console: Console) -> None:
    """Prints losses, speed, a generated sample, and the paths of what the run wrote."""
    import torch
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from gridformer.checkpoint import find
    from gridformer.evaluate.beams import BeamSearch
    from gridformer.evaluate.continuing import Sampling
    from gridformer.evaluate.generate import Generation, answer
    from gridformer.evaluate.loading import load_model
    from gridformer.train.metrics import PLOT, TENSORBOARD, perplexity, read_metrics

    metrics = read_metrics(out)
    steps = [m for m in metrics if "loss" in m]
    evaluated = [m["val_loss"] for m in metrics if "val_loss" in m]
    first, last = evaluated[0], evaluated[-1]
    recent = [m["loss"] for m in steps[-20:]]
    loss = sum(recent) / len(recent)
    speed = statistics.median(m["tokens_per_s"] for m in steps)
    seconds = sum(m["step_time_s"] for m in steps)
    typed = shlex.quote(str(out))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # wraps long paths instead of truncating them
    rows = {
        "validation loss": f"{first:.2f} -> {last:.2f}  (perplexity {perplexity(first):,.0f} -> "
        f"{perplexity(last):.1f})",
        "training loss": f"{loss:.2f}  (perplexity {perplexity(loss):.1f}; mean of the last "
        f"{len(recent)} steps)",
        "speed": f"{speed:,.0f} tokens/s (median step); {format_count(steps[-1]['tokens'])} tokens "
        f"in {seconds:.0f} s of training steps",
        "loss curve": str(out / PLOT),
        "checkpoint": str(find.latest(out)),
        "TensorBoard": f"{_command('tensorboard')} --logdir {shlex.quote(str(out / TENSORBOARD))}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    how = Generation(Sampling(temperature=0.7, top_p=0.9, seed=2), BeamSearch(max_tokens=160))
    sample = "".join(answer(load_model(out, torch.device("cpu")), PROMPT, how))
    console.print(table)
    title = f"the model's continuation of 'class Reader:' at temperature {how.sampling.temperature}"
    console.print(Panel(Text(sample.rstrip()), title=title, title_align="left"))
    later = metrics[-1]["step"] + 100
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
