"""One report on a machine or cluster: is every layout exact there, how fast, and in what memory.

    python -m benchmarks.gpu.cluster --out report.md                 all GPUs of this machine
    torchrun ... -m benchmarks.gpu.cluster --out report.md           all GPUs of several machines
    python -m benchmarks.gpu.cluster --device cpu --quick            to try the code without a GPU

`one_machine.sh` and `four_machines.sh` in this folder set everything up and run it. The report is
Markdown and is written line by line, so if a layout fails, what was found before it is kept, and
the layout is named last. It says for each layout:

- exactness: the largest relative difference to one device, in float64 and float32;
- speed: the median step of a GPT-2 in bfloat16, tokens and FLOP per second, and the share of the
  device's peak (MFU) where the peak is known;
- memory: the measured peak beside what `gridformer memory` estimates;
- overlap: how long messages are under way, and what share of this computation hides.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.gpu import numerics
from benchmarks.gpu.layouts import layouts_of, usable
from benchmarks.gpu.overlap import Overlap, profile
from benchmarks.gpu.release import released
from benchmarks.gpu.report import describe, table
from benchmarks.gpu.step_report import step_flops
from gridformer.config import LayoutConfig, RunConfig, TrainConfig, shipped_model
from gridformer.launch import launch
from gridformer.mesh.groups import objects_group
from gridformer.mesh.launch_env import rank_env
from gridformer.mesh.process_group import World, close_process_groups, init_process_groups
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.validation import check_layout
from gridformer.train.flops import peak_tflops
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import GIB

WARM_UP = 3
ROOM = 0.92  # the share of a GPU's memory that an estimate may use; the rest is CUDA's and NCCL's


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        model: A shipped GPT-2, which is timed.
        sequences: Sequences per device and step.
        steps: Timed steps of each layout.
        only: Titles of layouts; empty for all.
        peak_tflops: The device's dense bfloat16 peak, for MFU; 0 for that of its data sheet.
        out: The file to which the report is written.
        device: Where to run.
        quick: Whether to use tiny sizes.
    """

    model: str
    sequences: int
    steps: int
    only: tuple[str, ...]
    peak_tflops: float
    out: Path
    device: Literal["cuda", "cpu"]
    quick: bool


class Writer:
    """Writes the report on rank 0 and does nothing on the others."""

    def __init__(self, world: World, out: Path) -> None:
        self.file = out if world.rank == 0 else None
        self.began = time.monotonic()
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("", encoding="utf-8")

    def write(self, text: str) -> None:
        if self.file is not None:
            print(text, flush=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(text + "\n")

    def progress(self, text: str) -> None:
        if self.file is not None:
            print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)


def work(n: int, options: Options) -> None:
    """Measures everything; the work of one rank."""
    set_numerics(TrainConfig())  # as a run does: TF32 and sums in less than float32 are off
    world = init_process_groups(options.device, n, 600.0)
    objects_group()  # for all layouts, so that none of them makes and destroys it
    if world.device.type == "cuda" and not options.peak_tflops:
        known = peak_tflops(torch.cuda.get_device_name(), "bfloat16")
        options = replace(options, peak_tflops=known or 0.0)
    writer = Writer(world, options.out)
    layouts = layouts_of(n)
    layouts = {title: layouts[title] for title in options.only or layouts}
    title = "CPU processes" if world.device.type == "cpu" else torch.cuda.get_device_name()
    about = describe_machine("benchmarks.gpu.cluster")
    writer.write(
        f"# gridformer on {n} x {title}\n\n{describe(world.device)}; {n} processes on "
        f"{_n_machines(n)} machine(s) over {world.backend}; {about['date']}, commit "
        f"{about['commit'] or 'unknown'}\n\n`{command_line('benchmarks.gpu.cluster')}`"
    )
    if options.quick:
        writer.write("\nTiny sizes: this shows that the code works; the figures mean nothing.")
    if world.device.type == "cuda" and world.rank == 0:
        writer.write(f"\n```\n{_topology()}\n```")
    exactness(world, layouts, options, writer)
    speed(world, layouts, options, writer)
    writer.progress("done")
    close_process_groups()


