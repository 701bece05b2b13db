"""Measures gridformer on one GPU: the ceiling of matrix products, a training step, the schemes.

    python -m benchmarks.gpu ceiling                     how fast torch.matmul is: 1 minute
    python -m benchmarks.gpu single --model gpt2-774m    beside Hugging Face's GPT-2: 4 minutes
    python -m benchmarks.gpu single --model gpt2-1.5b                                 6 minutes
    python -m benchmarks.gpu single --model smollm2-135m --layers 6 --device cpu \\
        --dtype float32 --modes eager --batch 2 --seq-len 256 --steps 2       a Llama on a CPU
    python -m benchmarks.gpu schemes                     4 processes share the GPU:   3 minutes
    python -m benchmarks.gpu tiles                       kernels of attention, and tiles: 1 minute
    python -m benchmarks.gpu host-time                   Python's time, without a GPU: 2 minutes
    python -m benchmarks.gpu launches                    kernels of a layer, likewise: 1 minute

Each command prints Markdown that names the device, the versions and the command; `--out FILE` also
appends it to a file. Progress goes to stderr. With `--device cpu --quick` the same code runs on
tiny models on the CPU within seconds: this shows that the code works, but the figures mean nothing.
The times above are estimates; `single` spends most of its time compiling Hugging Face's model.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu import host_time as host
from benchmarks.gpu import launches as launched
from benchmarks.gpu import matmul, numerics, step, step_report
from benchmarks.gpu import tiles as attention_tiles
from benchmarks.gpu.expected import expected
from benchmarks.gpu.report import Report, choose_device
from gridformer.config import ModelConfig, shipped_model
from gridformer.train.compile import toolchain_problems
from gridformer.utils.errors import UserError

app = typer.Typer(help=(__doc__ or "").splitlines()[0], add_completion=False)

MODELS = ["gpt2-774m", "gpt2-1.5b"]
BATCHES = (32, 16, 8, 4, 2, 1)  # sequences; the largest batch that fits is used
TINY = ModelConfig(
    name="tiny", n_layers=2, hidden_size=32, n_heads=2, vocab_size=211, max_seq_len=16
)


class DeviceName(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


class Modes(StrEnum):
    both = "both"
    eager = "eager"
    compiled = "compiled"


class AttentionName(StrEnum):
    auto = "auto"
    flash = "flash"
    cudnn = "cudnn"
    efficient = "efficient"


class DTypeName(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class HFCompileName(StrEnum):
    blocks = "blocks"
    whole = "whole"


MODES: dict[Modes, tuple[step.Mode, ...]] = {
    Modes.both: ("eager", "compiled"),
    Modes.eager: ("eager",),
    Modes.compiled: ("compiled",),
}

Device = Annotated[DeviceName, typer.Option(help="Where to measure.")]
Quick = Annotated[bool, typer.Option("--quick", help="Use tiny sizes, to try the code.")]
Out = Annotated[Path | None, typer.Option(help="Also append the Markdown to this file.")]
Numbers = Annotated[
    Path | None, typer.Option(help="Also append the numbers to this file, a JSON object a line.")
]
Model = Annotated[list[str] | None, typer.Option(help="A shipped GPT-2 or Llama; may be repeated.")]


@app.command()
def ceiling(
    model: Model = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the models' shapes.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats of each product.")] = 30,
    device: Device = DeviceName.cuda,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure the ceiling of bfloat16 products: large squares, and the models' own shapes."""
    place, report = _begin(device), Report(out)
    products = matmul.squares(quick, place)
    for config in _models(model, quick):
        products += matmul.products_of(config, batch * config.max_seq_len)
    report.heading("Ceiling of matrix products", place, quick)
    repeats = 3 if quick else repeats
    speeds = matmul.measure_all(products, place, repeats, report)
    matmul.write(speeds, repeats, report)


