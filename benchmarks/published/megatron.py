"""The experiments of Narayanan et al. 2021 on A100s: published, and what `predict` says of them.

    python -m benchmarks.published.megatron --out docs/results/published-megatron.md \
        --plot docs/results/published-megatron.png

Nothing here runs on a cluster, and nothing of the cluster file is fitted to these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.planner.pricing import cluster_of, price, record
from benchmarks.planner.rows import SELENE, Row, gpt
from gridformer.plan.prediction import Prediction

PAPER = "Narayanan et al. 2021 (Megatron-LM), arXiv 2104.04473, as public summaries quote it"
SEQ, VOCAB = 2048, 51200
GPT3, GPT_530B, GPT_1T = (96, 12288, 96), (105, 20480, 128), (128, 25600, 160)
GPT_162B = (32, 20480, 128)


@dataclass(frozen=True)
class Case:
    """A run of the paper.

    Attributes:
        name: How tables call it.
        sizes: Layers, hidden size and heads.
        batch: The global batch.
        micro: Sequences in a micro-batch.
        layout: Fields of the layout besides `micro_batches`.
        published: TFLOP/s of each device, with what is recomputed; 0 if the text has no number.
    """

    name: str
    sizes: tuple[int, int, int]
    batch: int
    micro: int
    layout: dict[str, Any] = field(default_factory=dict)
    published: float = 0.0

    def row(self) -> Row:
        micro_batches = self.batch // self.micro // self.layout.get("dp", 1)
        layout = {"scheme": "megatron", "devices_per_node": 8, **self.layout}
        if layout.get("cols", 1) == 1:
            layout["scheme"] = "single"
        layout["micro_batches"] = micro_batches
        train = {"global_batch": self.batch, "dtype": "float16", "recompute": "full"}
        run = gpt((*self.sizes, SEQ, VOCAB), layout, train)
        return Row(self.name, SELENE, self.published, "hardware TFLOP/s", run, PAPER)

    def flops(self) -> float:
        """Returns the operations of a step by the paper's equation 3, which are what it divides.

        They include a second forward pass of all layers.
        """
        n, h, _ = self.sizes
        rest = 1 + SEQ / (6 * h) + VOCAB / (16 * n * h)
        return 96 * self.batch * SEQ * n * h * h * rest


@dataclass(frozen=True)
class Result:
    """A case and its prediction."""

    case: Case
    found: Prediction
    devices: int

    @property
    def tflops(self) -> float:
        """TFLOP/s of each device, counted as the paper counts them."""
        return self.case.flops() / self.found.step_s / self.devices / 1e12

    @property
    def bubble(self) -> float:
        """The time in which the slowest rank waits for other ranks, relative to the rest."""
        return self.found.bubble_s / (self.found.step_s - self.found.bubble_s)


def run(case: Case) -> Result:
    """Predicts a case."""
    row = case.row()
    recorded = record(row)
    return Result(case, price(recorded, cluster_of(row)), row.run.layout.n_processes)


# --------------------------------------------------------------------------- the experiments


def _ptdp(name: str, sizes: tuple[int, int, int], pp: int, dp: int, batch: int, published: float,
          k: int) -> Case:  # fmt: skip
    layout = {"cols": 8, "pp": pp, "dp": dp, "stages_per_rank": k}
    return Case(name, sizes, batch, 1, layout, published)


def _zero3(name: str, sizes: tuple[int, int, int], dp: int, micro: int, batch: int,
           published: float) -> Case:  # fmt: skip
    return Case(name, sizes, batch, micro, {"dp": dp, "dp_mode": "fsdp"}, published)


def scale() -> list[Case]:
    """Returns the runs at scale of which the text or a table gives the rate."""
    return [
        _ptdp("175B, 8 x 12 stages, 384 devices", GPT3, 12, 4, 1536, 153, 2),
        _ptdp("175B, 8 x 12 stages, 1,536 devices", GPT3, 12, 16, 1536, 141, 2),
        _ptdp("530B, 8 x 35 stages, 560 devices", GPT_530B, 35, 2, 2240, 171, 1),
        _ptdp("530B, 8 x 35 stages, 2,240 devices", GPT_530B, 35, 8, 2240, 159, 1),
        _ptdp("1T, 8 x 64 stages, 3,072 devices", GPT_1T, 64, 6, 3072, 163, 2),
        _zero3("175B, ZeRO-3, 384 devices", GPT3, 384, 4, 1536, 144),
        _zero3("175B, ZeRO-3, 1,536 devices", GPT3, 1536, 1, 1536, 44),
        _zero3("530B, ZeRO-3, 640 devices", GPT_530B, 640, 4, 2560, 138),
        _zero3("530B, ZeRO-3, 2,240 devices", GPT_530B, 2240, 1, 2240, 48),
    ]


def tensor_or_pipeline() -> dict[int, list[Case]]:
    """Returns the layouts of 162.2B on 64 devices, by batch."""
    return {
        batch: [
            Case(f"{pp} x {64 // pp}", GPT_162B, batch, 1, {"cols": 64 // pp, "pp": pp})
            for pp in (2, 4, 8, 16, 32)
        ]
        for batch in (32, 128)
    }


def schedules() -> dict[int, dict[str, Case]]:
    """Returns the schedules of 175B on 96 devices, by batch."""
    base = {"cols": 8, "pp": 12}
    kinds = {
        "one stage a rank": base,
        "two, whole tensors": {**base, "stages_per_rank": 2, "scatter_gather": False},
        "two, scatter/gather": {**base, "stages_per_rank": 2},
    }
    return {
        batch: {kind: Case(kind, GPT3, batch, 1, layout) for kind, layout in kinds.items()}
        for batch in (12, 36, 60)
    }


def stages() -> dict[int, list[Case]]:
    """Returns the pipelines with three layers of h=20480 a stage, by batch."""
    return {
        batch: [
            Case(f"{pp}", (3 * pp, 20480, 128), batch, 1, {"cols": 8, "pp": pp})
            for pp in (1, 2, 4, 8)
        ]
        for batch in (8, 128)
    }


# --------------------------------------------------------------------------- the page


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
    three_d = "tensor and pipeline parallelism"
    kinds: dict[str, list[float]] = {three_d: [], "ZeRO-3": []}
    for one, off in zip(results, errors):
        kinds["ZeRO-3" if "ZeRO-3" in one.case.name else three_d].append(abs(off))
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
where nothing else is said. TFLOP/s a device are the paper's equation 3, which counts a second
forward pass, divided by the time of a step."""
_SCALE = """\
Tables 1 and 2 of the paper. The number of stages a rank is not given; two are assumed for 175B
and 1T, and one for 530B, whose 105 layers make 35 stages of three. ZeRO-3 is `dp_mode: fsdp`: the
predicted runs are gridformer's, which gather the next layer while one computes. The published ones
are DeepSpeed's of 2021, and the paper says that their messages decide; that is not reproduced."""
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
