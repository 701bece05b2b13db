"""Tables and a picture of the measurements of benchmarks.subgraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.subgraph.cases import SHAPES, Case, Variant, all_cases, variants
from gridformer.utils.units import MIB

Measured = Mapping[str, dict[str, Any]]
SWEEPS = {"per-head": "work per head fixed", "total": "total work fixed"}

HEAD = """# Sub-graph parallelism beside data parallelism

{machines}

Each step runs a stack of blocks in float32: forward, backward with the sums of gradients that
overlap it, and AdamW. All variants start from the same weights and process the same global batch,
and the run stops unless a variant's loss after a step equals data parallelism's to 1e-4. The
variants of a case alternate in one set of processes; times are those of the slowest process, as
medians over the rounds (quartiles in brackets). **Speed-up** is the median of data parallelism's
time divided by the variant's in the same round. D&SP branches attention and feed-forward; "of
attention" leaves the feed-forward common. **The paper's
variant** (SUPER, Jain et al. 2021) is "of heads, slice and concat": `feed_forward: common` and
`attention: outside`. Its branches are only the heads: slices of q, k and v enter them, their
results are concatenated, and the projections are common layers. Messages count those that a process
sends in a step, including the piece for itself, and elements are those that cross one process's
link. Messages, elements and bytes are those of the fullest process. States are parameters,
gradients and AdamW's moments; the peak is the most bytes of tensors alive at once.

The processes share two cores and communicate over loopback: sending costs processor time instead of
a network's time, and arithmetic does not get faster with more processes.
"""


def report(measured: Measured) -> str:
    """Return Markdown of all measurements."""
    machines = sorted({_machine(values) for values in measured.values()})
    parts = [HEAD.format(machines="\n".join(machines))]
    for (shape, each, processes), cases in _grouped(cases_of(measured)).items():
        samples = f"{each} sample{'s' if each > 1 else ''} a process"
        parts.append(f"## {SHAPES[shape].title}, {samples}, {processes} processes\n")
        parts.append(_speedups(cases, measured, processes))
        heaviest = max(cases, key=lambda case: (case.hidden, case.heads))
        parts.append(f"In detail, {heaviest.describe()}:\n")
        parts.append(_details(measured[heaviest.key]))
    return "\n".join(parts)


def panels_of(cases: Sequence[Case]) -> dict[tuple[str, int, str], list[Case]]:
    """Return the cases of each panel by shape, samples per process and sweep.

    Raises:
        ValueError: There is none.
    """
    panels = {
        (shape, each, sweep): [case for case in some if case.sweep == sweep]
        for (shape, each, processes), some in _grouped(cases).items()
        for sweep in SWEEPS
        if processes == 4
    }
    panels = {key: some for key, some in panels.items() if len(some) > 1}
    if not panels:
        raise ValueError("nothing to plot: it takes 4 processes and two numbers of heads")
    return panels


def plot(measured: Measured, path: Path) -> None:
    """Plot speed-ups over data parallelism by heads; one panel per shape, batch and sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = panels_of(cases_of(measured))
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(9, 2.6 * rows), squeeze=False, sharey=True)
    colors = {"dsp": "#0b6e99", "dsp-attention": "#7a9e3f", "paper": "#6b4fa0", "csub": "#c4612a"}
    for axis, (key, cases) in zip(axes.flat, panels.items()):
        shape, each, sweep = key
        for variant in variants(4)[1:]:
            family, _, g = variant.name.rpartition("-")
            speedups = [_speedup(measured[case.key], variant.name) for case in cases]
            style = "-" if g == "4" else "--"
            axis.plot([case.heads for case in cases], speedups, style, color=colors[family],
                      marker="o", markersize=3, label=variant.title)  # fmt: skip
        axis.axhline(1.0, color="#888888", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([case.heads for case in cases], [str(case.heads) for case in cases])
        axis.minorticks_off()
        axis.set_title(f"{SHAPES[shape].title}, {each} a process, {SWEEPS[sweep]}", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("speed-up over data parallel", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("heads", fontsize=8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    legend = 0.1 + 0.17 * -(-len(labels) // 3)  # inches
    figure.tight_layout(rect=(0, legend / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def cases_of(measured: Measured) -> list[Case]:
    """Return the measured cases, in every sweep that they belong to."""
    cases = [Case(**values["case"]) for values in measured.values()]
    every = (one for case in cases for one in all_cases(case.processes, [case.shape]))
    return [*dict.fromkeys([*cases, *(one for one in every if one.key in measured)])]


def _grouped(cases: Sequence[Case]) -> dict[tuple[str, int, int], list[Case]]:
    """Return cases by shape, samples per process and processes, in order of sweeps and heads."""
    shapes = [*SHAPES]
    grouped: dict[tuple[str, int, int], list[Case]] = {}
    for case in sorted(
        cases, key=lambda c: (c.processes, shapes.index(c.shape), c.each, c.sweep, c.heads)
    ):
        grouped.setdefault((case.shape, case.each, case.processes), []).append(case)
    return grouped


def _speedups(cases: list[Case], measured: Measured, processes: int) -> str:
    head = ["speed-up"] + [f"{case.heads} heads, h={case.hidden}" for case in cases]
    lines = [["", *(SWEEPS[case.sweep] for case in cases)]]
    first = ["data parallel, ms"]
    first += [f"{1e3 * median(_row(measured[c.key], 'dp')['seconds']):.0f}" for c in cases]
    lines.append(first)
    for variant in variants(processes)[1:]:
        values = [_speedup(measured[case.key], variant.name) for case in cases]
        lines.append([variant.title, *(f"{value:.2f}" for value in values)])
    return _table(head, lines)


def _details(values: dict[str, Any]) -> str:
    head = ["variant", "step, ms", "speed-up", "collectives", "messages", "moved, M elements"]
    head += ["of them gradients", "parameters, MiB", "states", "peak"]
    lines = []
    for row in values["rows"]:
        low, middle, high = quantiles(row["seconds"], n=4, method="inclusive")
        lines.append(
            [
                row["title"],
                f"{1e3 * middle:.0f} [{1e3 * low:.0f}, {1e3 * high:.0f}]",
                f"{_speedup(values, row['name']):.2f}",
                f"{sum(row['collectives'].values())}",
                f"{row['messages']}",
                f"{row['moved'] / 1e6:.2f}",
                f"{row['moved_gradients'] / 1e6:.2f}",
                *(f"{row[kind] / MIB:.1f}" for kind in ("parameters", "states", "peak")),
            ]
        )
    return _table(head, lines)


def _row(values: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in values["rows"] if row["name"] == name)
    return found


def _speedup(values: dict[str, Any], name: str) -> float:
    pairs = zip(_row(values, "dp")["seconds"], _row(values, name)["seconds"])
    return median(dp / mine for dp, mine in pairs)


def _machine(values: dict[str, Any]) -> str:
    m = values["machine"]
    return (
        f"- {m['date']}: {m['cpu']}, {m['cores']} cores; torch {m['torch']}, gloo, Python "
        f"{m['python']}, commit {m['commit']}, {values['rounds']} rounds: `{m['command']}`"
        f"{m.get('busy', '')}"
    )


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *lines]) + "\n"


__all__ = ["Variant", "plot", "report"]