def _n_machines(n: int) -> int:
    place = rank_env()
    return max(1, n // place.local_size) if place else 1


def _topology() -> str:
    try:
        found = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi topo -m: {error}"
    return found.stdout.rstrip()


# --------------------------------------------------------------------------- exactness


def exactness(
    world: World, layouts: dict[str, dict[str, Any]], options: Options, writer: Writer
) -> None:
    """Writes the largest differences to one device for every layout."""
    config = numerics.model_of(options.quick)
    dtypes = [*numerics.TOLERANCE]
    columns = ["layout", *(f"{dtype} {what}" for dtype in dtypes for what in numerics.COMPARED)]
    writer.write("\n## Exactness\n\n" + table([*columns, "verdict"], []))
    for title, layout in layouts.items():
        writer.progress(f"exactness: {title}")
        size, row, within = _divisible(layout, 8), [title], True
        for dtype in dtypes:
            with released(world.device):
                worst = numerics.differences(world.device.type, layout, config, dtype, size)
            most = _largest([worst[what] for what in numerics.COMPARED], world)
            within = within and all(value < numerics.TOLERANCE[dtype] for value in most)
            row += [f"{value:.1e}" for value in most]
        writer.write("| " + " | ".join([*row, "equal" if within else "TOO FAR APART"]) + " |")
    tolerances = ", ".join(f"{dtype} {t:g}" for dtype, t in numerics.TOLERANCE.items())
    writer.write(
        f"\nThe largest relative difference to one device on any rank, for h={config.hidden_size}, "
        f"s={config.max_seq_len}, N={config.n_layers}, v={config.vocab_size}, dropout "
        f"{config.dropout:g} and 3 AdamW steps. Tolerances: {tolerances}; TF32 is off."
    )


def _divisible(layout: dict[str, Any], least: int) -> int:
    """Returns a global batch of at least `least` sequences that a layout divides."""
    plan = LayoutConfig(**layout)
    unit = plan.dp * plan.micro_batches * plan.rows * plan.branches
    return unit * max(1, -(-least // unit))


def _largest(values: list[float], world: World) -> list[float]:
    """Returns the largest of each value on any rank; NaN if one is NaN."""
    mine = torch.tensor(values, dtype=torch.float64, device=world.device)
    mine = torch.where(mine.isnan(), torch.inf, mine)
    if world.size > 1:
        dist.all_reduce(mine, dist.ReduceOp.MAX)
    found: list[float] = mine.tolist()
    return found


# --------------------------------------------------------------------------- speed and memory


COLUMNS = (
    "layout",
    "recompute",
    "step, ms",
    "tokens/s a device",
    "TFLOP/s a device",
    "MFU",
    "peak, GiB",
    "estimated",
    "messages, ms",
    "hidden",
)


def speed(
    world: World, layouts: dict[str, dict[str, Any]], options: Options, writer: Writer
) -> None:
    """Writes step time, memory and overlap of every layout."""
    writer.write(f"\n## Speed and memory of {options.model}\n\n" + table(COLUMNS, []))
    for title, layout in layouts.items():
        writer.progress(f"speed: {title}")
        try:
            run, estimated = _agreed(_run_of(layout, options), world)
        except ConfigError as error:
            writer.write(f"| {title} | {'; '.join(error.problems)} |" + " |" * (len(COLUMNS) - 2))
            continue
        with released(world.device):
            cells = _measured(run, world, estimated, options)
        writer.write("| " + " | ".join([title, run.train.recompute, *cells]) + " |")
    writer.write(
        f"\n{options.sequences} sequences a device and step, bfloat16, AdamW; the median of "
        f"{options.steps} steps after {WARM_UP} (quartiles in brackets), on the slowest rank. FLOP "
        "are the model's (6PT + 12NhsT), without what is recomputed. The peak is that of the "
        "fullest rank as torch's allocator counts it; the estimate is `gridformer memory`'s for "
        "the fullest rank. Messages: milliseconds of rank 0's step in which at least one is under "
        "way, waiting for peers included; hidden: the share in which something computes, too."
    )


def _run_of(layout: dict[str, Any], options: Options) -> RunConfig:
    plan = LayoutConfig(**layout)
    unit = _divisible(layout, 1)
    batch = unit * max(1, round(options.sequences * plan.n_processes / unit))
    model: Any = numerics.model_of(True).model_dump() if options.quick else {}
    run = RunConfig.model_validate(
        {
            "model": model or shipped_model(options.model),
            "layout": layout,
            "data": {"path": "."},
            "train": {
                "global_batch": batch,
                "dtype": "bfloat16",
                "device": options.device,
                "steps": 1000,
                "sanity_checks": False,
            },
        }
    )
    check_layout(run)
    return run


def _agreed(run: RunConfig, world: World) -> tuple[RunConfig, float]:
    """Chooses the least recomputation that fits, by rank 0's estimate, which all ranks take.

    Returns:
        The run, and the estimated bytes of its fullest rank.
    """
    answer: list[Any] = [None]
    if world.rank == 0:
        room = float("inf")
        if world.device.type == "cuda":
            room = ROOM * torch.cuda.get_device_properties(world.device).total_memory
        # In another process, because an estimate plays a rank in a process group of its own.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            for mode in ("none", "full"):
                tried = run.model_copy(
                    update={"train": run.train.model_copy(update={"recompute": mode})}
                )
                peak = pool.submit(_estimated, tried).result()
                answer = [(mode, peak)]
                if peak <= room:
                    break
            else:
                answer = [("", peak)]
    if world.size > 1:
        dist.broadcast_object_list(answer, 0)
    mode, peak = answer[0]
    if not mode:
        raise ConfigError(f"needs {peak / GIB:.1f} GiB a device even with recompute: full")
    return run.model_copy(
        update={"train": run.train.model_copy(update={"recompute": mode})}
    ), float(peak)


def _estimated(run: RunConfig) -> float:
    """Returns the estimated peak of the fullest rank in bytes; the work of another process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    from gridformer.memory.estimate import estimate_rank
    from gridformer.memory.ranks import largest_ranks

    return float(max(estimate_rank(run, rank).peak for rank in largest_ranks(run)))


def _measured(run: RunConfig, world: World, estimated: float, options: Options) -> list[str]:
    """Returns the cells of a layout's row, from the step time on."""
    device, config = world.device, run.model
    decisions = decide_run(run)
    axes = build_axes(run.layout, device.type, decisions.block)
    model = build_parallel(
        config, run.layout, axes, run.train.seed, device, run.train.dtype, decisions.choices
    )
    run_step = Stepper(model, run.train, axes, run.layout).start_ahead
    generator = torch.Generator().manual_seed(1)
    shape = (run.train.global_batch, config.max_seq_len + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
    number = 0

    def step() -> None:
        nonlocal number
        run_step(number, lambda rows: next_words(tokens[rows]))
        number += 1

    for _ in range(WARM_UP):
        step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # Steps follow each other as in training: each waits for the one before, on a CPU for itself.
    ends = [time.perf_counter()]
    for _ in range(options.steps):
        step()
        ends.append(time.perf_counter())
    times = [after - before for before, after in pairwise(ends)]
    peak = float(torch.cuda.max_memory_allocated()) if on_gpu else float("nan")
    seconds = _largest(times, world)
    (peak,) = _largest([peak], world)
    overlap = profile(step) if on_gpu else None
    return _cells(run, seconds, peak, estimated, overlap, options)


def _cells(
    run: RunConfig,
    seconds: list[float],
    peak: float,
    estimated: float,
    overlap: Overlap | None,
    options: Options,
) -> list[str]:
    median, n = statistics.median(seconds), run.layout.n_processes
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median,) * 3
    s = run.model.max_seq_len
    tokens = run.train.global_batch * s
    tflops = step_flops(run.model, tokens, s) / median / n / 1e12
    return [
        f"{1e3 * median:.1f} [{1e3 * low:.1f}, {1e3 * high:.1f}]",
        f"{tokens / median / n:,.0f}",
        f"{tflops:,.3g}",
        f"{tflops / options.peak_tflops:.1%}" if options.peak_tflops else "-",
        f"{peak / GIB:.2f}" if peak < float("inf") else "-",
        f"{estimated / GIB:.2f}",
        f"{1e3 * overlap.communicating_s:.1f}" if overlap else "-",
        f"{overlap.hidden:.0%}" if overlap and overlap.communicating_s else "-",
    ]


# --------------------------------------------------------------------------- the command


def main(
    out: Annotated[Path, typer.Option(help="The report.")] = Path("report.md"),
    model: Annotated[str, typer.Option(help="The shipped GPT-2 that is timed.")] = "megatron-1.2b",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences per device and step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each layout.")] = 20,
    only: Annotated[
        list[str] | None, typer.Option(help="The title of a layout; may be repeated.")
    ] = None,
    peak: Annotated[
        float,
        typer.Option(
            "--peak-tflops",
            min=0.0,
            help="The device's dense bfloat16 peak, for MFU; 0: that of its data sheet.",
        ),
    ] = 0.0,
    processes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes on this machine, each with a GPU; 0: as many as there are GPUs and "
            "layouts for them.",
        ),
    ] = 0,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Where to run.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to try the code.")] = False,
) -> None:
    """Writes one report on exactness, speed, memory and overlap of all layouts."""
    try:
        place = rank_env()
        n = place.size if place else processes or _n_devices(device)
        known = layouts_of(n)
        unknown = [title for title in only or () if title not in known]
        if unknown:
            raise ValueError(f"--only {unknown[0]} is none of: {'; '.join(known)}")
        options = Options(model, sequences, steps, tuple(only or ()), peak, out, device, quick)
        if quick:
            options = replace(options, model="a tiny GPT-2", steps=min(steps, 3))
        else:
            shipped_model(model)
        launch(work, (n, options), n)
    except (UserError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _n_devices(device: str) -> int:
    if device == "cpu":
        return 4
    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU on this machine: `--device cpu --quick` runs the same code on "
            "CPU processes; `gridformer doctor` shows what torch finds"
        )
    found = torch.cuda.device_count()
    n = usable(found)
    if not n:
        raise UserError(
            "this report compares layouts on 2 GPUs or more, and torch finds 1: "
            "`python -m benchmarks.gpu` measures one GPU"
        )
    if n < found:
        typer.echo(
            f"{found} GPUs were found, and {n} of them are used, since the layouts of this report "
            "need 2, 4 or a multiple of 8.",
            err=True,
        )
    return n


if __name__ == "__main__":
    typer.run(main)
