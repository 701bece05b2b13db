"""The scaling experiments of Optimus (Xu et al. 2021): published, and what the planner says.

    python -m benchmarks.published.optimus --out docs/results/published-optimus.md \
        --plot docs/results/published-optimus.png

The weak scaling is predicted from traces, the isoefficiency from estimates. Nothing here runs on a
cluster. `python -m benchmarks.published` measures Optimus against Megatron on an emulated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.planner.pricing import cluster_of, predicted, record
from benchmarks.planner.rows import FRONTERA, calibration_rows
from benchmarks.published.costs import cost_lines, equation_lines
from benchmarks.published.limits import largest_batches, limit_lines
from benchmarks.published.scaling import (
    EFFICIENCIES,
    exponent,
    flat,
    gain,
    iso_lines,
    isoefficiency,
    strong_lines,
    strong_scaling,
)
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig

PAPER = "Xu, Li, Gong and You 2021 (Optimus)"
INFERENCE = 1.78  # the published speed of Optimus relative to Megatron on 64 devices


# --------------------------------------------------------------------------- weak scaling


@dataclass(frozen=True)
class Point:
    """A row of Table 2.

    Attributes:
        scheme: The scheme.
        devices: The number of devices.
        flops: Operations of one sequence, forward and backward with recomputation.
        published_s: Its seconds.
        predicted_s: Its predicted seconds.
        forward_s: Those of its forward pass alone, as in inference.
    """

    scheme: str
    devices: int
    flops: float
    published_s: float
    predicted_s: float
    forward_s: float


def flops_of(run: RunConfig, layers: int) -> float:
    """Returns the operations of one sequence, forward and backward with recomputation."""
    h, s = run.model.hidden_size, run.model.max_seq_len
    return 4.0 * layers * (24 * s * h * h + 4 * s * s * h)


def weak_scaling() -> list[Point]:
    """Predicts all rows of Table 2."""
    found = []
    for row in calibration_rows(FRONTERA):
        scheme, devices = row.name.split(" / ")
        both, forward = (
            predicted(record(row, training), cluster_of(row)) for training in (True, False)
        )
        typer.echo(f"{row.name}: {both:.3f} s a sequence, {forward:.3f} s forward", err=True)
        flops = flops_of(row.run, row.layers)
        found.append(Point(scheme, int(devices), flops, row.published, both, forward))
    return found


def relative_rate(points: Sequence[Point], which: str) -> dict[int, float]:
    """Returns the rate of a device relative to that on the fewest devices."""
    rates = {p.devices: p.flops / p.devices / getattr(p, which) for p in points}
    return {devices: rate / rates[min(rates)] for devices, rate in rates.items()}


def gustafson(rates: dict[int, float]) -> float:
    """Fits the part of a device's time that does not scale, from relative rates.

    With n times the devices and n times the work the speed is n - f (n - 1), by least squares.
    """
    first = min(rates)
    n = np.array([devices / first for devices in rates])
    speed = n * np.array([*rates.values()])
    return float(((n - speed) @ (n - 1)) / ((n - 1) @ (n - 1)))


def weak_lines(points: Sequence[Point]) -> list[str]:
    lines = [
        "| devices | megatron, published | predicted | optimus, published | predicted | "
        "optimus against megatron, published | predicted |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sides = {s: [p for p in points if p.scheme == s] for s in ("megatron", "optimus")}
    rates = {
        (scheme, which): relative_rate(some, which)
        for scheme, some in sides.items()
        for which in ("published_s", "predicted_s")
    }
    for mine, theirs in zip(sides["optimus"], sides["megatron"]):
        cells = [f"{mine.devices}"]
        for scheme in ("megatron", "optimus"):
            for which in ("published_s", "predicted_s"):
                cells.append(f"{rates[scheme, which][mine.devices]:.2f}")
        cells.append(f"{theirs.published_s / mine.published_s:.2f}")
        cells.append(f"{theirs.predicted_s / mine.predicted_s:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    shares = [f"{gustafson(rate):.1%}" for rate in rates.values()]
    return [*lines, f"| f of Gustafson's law | {' | '.join(shares)} | | |"]


def inference_lines(points: Sequence[Point]) -> list[str]:
    lines = [
        "| devices | megatron, sequences/s | optimus, sequences/s | optimus against megatron | "
        "published |",
        "|---:|---:|---:|---:|---:|",
    ]
    sides = {s: [p for p in points if p.scheme == s] for s in ("megatron", "optimus")}
    for theirs, mine in zip(sides["megatron"], sides["optimus"]):
        said = f"{INFERENCE}" if mine.devices == 64 else ""
        lines.append(
            f"| {mine.devices} | {1 / theirs.forward_s:.2f} | {1 / mine.forward_s:.2f} | "
            f"{theirs.forward_s / mine.forward_s:.2f} | {said} |"
        )
    return lines


# --------------------------------------------------------------------------- the page


def plot(points: Sequence[Point], iso: dict[str, dict[int, float]], path: Path) -> None:
    """Draws the weak scaling, published and predicted, and the isoefficiency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for scheme, color in (("megatron", "#3182bd"), ("optimus", "#e6550d")):
        mine = [p for p in points if p.scheme == scheme]
        devices = [p.devices for p in mine]
        left.plot(devices, [p.published_s for p in mine], "o-", color=color,
                  label=f"{scheme}, published")  # fmt: skip
        left.plot(devices, [p.predicted_s for p in mine], "x--", color=color,
                  label=f"{scheme}, predicted")  # fmt: skip
    left.set_xlabel("devices")
    left.set_ylabel("seconds a sequence")
    left.set_title("weak scaling on Frontera (Table 2)")
    left.set_ylim(0)
    for kind, widths in iso.items():
        label = f"{kind}: work ~ p^{exponent(widths):.2f}"
        right.loglog([*widths], [*widths.values()], "o-", label=label)
    right.set_xlabel("devices")
    right.set_ylabel("hidden size")
    right.set_title(f"hidden size for an efficiency of {EFFICIENCIES[0]:.0%}, by estimate")
    right.set_ylim(top=right.get_ylim()[1] * 30)  # room for the legend
    for axis in (left, right):
        axis.legend(fontsize=8, loc="upper left")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    out: Annotated[
        Path | None, typer.Option(help="The Markdown file to write; else it is printed.")
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The figure to write, beside the page.")
    ] = None,
) -> None:
    """Predict the experiments and compare them with what was published."""
    about = describe_machine("benchmarks.published.optimus")
    points = weak_scaling()
    network = flat(load_cluster(FRONTERA))
    iso = {target: isoefficiency(target, network) for target in EFFICIENCIES}
    parts = [
        "# Optimus on Frontera: published and predicted",
        f"{about['date']}, commit {about['commit'] or 'unknown'}: "
        f"`{command_line('benchmarks.published.optimus')}`. Nothing ran on Frontera. Source of "
        f"what is published: {PAPER}.",
        "## Weak scaling",
        _WEAK,
        "\n".join(weak_lines(points)),
        *(
            [f"![Seconds a sequence over devices, and isoefficiency]({plot_to.name})"]
            if plot_to
            else []
        ),
        "## Inference",
        _INFERENCE,
        "\n".join(inference_lines(points)),
        "## The largest batch",
        _LIMITS,
        "\n".join(limit_lines(largest_batches())),
        "## What a layer costs: both halves of Table 1",
        _COSTS,
        "\n".join(cost_lines()),
        "## Time of messages and efficiency: equations 4 and 5",
        _EQUATIONS,
        "\n".join(equation_lines(network)),
        "## Strong scaling",
        _STRONG,
        "\n".join(strong_lines(strong_scaling())),
        "## Isoefficiency",
        _ISO,
    ]
    for target, found in iso.items():
        least, most = gain(found)
        parts += [
            f"Efficiency {target:.0%}. Our default reaches it with a hidden size that is "
            f"1/{least:.0f} to 1/{most:.0f} of what the paper's broadcasts need:",
            "\n".join(iso_lines(found)),
        ]
    if plot_to is not None:
        plot(points, iso[EFFICIENCIES[0]], plot_to)
    write_page(parts, out)


