"""The experiments of Narayanan et al. 2021 on A100s: published, and what `predict` says of them.

    python -m benchmarks.published.megatron --out docs/results/published-megatron.md \
        --plot docs/results/published-megatron.png

Nothing here runs on a cluster, and nothing of the cluster file is fitted to these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.planner.held_out import weak_scaling
from benchmarks.published.megatron_cases import (
    PAPER,
    Case,
    Result,
    run,
    run_as_deepspeed,
    scale,
    schedules,
    stages,
    tensor_or_pipeline,
)

# --------------------------------------------------------------------------- the page


def weak_lines() -> list[str]:
    """Predicts the weak scaling of 2019 and returns its table."""
    lines = ["| model | published | predicted | ratio |", "|---|---:|---:|---:|"]
    for one in weak_scaling():
        lines.append(f"| {one.name} | {one.published} | {one.predicted:.1f} | {one.ratio:.2f} |")
    return lines


def scale_lines(results: Sequence[Result]) -> list[str]:
    lines = [
        "| run | published, TFLOP/s | predicted | error | in bubbles | in messages |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    errors = []
    for one in results:
        step, published = one.found.step_s, one.case.published
        errors.append(published / one.tflops - 1)
        lines.append(
            f"| {one.case.name} | {published:g} | {one.tflops:.0f} | {errors[-1]:+.0%} | "
            f"{one.found.bubble_s / step:.0%} | {one.found.exposed_communication_s / step:.0%} |"
        )
    kinds: dict[str, list[float]] = {}
    for one, off in zip(results, errors):
        name = one.case.name
        kind = "tensor and pipeline parallelism"
        if "ZeRO-3" in name:
            kind = "ZeRO-3 as DeepSpeed ran it" if "simulated" in name else "gridformer's ZeRO-3"
        kinds.setdefault(kind, []).append(abs(off))
    means = ", ".join(f"{sum(some) / len(some):.0%} of {kind}" for kind, some in kinds.items())
    return [*lines, "", f"Errors are those of the time of a step. Their means: {means}."]


def sweep_lines(found: dict[int, list[Result]]) -> list[str]:
    names = [one.case.name for one in next(iter(found.values()))]
    lines = [
        "| batch | " + " | ".join(f"{name}" for name in names) + " | best, published | predicted |",
        "|---:|" + "---:|" * len(names) + "---|---|",
    ]
    for batch, results in found.items():
        best = max(results, key=lambda one: one.tflops).case.name
        cells = " | ".join(f"{one.tflops:.0f}" for one in results)
        lines.append(f"| {batch} | {cells} | 8 x 8 | {best} |")
    return lines


def schedule_lines(found: dict[int, dict[str, Result]]) -> list[str]:
    lines = [
        "| batch | one stage a rank | two, whole tensors | two, scatter/gather | "
        "interleaving gains | scatter/gather gains |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for batch, kinds in found.items():
        plain, whole, sliced = (one.tflops for one in kinds.values())
        lines.append(
            f"| {batch} | {plain:.0f} | {whole:.0f} | {sliced:.0f} | {sliced / plain - 1:+.1%} | "
            f"{sliced / whole - 1:+.1%} |"
        )
    return lines


def bubble_lines(found: dict[int, list[Result]]) -> list[str]:
    lines = [
        "| batch | stages | TFLOP/s | waits for other ranks, relative to the rest | (pp - 1) / m |",
        "|---:|---:|---:|---:|---:|",
    ]
    for batch, results in found.items():
        for one in results:
            pp = one.case.layout["pp"]
            lines.append(
                f"| {batch} | {pp} | {one.tflops:.0f} | {one.bubble:.1%} | {(pp - 1) / batch:.1%} |"
            )
    return lines


def plot(sweep: dict[int, list[Result]], pipelines: dict[int, list[Result]], path: Path) -> None:
    """Draws the sweep of tensor against pipeline sizes, and the bubbles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for batch, results in sweep.items():
        left.plot([one.case.name for one in results], [one.tflops for one in results], "o-",
                  label=f"batch {batch}")  # fmt: skip
    left.set_xlabel("stages x tensor-parallel devices")
    left.set_ylabel("TFLOP/s a device, predicted")
    left.set_title("162.2B on 64 A100")
    left.set_ylim(0)
    for batch, results in pipelines.items():
        sizes = [one.case.layout["pp"] for one in results]
        (line,) = right.plot(sizes, [one.bubble for one in results], "o-",
                             label=f"batch {batch}, predicted")  # fmt: skip
        right.plot(sizes, [(pp - 1) / batch for pp in sizes], "--", color=line.get_color(),
                   label=f"batch {batch}, (pp - 1) / m")  # fmt: skip
    right.set_xlabel("stages")
    right.set_ylabel("bubble, relative to the rest")
    right.set_title("three layers of h = 20,480 a stage")
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def page(image: str) -> tuple[list[str], dict[int, list[Result]], dict[int, list[Result]]]:
    """Predicts everything; returns the page's parts and the results of its figure."""
    about = describe_machine("benchmarks.published.megatron")
    large = [_told(case) for case in scale()]
    large += [run_as_deepspeed(one.case) for one in large if "ZeRO-3" in one.case.name]
    sweep = {batch: [_told(case) for case in some] for batch, some in tensor_or_pipeline().items()}
    kinds = {
        batch: {kind: _told(case) for kind, case in some.items()}
        for batch, some in schedules().items()
    }
    pipelines = {batch: [_told(case) for case in some] for batch, some in stages().items()}
    parts = [
        "# Megatron-LM on A100s: published and predicted",
        f"{about['date']}, commit {about['commit'] or 'unknown'}: "
        f"`{command_line('benchmarks.published.megatron')}`. Everything in the columns "
        '"predicted" comes from `gridformer predict` on `selene-a100`; nothing ran on such a '
        f"machine, and nothing is fitted to these numbers. Source: {PAPER}.",
        _INTRODUCTION,
        "## Runs at scale",
        _SCALE,
        "\n".join(scale_lines(large)),
        "## Weak scaling on V100: 1.2B to 8.3B",
        _WEAK,
        "\n".join(weak_lines()),
        "## Tensor or pipeline parallelism: 162.2B on 64 devices",
        _SWEEP,
        "\n".join(sweep_lines(sweep)),
        *([f"![TFLOP/s over layouts, and bubbles over stages]({image})"] if image else []),
        "## Interleaving and scatter/gather: 175B on 96 devices",
        _SCHEDULES,
        "\n".join(schedule_lines(kinds)),
        "## Bubbles: three layers a stage",
        _BUBBLES,
        "\n".join(bubble_lines(pipelines)),
    ]
    return parts, sweep, pipelines


