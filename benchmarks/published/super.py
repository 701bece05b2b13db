"""The experiments of SUPER (Jain et al. 2021) on Lassen: published, and what `predict` says.

    python -m benchmarks.published.super --out docs/results/published-super.md \
        --plot docs/results/published-super.png

SUPER launched the kernels of every attention head by themselves. gridformer computes all heads
together. Both are predicted: for the former, each kernel of attention is replaced in the record of
the real code by those that SUPER's code launched (`benchmarks/published/lbann.py`). Nothing here
runs on a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.published.lbann import as_lbann
from benchmarks.published.super_figure import plot
from gridformer.cluster.file import Cluster, Figure, Level, load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import predict, price, record_run

LASSEN = "lassen-v100"
PAPER = "Jain et al. 2021 (SUPER)"
PUBLISHED = {"t5-large-mod": 2.22, "transformer-base": 1.8}  # 4-way D&SP against data parallelism
MODELS = ("transformer-base", "gpt2-124m", "t5-large-mod")
SLICES = "4-way D&SP, slice and concat"  # the layout of the published numbers
RACK = 2  # nodes in a rack of the cluster with racks
SLOWER = 4  # how much less a link between racks carries
MISFIT = "*"  # marks in tables what does not fit into the memory of a device
# Times of a launch: the cluster file's, less, and NVIDIA's of short kernels among many on a V100,
# see `COPY_S` in benchmarks/planner/deepspeed.py.
LAUNCH_US = (25.4, 20.0, 12.7, 3.8)
HEADS = {False: "one product", True: "one by one"}  # how they are computed, by `per_head`


# --------------------------------------------------------------------------- runs


def sub_graphs(g: int, dp: int = 1, **more: Any) -> dict[str, Any]:
    return {"scheme": "subgraph", "branches": g, "dp": dp, **more}


def as_published(g: int, dp: int = 1) -> dict[str, Any]:
    """Returns the layout of SUPER's experiments, with projections and feed-forward in common."""
    return sub_graphs(g, dp, attention="outside", feed_forward="common")


def replicas(n: int) -> dict[str, Any]:
    return {"scheme": "single", "dp": n}


def run_of(model: str, layout: dict[str, Any], batch: int, nodes_per_rack: int = 0) -> RunConfig:
    """Returns a run on nodes of four devices, float32, without dropout."""
    raw: dict[str, Any] = {
        "name": "published",
        "model": {"name": model, "dropout": 0.0},
        "layout": {"devices_per_node": 4, "nodes_per_rack": nodes_per_rack, **layout},
        "data": {"path": "none"},
        "train": {"global_batch": batch, "compile": False},
    }
    if not model.startswith("gpt2"):
        raw["data"]["task"] = "pairs"
    run = parse_run(raw)
    check_layout(run)
    return run


def seconds(run: RunConfig, cluster: Cluster, per_head: bool = False) -> float:
    """Predicts the seconds of a step."""
    recorded = record_run(run)
    if per_head:
        recorded = as_lbann(recorded)
    return price(recorded, cluster).step_s


# --------------------------------------------------------------------------- experiments


@dataclass(frozen=True)
class Speeds:
    """How many times faster layouts are than data parallelism on as many devices.

    Attributes:
        model: The model.
        names: The layouts, data parallelism first.
        batched: Their speeds with heads in one product.
        per_head: Their speeds with heads one by one.
        peaks: GiB of the fullest device.
        fits: Whether it can hold them.
    """

    model: str
    names: list[str]
    batched: list[float]
    per_head: list[float]
    peaks: list[float]
    fits: list[bool]

    def mark(self, name: str) -> str:
        """Returns what tells in tables that a layout does not fit."""
        return "" if self.fits[self.names.index(name)] else MISFIT


