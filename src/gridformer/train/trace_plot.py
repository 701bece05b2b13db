"""A trace as a picture: who computed which micro-batch when, and waited for what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = {"forward": "#8fbce6", "backward": "#e3b27a", "send": "#b9d8b0", "recv": "#eeeeee"}
OTHER, WAITING = "#c9c9c9", "#c2334d"
MOST_RANKS = 64  # more rows than that cannot be told apart


def plot_trace(path: Path, trace: Mapping[str, Any]) -> Path:
    """Draw a merged trace (gridformer.train.trace) into a PNG; a row a rank, from the top.

    Forward and backward passes carry the number of their micro-batch; on a rank of several stages
    the later ones are hatched. Red lines are waits for collectives.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] < MOST_RANKS]
    ranks = 1 + max(e["pid"] for e in slices)
    first: dict[int, int] = {}
    for event in slices:
        if event["cat"] == "pass":
            stage = event["args"]["stage"]
            first[event["pid"]] = min(stage, first.get(event["pid"], stage))
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.45 * ranks), layout="constrained")
    end = max(e["ts"] + e["dur"] for e in slices) / 1e3
    for event in slices:
        rank, start, width = event["pid"], event["ts"] / 1e3, event["dur"] / 1e3
        kind, _, micro = event["name"].partition(" ")
        if event["cat"] == "wait":
            axes.barh(rank, width, left=start, height=0.12, color=WAITING, zorder=3)
            continue
        is_pass = event["cat"] == "pass"
        hatch = "//" if is_pass and event["args"]["stage"] > first[rank] else None
        colour = COLOURS.get(kind, OTHER)
        height = 0.8 if is_pass else 0.5
        axes.barh(
            rank, width, left=start, height=height, color=colour, hatch=hatch, edgecolor="w", lw=0.4
        )
        if is_pass and width > 0.01 * end:
            axes.text(start + width / 2, rank - 0.2, micro, ha="center", va="center", fontsize=7)
    axes.set(xlabel="ms", yticks=range(ranks), xlim=(0, end))
    axes.set_title(path.stem, loc="left")
    axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = [Patch(color=COLOURS[kind], label=kind) for kind in ("forward", "backward")]
    shown.append(Patch(color=OTHER, label="other"))
    shown.append(Patch(color=WAITING, label="waits for a collective"))
    axes.legend(handles=shown, ncols=4, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=130)
    plt.close(figure)
    return picture