def _told(case: Case) -> Result:
    result = run(case)
    typer.echo(f"{case.name}: {result.tflops:.0f} TFLOP/s", err=True)
    return result


_INTRODUCTION = """\
GPT models with s=2048 and 51,200 words, float16, full recomputation, micro-batches of one sequence
unless stated otherwise. TFLOP/s a device are the paper's equation 3, which counts a second forward
pass, divided by the time of a step."""
_SCALE = """\
Tables 1 and 2 of the paper. The number of stages a rank is not given; two are assumed for 175B
and 1T, and one for 530B, whose 105 layers make 35 stages of three. ZeRO-3 is `dp_mode: fsdp`, with
which gridformer gathers the next layer while one computes. The published runs are DeepSpeed's of
2021, which gathered each matrix by itself, hid no message, and made views and copies for each rank.
The last rows simulate that on the record of gridformer's code (`benchmarks/planner/deepspeed.py`);
[planner.md](planner.md) has the winners."""
_WEAK = """\
Shoeybi et al. 2019 (Megatron-LM), figure 5, on `dgx2h-v100`: the rate of a device relative to that
of 1.2B on one device, with tensor parallelism alone and with 64 times as many devices, in %. Heads
are 96 wide, s=1024, 8 sequences a replica in float16 with full recomputation."""
_SWEEP = """\
TFLOP/s a device, for stages x tensor-parallel devices. The paper's Figure 13 has its peak at
8 x 8, where tensor parallelism fills a node and pipelines connect nodes."""
_SCHEDULES = """\
TFLOP/s a device. The paper finds that interleaving gains more than 10% for small batches and less
for larger ones (Figure 12), and that scatter/gather gains up to 11% with interleaved stages
(Figure 18). Two stages a rank are assumed. The gain of interleaving is predicted, that of
scatter/gather is not: by the prediction the messages between stages travel while they compute, also
when they are whole."""
_BUBBLES = """\
The paper's Figure 11: weak scaling from one stage of three layers to eight. A GPipe or 1F1B
schedule waits (pp - 1) / m of its ideal time if stages are equal; the last one also has the head
here."""


def main(
    out: Annotated[
        Path | None, typer.Option(help="The Markdown file to write; else it is printed.")
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The figure to write, beside the page.")
    ] = None,
) -> None:
    """Predict the experiments and compare them with what was published."""
    parts, sweep, pipelines = page(plot_to.name if plot_to else "")
    if plot_to is not None:
        plot(sweep, pipelines, plot_to)
    write_page(parts, out)


if __name__ == "__main__":
    typer.run(main)