@app.command()
def single(
    model: Model = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences per step; may be repeated. By default all that fit."),
    ] = None,
    seq_len: Annotated[
        int, typer.Option(min=0, help="Tokens per sequence; 0: the model's maximum.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps per turn.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side and mode.")] = 3,
    layers: Annotated[int, typer.Option(min=0, help="Layers; 0: as many as the model has.")] = 0,
    dtype: Annotated[DTypeName, typer.Option(help="The type of the computation.")] = (
        DTypeName.bfloat16
    ),
    dropout: Annotated[
        float, typer.Option(min=0, max=0.9, help="Dropout, also of attention's weights.")
    ] = 0.0,
    modes: Annotated[Modes, typer.Option(help="Run compiled, eager, or both.")] = Modes.both,
    hf_compile: Annotated[
        HFCompileName,
        typer.Option(help="Compile Hugging Face's model block by block, as ours, or as a whole."),
    ] = HFCompileName.blocks,
    attention: Annotated[
        AttentionName, typer.Option(help="The fused attention kernel that all sides prefer.")
    ] = AttentionName.auto,
    backend: Annotated[str, typer.Option(help="The backend of torch.compile.")] = "inductor",
    profile: Annotated[bool, typer.Option("--profile", help="Show each side's kernels.")] = False,
    predict: Annotated[
        str,
        typer.Option(help="A cluster, with which times are predicted before they are measured."),
    ] = "",
    limit_s: Annotated[float, typer.Option(help="No round starts later than this.")] = 480.0,
    device: Device = DeviceName.cuda,
    quick: Quick = False,
    out: Out = None,
    numbers: Numbers = None,
) -> None:
    """Measure a training step, alternating with Hugging Face's model in the same run."""
    place, report = _begin(device), Report(out, numbers)
    if "compiled" in MODES[modes] and backend == "inductor":
        _stop_if(toolchain_problems(place.type))
    squares, torch_dtype = matmul.squares(quick, place), getattr(torch, dtype.value)
    speeds = matmul.measure_all(squares, place, 3 if quick else 20, report, torch_dtype)
    top = matmul.ceiling_of(speeds).median
    report.progress(f"ceiling: {top:,.3g} TFLOP/s")
    for config in _models(model, quick):
        if layers:
            name = f"{config.name} with {layers} layers"
            config = config.model_copy(update={"n_layers": layers, "name": name})
        drops = {"dropout": dropout, "attention_dropout": dropout}
        config = ModelConfig(**{**config.model_dump(), **drops})
        tried: list[tuple[int, ...]] = [(b,) for b in batch or ()]
        runs = [
            step.Settings(
                config,
                batches=batches,
                s=seq_len or config.max_seq_len,
                steps=2 if quick else steps,
                rounds=2 if quick else rounds,
                modes=MODES[modes],
                hf_compile=hf_compile.value,
                attention=attention.value,
                backend=backend,
                dtype=dtype.value,
                limit_s=limit_s,
            )
            for batches in tried or [(4, 2) if quick else BATCHES]
        ]
        predicted = expected(runs, predict) if predict else [{} for _ in runs]
        for settings, times in zip(runs, predicted):
            for side, seconds in times.items():
                ms = f"{1e3 * seconds:,.1f} ms a step of {settings.batches[0]} sequences"
                report.progress(f"predicted for {' '.join(side)}: {ms}")
            comparison, kernels = step.compare(settings, place, report, profile)
            times = times if comparison.b == settings.batches[0] else {}
            report.heading(f"Training step of {config.name} on one device", place, quick)
            step_report.write(comparison, top, report, times)
            for name, text in kernels.items():
                report.write(f"\nOne step, {name}:\n\n```\n{text}\n```")


@app.command()
def tiles(
    limit_s: Annotated[float, typer.Option(help="No tiles are measured later than this.")] = 60.0,
    device: Device = DeviceName.cuda,
    quick: Quick = False,
    out: Out = None,
    numbers: Numbers = None,
) -> None:
    """Measure attention with dropout with other sizes of its kernels' tiles."""
    place, report = _begin(device), Report(out, numbers)
    report.heading("Tiles of attention with dropout", place, quick)
    attention_tiles.measure_backends(place, quick, report)
    attention_tiles.measure(place, quick, limit_s, report)


@app.command()
def schemes(
    timeout_s: Annotated[float, typer.Option(help="Seconds for one layout.")] = 150.0,
    device: Device = DeviceName.cuda,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Compare each scheme's losses, gradients and weights on 4 processes that share the GPU.

    Exits with code 1 if a layout differs too much from one device or could not run.
    """
    place, report = _begin(device), Report(out)
    report.heading("Numerics of the schemes: 4 processes on one device over gloo", place, quick)
    if not numerics.measure(place, quick, report, timeout_s):
        raise typer.Exit(1)


@app.command()
def host_time(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 9,
    passes: Annotated[int, typer.Option(min=1, help="Passes in a turn; the shortest counts.")] = 10,
    only: Annotated[
        list[str] | None, typer.Option(help="Names of sides in the table; may be repeated.")
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Only the CPU.")] = DeviceName.cpu,
    quick: Quick = False,
    out: Out = None,
) -> None:
    """Measure the host's time for a layer on every layout, beside torch and Hugging Face."""
    if device != DeviceName.cpu:
        _stop_if(["host-time measures Python on the CPU: leave --device out"])
    known = {side.name: side for side in host.sides()}
    _stop_if(
        [
            f"--only {name} is none of: {'; '.join(known)}"
            for name in only or ()
            if name not in known
        ]
    )
    chosen, report = [known[name] for name in only or known], Report(out)
    report.heading("Host time of a layer, forward and backward", torch.device("cpu"), quick)
    found = host.measure(chosen, 2 if quick else rounds, 2 if quick else passes, report)
    host.write(chosen, found, host.kernels(chosen), report)


@app.command()
def launches(
    only: Annotated[
        list[str] | None, typer.Option(help="Names of layouts in the table; may be repeated.")
    ] = None,
    out: Out = None,
) -> None:
    """Count the kernels and messages of a layer on every layout, eager and compiled."""
    unknown = [name for name in only or () if name not in launched.LAYOUTS]
    known = "; ".join(launched.LAYOUTS)
    _stop_if([f"--only {name} is none of: {known}" for name in unknown])
    report = Report(out)
    report.heading("Launches of a layer, forward and backward", torch.device("cpu"), False)
    launched.write(only or [*launched.LAYOUTS], report)


def _begin(device: DeviceName) -> torch.device:
    try:
        return choose_device(device.value)
    except ValueError as error:
        _stop_if([str(error)])
        raise


def _models(names: list[str] | None, quick: bool) -> list[ModelConfig]:
    if quick and not names:
        return [TINY]
    return [ModelConfig(**shipped_model(name)) for name in names or MODELS]


def _stop_if(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems:
        raise typer.Exit(2)


def main(run: Callable[[], None] = app) -> None:
    """Run the command line; an error that a user can fix is one sentence and exit code 2."""
    try:
        run()
    except (UserError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