_WEAK = """\
Table 2 of the paper: float32, full recomputation, 24 layers, s=512. Rates are operations a device
and second relative to four devices. The cluster's numbers are fitted to these rows
(docs/results/planner.md), so the columns show what a model with four numbers can follow, not a
test of it. The last row fits the part of the time that does not scale by Gustafson's law."""
_INFERENCE = f"""\
The rows of Table 2 with forward passes alone, predicted on p = 4, 16, 36 and 64. Of the published
inference, only the ratio on 64 devices was available, {INFERENCE} (the paper's abstract). Nothing
is fitted to it."""
_LIMITS = """\
How many sequences fit, by `gridformer memory`'s estimate of the fullest rank: the 24 layers alone
(a vocabulary of 64), float32, full recomputation, and what a device of Frontera can hold by the
cluster file. Attention keeps its scores, as it did then. The moments of AdamW are included, which
the paper's benchmark may not have had. The paper says that Optimus ran b = 480 on 64 devices, eight
times what Megatron could; for other numbers of devices it has a figure, whose numbers were not
available. By the estimate both schemes hold more than the paper says, Megatron by a larger factor,
so their ratio is smaller. `benchmarks.memory --processes 36` has the same with embedding, head and
loss."""
_COSTS = """\
Table 1 of the paper has the operations and the elements of a layer. Here both are compared with
what one rank of gridformer's code does, in the record of a step with and without recomputation:
b=8, s=512, h=1,024. Operations count a multiplication and an addition as two. Formulas: forward
2 (12 bsh² + 2 bs²h) / p operations, backward twice as many, recomputation as many as forward;
elements of Megatron 4 (p - 1)/p bsh in each of the three; of the paper's Optimus
f (7 bsh + 12 h²), backward twice that, recomputation as many as forward, where f is (q - 1)/q² for
pipelined rings, which are counted, and log2(q)/q for the trees of the paper; of our default 4 bsh
in the place of 7 bsh.

The code recomputes less than the formulas say: it skips the last product of a layer, whose result
no gradient needs, and Megatron its all-reduce. Where the output of a product travels, our default
gathers its gradient once for both products that need it. Everything else agrees exactly.

An error in the paper: the products of its Table 1 sum to 48 bsh² of work (12 forward, 12 of
recomputation, 24 backward, in multiplications), where Table 2's caption counts 28. The code's
operations are those of Table 1, less the 4 bsh² of the skipped product."""
_EQUATIONS = """\
The time of a layer's messages T, forward and backward with recomputation, and the efficiency
E = 1 / (1 + p T / W) that follows, where W is the time of its operations on one device; from these
the paper derives the isoefficiency. The text of its equations 4 and 5 was not available: the
formulas are those of Table 1 with the specification's E, and with no latency, as there. Rates are
those of the flat network below; h=8,192, b=384, s=512."""
_STRONG = """\
By estimate; the paper's numbers of strong scaling (its Table 3) were not available. One model (two
layers of h=4,096 with 256 heads) and a batch of 64 on more and more devices: speed relative to four
devices, and a fit of Amdahl's law, by which a part f of the time on four devices does not shorten
with more of them. A fit above 100% says that the law does not hold: by the law more devices never
make a run slower, but with more devices Megatron's messages do."""
_ISO = """\
By estimate: the hidden size with which p devices reach an efficiency, the share of a step in which
a device computes. As in the paper the batch grows with it (b = h / 32, s=512), so the work grows
with its cube. The network is flat, as in the paper's derivation: each device has a link of its own
with the rate of a node's link on Frontera. The paper derives W ~ p^3 for Megatron and
W ~ (sqrt(p) log p)^3 for Optimus. Its log p comes from broadcasts along trees; those of a pipelined
ring, which are modeled here, have no factor log p, so its exponent here is 1.5. The row "optimus"
is our default, in which each product keeps an operand in place: about the same exponent, with a
much smaller hidden size."""


if __name__ == "__main__":
    typer.run(main)
