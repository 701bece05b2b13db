"""The table of published numbers that nothing is fitted to, and its means."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.planner.held_out import (
    GPT3,
    OPTIMUS,
    OWN,
    SUPER,
    SUPER_OWN,
    TITAN,
    V100,
    ZERO,
    ZERO_OWN,
    Found,
)

BAR = 0.15  # of the mean error of rows that are kept apart
# What the means leave out, by the words that say so.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "SUPER": (SUPER,),
    "ZeRO-3": (ZERO,),
    "Megatron-LM 1.0": (V100,),
    "GPT-3 on H100": (GPT3,),
    "torchtitan on H100": (TITAN,),
    "Optimus' inference": (OPTIMUS,),
    "SUPER and ZeRO-3": (SUPER, ZERO),
}


def apart_lines(found: Sequence[Found]) -> list[str]:
    """Returns the table of all rows, the table of means, and what they say of the winners."""
    lines = [
        "| group | published number | machine | published | predicted | ratio | right winner? | "
        "note |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for one in found:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        winner = {None: "", True: "yes", False: "**no**"}[one.right_winner]
        cells = [one.group, one.name, one.cluster, f"{_shown(one.published)} {one.unit}".strip()]
        cells += [_shown(one.predicted), ratio, winner, one.note]
        lines.append(f"| {' | '.join(cells)} |")
    sources = {one.group: one.source for one in found}
    said = "; ".join(f"{group}: {source}" for group, source in sources.items())
    return [*lines, "", f"Sources: {said}.", "", *mean_lines(found), "", *winner_lines(found)]


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if value > 100 else f"{value:.3g}"


def mean_error(found: Sequence[Found], keeps: Callable[[Found], bool]) -> tuple[float, int]:
    """Returns the mean of |predicted / published - 1| over some rows, and how many they are."""
    errors = [abs(one.ratio - 1) for one in found if one.ratio is not None and keeps(one)]
    return (sum(errors) / len(errors) if errors else 0.0), len(errors)


def mean_lines(found: Sequence[Found]) -> list[str]:
    """Returns the table of mean errors with and without each exclusion."""

    def row(name: str, keeps: Callable[[Found], bool]) -> str:
        mean, n = mean_error(found, keeps)
        return f"| {name} | {n} | {mean:.1%} | {'yes' if mean <= BAR else '**no**'} |"

    own = {SUPER_OWN: SUPER, ZERO_OWN: ZERO}
    lines = [
        "| mean of the distances of the ratios from 1 | rows | mean | at most 15%? |",
        "|---|---:|---:|---|",
        row("each published number once, what is simulated included", lambda o: o.group not in OWN),
    ]
    for name, groups in LEFT_OUT.items():
        lines.append(
            row(
                f"the same without {name}",
                lambda o, groups=groups: o.group not in (*OWN, *groups),  # type: ignore[misc]
            )
        )
    lines += [
        row("gridformer's own code in the place of what is simulated",
            lambda o: o.group not in own.values()),
        row("nothing simulated: without SUPER and ZeRO-3 of either kind",
            lambda o: o.group not in (*own, *own.values())),
    ]  # fmt: skip
    return lines


def winner_lines(found: Sequence[Found]) -> list[str]:
    """Says in how many rows the published winner is predicted, and where it is not."""
    lines = []
    for name, own in (("as the published code ran", False), ("gridformer's own code", True)):
        rows = [o for o in found if o.right_winner is not None and (o.group in OWN) == own]
        missed = [f"{o.group}: {o.name}" for o in rows if not o.right_winner]
        said = f" Missed: {'; '.join(missed)}." if missed else ""
        right = len(rows) - len(missed)
        lines.append(
            f"Winners whose published gap is more than 5%, {name}: {right} of {len(rows)} are "
            f"predicted.{said}"
        )
    return "\n\n".join(lines).split("\n")