def ways(n: int) -> dict[str, dict[str, Any]]:
    """Returns the layouts on n devices of which the first is data parallelism."""
    found = {"data parallel": replicas(n)}
    for g in (2, 4, 8):
        if g > n:
            break
        found[f"{g}-way D&SP"] = sub_graphs(g, n // g)
    found[SLICES] = as_published(4, n // 4)
    found["4-way cSub"] = sub_graphs(4, n // 4, common="first")
    return found


def speeds(model: str, n: int) -> Speeds:
    """Compares layouts with data parallelism, one sequence a device."""
    cluster, both = load_cluster(LASSEN), []
    heads = run_of(model, replicas(n), n).model.n_heads
    layouts = {k: v for k, v in ways(n).items() if heads % v.get("branches", 1) == 0}
    peaks, fits = [], []
    for layout in layouts.values():
        found = predict(run_of(model, layout, n), cluster)
        peaks.append(found.peak_gib or 0.0)
        fits.append(bool(found.fits))
    for per_head in (False, True):
        times = []
        for layout in layouts.values():
            times.append(seconds(run_of(model, layout, n), cluster, per_head))
            typer.echo(f"{model} {n} {layout} {times[-1]:.4f} s", err=True)
        both.append([times[0] / one for one in times])
    return Speeds(model, [*layouts], both[0], both[1], peaks, fits)


def with_racks() -> Cluster:
    """Returns Lassen with racks of nodes, between which links carry less."""
    cluster = load_cluster(LASSEN)
    node, outer = cluster.levels
    rack = outer.model_copy(update={"name": "rack", "size": 4 * RACK})
    figure = Figure(value=outer.bandwidth_gbps.value / SLOWER, source="assumed here")
    levels = (node, rack, Level.model_validate(dict(outer) | {"bandwidth_gbps": figure}))
    return cluster.model_copy(update={"levels": levels})


def own_csub() -> str:
    """Returns what T5-Large-Mod takes under the paper's own cSub, with dropout, as a sentence."""
    layout = sub_graphs(
        4, common="first", attention="outside", feed_forward="common", devices_per_node=4
    )
    run = parse_run(
        {
            "model": {"name": "t5-large-mod", "attention_dropout": 0.1},
            "data": {"path": "none", "task": "pairs"},
            "layout": layout,
            "train": {"global_batch": 4, "compile": False},
        }
    )
    check_layout(run)
    found = predict(run, load_cluster(LASSEN))
    return _CSUB.format(
        peak=found.peak_gib, limit=found.limit_gib, fits="fits" if found.fits else "does not fit"
    )


def launches() -> list[tuple[float, list[float]]]:
    """Returns times of a launch in us, and the speeds of the published layout with each of them."""
    whole = load_cluster(LASSEN)
    records = {
        model: [
            as_lbann(record_run(run_of(model, one, 4))) for one in (replicas(4), as_published(4))
        ]
        for model in PUBLISHED
    }
    found = []
    for us in LAUNCH_US:
        launch = whole.host.launch_us.model_copy(update={"value": us})
        host = whole.host.model_copy(update={"launch_us": launch})
        cluster = whole.model_copy(update={"host": host})
        times = [[price(one, cluster).step_s for one in both] for both in records.values()]
        found.append((us, [plain / branched for plain, branched in times]))
    return found


def orders() -> list[tuple[str, float, float]]:
    """Returns names and seconds with contiguous and with topology-aware ranks."""
    found = []
    plain = load_cluster(LASSEN)
    for n, g, cluster, racks in (
        (8, 4, plain, 0), (16, 4, plain, 0), (16, 8, plain, 0), (32, 8, with_racks(), RACK),
        (32, 16, with_racks(), RACK),
    ):  # fmt: skip
        times = []
        for order in ("contiguous", "topology"):
            layout = sub_graphs(g, n // g, order=order)
            times.append(seconds(run_of("t5-large-mod", layout, n, racks), cluster))
        name = f"{g}-way on {n} devices" + (f", racks of {RACK} nodes" if racks else "")
        typer.echo(f"{name} {times}", err=True)
        found.append((name, times[0], times[1]))
    return found


def strong() -> list[tuple[int, bool, float, float]]:
    """Returns devices, whether heads are one by one, and seconds with a batch of 128.

    The seconds are those of data parallelism and of 4-way D&SP.
    """
    cluster, found = load_cluster(LASSEN), []
    for n in (4, 8, 16, 32):
        for per_head in HEADS:
            times = [
                seconds(run_of("transformer-base", layout, 128), cluster, per_head)
                for layout in (replicas(n), sub_graphs(4, n // 4))
            ]
            typer.echo(f"strong {n} {HEADS[per_head]} {times}", err=True)
            found.append((n, per_head, times[0], times[1]))
    return found


# --------------------------------------------------------------------------- the page


def speed_lines(found: Sequence[Speeds], published: bool) -> list[str]:
    """Returns a table of speeds, with a column for what was published on four devices."""
    names = max((one.names for one in found), key=len)[1:]
    lines = [
        "| model | heads | " + " | ".join(names) + " | published, 4-way |" * published,
        "|---|---|" + "---:|" * (len(names) + published),
    ]
    if not published:
        lines[0] += " |"
    for one in found:
        for kind, values in (("one product", one.batched), ("one by one", one.per_head)):
            of = dict(zip(one.names, values))
            cells = " | ".join(
                f"{of[name]:.2f}{one.mark(name)}" if name in of else "-" for name in names
            )
            known = one.model in PUBLISHED
            said = f" {PUBLISHED[one.model] if known else ''} |" * published
            model = one.model + one.mark(one.names[0])
            lines.append(f"| {model} | {kind} | {cells} |{said}")
    return lines


def memory_lines(found: Sequence[Speeds]) -> list[str]:
    """Returns a table of the GiB of the fullest device."""
    names = max((one.names for one in found), key=len)
    lines = ["| model | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for one in found:
        of = dict(zip(one.names, one.peaks))
        cells = " | ".join(f"{of[n]:.1f}{one.mark(n)}" if n in of else "-" for n in names)
        lines.append(f"| {one.model} | {cells} |")
    return lines


def order_lines(found: Sequence[tuple[str, float, float]]) -> list[str]:
    lines = [
        "| layout | contiguous, s | topology-aware, s | faster by |",
        "|---|---:|---:|---:|",
    ]
    for name, naive, aware in found:
        lines.append(f"| {name} | {naive:.4g} | {aware:.4g} | {naive / aware:.2f} |")
    return lines


def launch_lines(found: Sequence[tuple[float, Sequence[float]]]) -> list[str]:
    lines = [
        "| a launch, us | " + " | ".join(PUBLISHED) + " |",
        "|---:|" + "---:|" * len(PUBLISHED),
    ]
    for us, ratios in found:
        lines.append(f"| {us:g} | " + " | ".join(f"{one:.2f}" for one in ratios) + " |")
    published = " | ".join(f"{one:g}" for one in PUBLISHED.values())
    return [*lines, f"| published | {published} |"]


def strong_lines(found: Sequence[tuple[int, bool, float, float]]) -> list[str]:
    lines = [
        "| devices | heads | data parallel, s | 4-way D&SP, s | faster by |",
        "|---:|---|---:|---:|---:|",
    ]
    for n, per_head, plain, branched in found:
        lines.append(
            f"| {n} | {HEADS[per_head]} | {plain:.4g} | {branched:.4g} | {plain / branched:.2f} |"
        )
    return lines


def main(
    out: Annotated[
        Path | None, typer.Option(help="The Markdown file to write; else it is printed.")
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="The figure to write, beside the page.")
    ] = None,
) -> None:
    """Predict the experiments and compare them with what was published."""
    about = describe_machine("benchmarks.published.super")
    four = [speeds(model, 4) for model in MODELS]
    eight = [speeds(model, 8) for model in MODELS]
    several = strong()
    if plot_to is not None:
        plot(four, several, HEADS, PUBLISHED, SLICES, plot_to)
    parts = [
        "# SUPER on Lassen: published and predicted",
        f"{about['date']}, commit {about['commit'] or 'unknown'}: "
        f"`{command_line('benchmarks.published.super')}`. Everything but the last column of the "
        f"first table comes from `predict` on `{LASSEN}`; nothing ran there, and nothing is fitted "
        f"to SUPER. Published: {PAPER}.",
        "## Sub-graph against data parallelism, one sequence a device",
        _SPEEDS,
        "On one node of four devices:",
        "\n".join(speed_lines(four, published=True)),
        *([f"![Speeds, published and predicted]({plot_to.name})"] if plot_to else []),
        "On two nodes:",
        "\n".join(speed_lines(eight, published=False)),
        _SHOWN,
        _LAUNCHES.format(us=load_cluster(LASSEN).host.launch_us.value),
        "\n".join(launch_lines(launches())),
        f"GiB of the fullest of four devices, of {load_cluster(LASSEN).limit_gib:.1f} that one can "
        "hold, by estimate:",
        "\n".join(memory_lines(four)),
        own_csub(),
        "## The order of ranks",
        _ORDERS,
        "\n".join(order_lines(orders())),
        "## A batch of 128 on more devices",
        _STRONG,
        "\n".join(strong_lines(several)),
        _LOSS,
    ]
    write_page(parts, out)


_SPEEDS = """\
How many times faster a step is than with data parallelism. "One product": as gridformer computes
attention, all heads of a device together. "One by one": as SUPER's code did, which is public
([LBANN, commit 8faaec753](https://github.com/LLNL/lbann/pull/1879)). It computed products, scale,
mask and softmax of each head by themselves: 17 to 20 launches a head and attention, forward and
backward. In the record of gridformer's code each kernel of attention is replaced by them
(simulated, `benchmarks/published/lbann.py`), so these rows are the ones to compare with the
published numbers; of the layouts, "slice and concat" is the published one. A process has all heads
under data parallelism and 1/g of them under g-way D&SP. A * marks what does not fit into the 16 GB
of a device by estimate, after a model's name for data parallelism: such a speed could not be
measured there."""
_SHOWN = """\
With heads one by one, sub-graphs are predicted to be faster than data parallelism for the two
models with published numbers, by about as much. GPT-2 has fewer heads and longer sequences, whose
kernels take longer than their launches. With heads in one product the effect is gone, under data
parallelism most of all, and D&SP of few devices saves memory rather than time. So the published
speed-ups are those of an implementation that is bound by launches; gridformer's data parallelism is
not."""
_LAUNCHES = """\
How much faster depends on the time of a launch, which was not published. The cluster file has that
of PyTorch on another machine, {us:g} us, and SUPER's code launched from C++ on an older one. 4-way
D&SP with slice and concat against data parallelism on four devices, heads one by one:"""
_CSUB = """\
SUPER's own cSub has only heads as branches, and keeps everything else on the first sub-graph's
device. With T5's dropout, that of attention included, T5-Large-Mod takes {peak:.1f} GiB there, of
{limit:.1f} that estimates may take: it {fits}. In the paper it does not fit."""
_ORDERS = f"""\
T5-Large-Mod, one sequence a device. Contiguous ranks put the members of a segmented collective far
apart, topology-aware ranks put them into one node if possible. With racks, a link between racks of
{RACK} nodes carries 1/{SLOWER} of one within (assumed), and nodes are ordered, too."""
_STRONG = """\
The original Transformer. See above for how heads are computed. A device has at least four sequences
here, so also with heads one by one launches no longer decide, and data parallelism is predicted to
be the faster."""
_LOSS = """\
[Loss against wall clock](published-super-loss.md) with this batch on four devices has a page of its
own."""


if __name__ == "__main__":
    typer.run(main)
