"""The figure of benchmarks.published.super."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.published.super import Speeds


def plot(
    four: Sequence[Speeds],
    several: Sequence[tuple[int, bool, float, float]],
    heads: Mapping[bool, str],
    published: Mapping[str, float],
    layout: str,
    path: Path,
) -> None:
    """Draws the speeds on four devices beside what was published, and the strong scaling.

    Args:
        four: The speeds.
        several: What `benchmarks.published.super.strong` returns.
        heads: How heads are computed, by whether they are launched one by one.
        published: The published speeds by model.
        layout: The name of the layout that they are of.
        path: The figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    bars = {heads[False]: "#9ecae1", heads[True]: "#3182bd"}
    for offset, (kind, color) in enumerate(bars.items()):
        values = [
            (one.per_head if kind == heads[True] else one.batched)[one.names.index(layout)]
            for one in four
        ]
        places = [i + 0.35 * offset - 0.175 for i in range(len(four))]
        left.bar(places, values, 0.33, color=color, label=f"predicted, heads: {kind}")
    known = [(i, published[one.model]) for i, one in enumerate(four) if one.model in published]
    left.plot(*zip(*known), "D", color="#e6550d", label="published")
    left.axhline(1, color="gray", linewidth=0.8)
    left.set_xticks(range(len(four)), [one.model for one in four])
    left.set_ylabel("times faster than data parallelism")
    left.set_ylim(0, 1.45 * left.get_ylim()[1])  # room for the legend
    left.set_title(f"{layout}, on one node of Lassen", fontsize=10)
    for per_head, kind in heads.items():
        some = [one for one in several if one[1] == per_head]
        devices = [one[0] for one in some]
        right.plot(devices, [one[2] for one in some], "o-", color=bars[kind],
                   label=f"data parallel, {kind}")  # fmt: skip
        right.plot(devices, [one[3] for one in some], "x--", color=bars[kind],
                   label=f"4-way D&SP, {kind}")  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks([one[0] for one in several], [str(one[0]) for one in several])
    right.set_xlabel("devices")
    right.set_ylabel("seconds a step")
    right.set_ylim(0)
    right.set_title("the original Transformer, batch of 128", fontsize=10)
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
