"""The figure of the emulated clusters: all that was predicted against all that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.comparisons import Ratios
from benchmarks.published.emulate import Outcome

_MARKERS = "osD^vP*X"


def plot(outcomes: Sequence[Outcome], found: Sequence[Ratios], path: Path) -> None:
    """Draws times of steps, and the ratios of the papers' comparisons."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 6.6))
    known = [one for one in outcomes if not one.predicted.error]
    for number, machine in enumerate(dict.fromkeys(one.machine for one in known)):
        mine = [one for one in known if one.machine == machine]
        left.plot(
            [one.step_s for one in mine],
            [one.predicted.step_s for one in mine],
            _MARKERS[number % len(_MARKERS)],
            label=str(machine),
            alpha=0.75,
        )
    left.set_xlabel("measured, seconds a step")
    left.set_ylabel("predicted, seconds a step")
    left.set_title("layouts")
    for number, section in enumerate(dict.fromkeys(one.comparison.section for one in found)):
        some = [one for one in found if one.comparison.section == section]
        right.plot(
            [one.measured for one in some],
            [one.predicted for one in some],
            _MARKERS[number % len(_MARKERS)],
            label=section,
            alpha=0.75,
        )
    right.set_xlabel("measured")
    right.set_ylabel("predicted")
    right.set_title("how many times faster one layout is than another")
    pairs = [(one.step_s, one.predicted.step_s) for one in known]
    for axis, points in ((left, pairs), (right, [(one.measured, one.predicted) for one in found])):
        axis.set_xscale("log")
        axis.set_yscale("log")
        values = [value for pair in points for value in pair if not math.isnan(value)]
        low, high = (0.8 * min(values), 1.25 * max(values)) if values else (0.1, 10.0)
        line = [low, high]
        axis.plot(line, line, color="#555555", linewidth=1)
        axis.fill_between(line, [0.85 * x for x in line], [1.15 * x for x in line],
                          color="#bbbbbb", alpha=0.4, linewidth=0, label="within 15%")  # fmt: skip
        axis.set_xlim(low, high)
        axis.set_ylim(low, high)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(ticks)
            one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            one.set_minor_formatter(NullFormatter())
        # Below, because points lie in all of the figure.
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.12), frameon=False)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


_TICKS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0)
