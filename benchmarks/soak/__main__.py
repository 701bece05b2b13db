"""Random faults hit training runs, which must lose nothing and explain every end.

    python -m benchmarks.soak                     # 100 faults: about half an hour on two cores
    python -m benchmarks.soak --faults 5 --seed 7 --keep runs/soak
    python -m benchmarks.soak --side-by-side 4    # on a machine with many cores

Run it in the repository's root on Linux. The same seed draws the same runs and faults; when a fault
comes, to the step, also depends on the machine. kinds.py holds what is done and what is expected,
draw.py the layouts. It prints Markdown on standard output and its progress on standard error, and
exits with 1 if anything was not as expected.
"""

from __future__ import annotations

import queue
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
import yaml

from benchmarks.common.machine import describe_machine
from benchmarks.common.page import write_page
from benchmarks.soak.disk import Disk, disk
from benchmarks.soak.draw import Drawn, draw
from benchmarks.soak.kinds import KINDS, SAVE_EVERY
from benchmarks.soak.life import STEPS, Life
from benchmarks.soak.report import Lived, page


def main(
    faults: Annotated[int, typer.Option(min=1, help="The number of faults.")] = 100,
    seed: Annotated[int, typer.Option(help="It decides the runs and their faults.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="A new folder, where the output of all starts is kept.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    side_by_side: Annotated[
        int, typer.Option(min=1, max=64, help="This many runs are disturbed at the same time.")
    ] = 1,
) -> None:
    """Disturb runs, compare each with an undisturbed one, and print a page in Markdown."""
    # A shell starts what runs in its background with Ctrl-C ignored, and so would start the runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if keep:
        keep.mkdir(parents=True)
        runs, left_out = soak(faults, seed, keep.resolve(), side_by_side)
    else:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            runs, left_out = soak(faults, seed, Path(folder), side_by_side)
    write_page(page(runs, describe_machine("benchmarks.soak"), left_out), out)
    raise typer.Exit(1 if any(run.all_problems() for run in runs) else 0)


def soak(
    n_faults: int, seed: int, folder: Path, side_by_side: int = 1
) -> tuple[list[Lived], list[str]]:
    """Runs everything in a folder.

    Returns:
        What became of the runs, and the kinds of faults that cannot be made here.
    """
    run_file = write_run(folder)
    with ExitStack() as at_end:
        disks: queue.SimpleQueue[Disk] = queue.SimpleQueue()  # one for each run at a time
        for number in range(side_by_side):
            small = at_end.enter_context(disk(folder / f"disk-{number}"))
            disks.put(small)
        kinds = [kind for kind in KINDS if small.small or kind.act != "full disk"]
        runs = draw(n_faults, seed, kinds)
        layouts = [*dict.fromkeys(drawn.layout for drawn in runs)]
        pool = at_end.enter_context(ThreadPoolExecutor(side_by_side))
        undisturbed = dict(
            zip(layouts, pool.map(lambda layout: _undisturbed(layout, run_file, folder), layouts))
        )

        def live(drawn: Drawn) -> Lived:
            small = disks.get()
            try:
                return _live(drawn, run_file, small, folder, undisturbed[drawn.layout])
            finally:
                disks.put(small)

        lived = [*pool.map(live, runs)]
    return lived, [kind.title for kind in KINDS if kind not in kinds]


def write_run(folder: Path) -> Path:
    """Writes a small token folder and the run file of all runs, and returns the run file."""
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources

    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        text = "".join(f"line {i} of file {number}: {i * number} and {i}\n" for i in range(120))
        (texts / f"{number}.txt").write_text(text)
    sources = open_sources([str(texts)])
    prepare_corpus(sources, folder / "tokens", vocab_size=301, val_fraction=0.2)
    run = {
        "name": "soak",
        "model": {
            "family": "gpt2",
            "n_layers": 2,
            "hidden_size": 32,
            "n_heads": 4,
            "max_seq_len": 16,
            "dropout": 0.1,
        },
        "data": {"path": str(folder / "tokens"), "seq_len": 16},
        "layout": {"scheme": "single"},
        "train": {
            "device": "cpu",
            "dtype": "float64",
            "steps": STEPS,
            "global_batch": 8,
            "save_every": SAVE_EVERY,
            "keep_checkpoints": 4,
            "eval_every": 0,
            "fallback": True,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def _undisturbed(layout: str, run_file: Path, folder: Path) -> Path:
    """Trains without a fault, and returns the last checkpoint."""
    # On a disk that is never filled.
    life = _life(Drawn(0, layout, ()), run_file, Disk(folder / "whole" / layout, False), folder)
    life.run()
    shutil.rmtree(life.temporary, ignore_errors=True)
    if life.problems:
        raise RuntimeError(f"the undisturbed run of {layout} failed: {life.problems}")
    return life.last()


def _live(drawn: Drawn, run_file: Path, small: Disk, folder: Path, undisturbed: Path) -> Lived:
    from benchmarks.soak.weights import difference, stored

    title = f"run {drawn.number}, {drawn.layout}"
    typer.echo(f"{title}: {'; '.join(fault.kind.title for fault in drawn.faults)}", err=True)
    life = _life(drawn, run_file, small, folder)
    life.run()
    shutil.rmtree(life.temporary, ignore_errors=True)
    found = None
    if life.last().exists():
        found = difference(stored(undisturbed), stored(life.last()))
    lived = Lived(
        drawn, life.moved, life.starts, life.met, found, life.problems, len(life.too_late)
    )
    for problem in lived.all_problems():
        typer.echo(f"{title}: PROBLEM: {problem}", err=True)
    if lived.all_problems():  # to look at
        shutil.copytree(life.out, folder / f"run-{drawn.number}", dirs_exist_ok=True)
    shutil.rmtree(life.out, ignore_errors=True)
    return lived


def _life(drawn: Drawn, run_file: Path, place: Disk, folder: Path) -> Life:
    logs = folder / "logs" / drawn.layout if not drawn.number else folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Not in `folder`, whose path may be too long for sockets.
    temporary = Path(tempfile.mkdtemp(prefix="soak-"))
    return Life(drawn, run_file, place, logs, temporary)


if __name__ == "__main__":
    typer.run(main)
