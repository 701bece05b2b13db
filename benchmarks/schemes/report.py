"""Formats the results file of `benchmarks.schemes` as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

from benchmarks.schemes.results import Group, Row

REFERENCE = "single"
# The variants of the figure: of each scheme the one that `auto` or its users would take.
DRAWN = ("megatron", "megatron-sp", "optimus-broadcast", "optimus-auto", "torch-tp", "fsdp-tp-kept")
ALIKE = 0.05  # two runs of one variant differ by about this ratio
_TORCH = ("torch", "fsdp")  # how the names of variants of torch alone begin
_NOTES = """\
Each variant runs a stack of N GPT-2 blocks from x [b, s, h] to y [b, s, h], without embedding, head
or optimizer, in float32 without dropout. All variants start from the same weights, and the run
stops unless y, dx and every weight's gradient equal one process's to 1e-4. The variants of a table
alternate in one set of processes: in each round each of them runs one forward and one backward. A
phase takes as long as on its slowest process, and backward includes every reduction of gradients
within the replica. Times are medians over the rounds, with quartiles in brackets. **Ratio** is the
time of a layer, forward and backward, divided by one process's time in the same round; the ideal is
1.0, because the processes share the reference's cores.

"Collectives" counts those issued per layer; one that is issued once per step counts 1/N. "Moved"
counts the elements of four bytes that cross one rank's link per layer, on the rank that moves most,
and in brackets their ratio to the formula of [Where things lie](../concepts/placement.md), or for
FSDP to that of `benchmarks/schemes/traffic.py` (products only, without statistics, vectors and what
recomputation skips). Live memory is that of the fullest rank: per layer for parameters, gradients
and what is kept for backward, and for the whole stack for workspace (buffers that stay from step to
step) and peak."""


def report(groups: Iterable[Group]) -> str:
    """Return everything in the file as Markdown."""
    ordered = sorted(groups, key=lambda g: (g.processes, _size_order(g), g.recompute))
    if not ordered:
        return "Nothing has been measured yet.\n"
    parts = [
        "# Tensor-parallel schemes, per layer",
        _header(ordered),
        _NOTES,
        _headline(ordered),
        conclusion(ordered),
    ]
    for group in ordered:
        parts += [f"## {group.title}", _subtitle(group), _times(group), _volumes(group)]
        parts.append(_unable(group))
    return "\n\n".join(part for part in parts if part) + "\n"


def _size_order(group: Group) -> tuple[int, str]:
    return group.size["h"], group.name


def _header(groups: list[Group]) -> str:
    """Return one line for each machine and commit that contributed results."""
    lines = []
    for machine in {tuple(g.machine.items()): g.machine for g in groups}.values():
        cores = int(machine["cores"])
        processes = sorted({g.processes for g in groups if g.machine == machine})
        commit = f", commit {machine['commit']}" if machine["commit"] else ""
        lines.append(
            f"- {machine['date']}: {machine['cpu']}, {cores} core{'s' * (cores > 1)} for "
            f"{', '.join(map(str, processes))} process{'es' * (processes != [1])}; torch "
            f"{machine['torch']}, {machine['backend']}, Python {machine['python']}{commit}: "
            f"`{machine['command']}`{machine.get('busy', '')}"
        )
    return "\n".join(lines)


def _subtitle(group: Group) -> str:
    size = group.size
    shape = f"b={size['b']} s={size['s']} h={size['h']} n={size['n']} N={size['layers']}"
    reference = _reference(group)
    threads = f"; ratios to one process with {_threads(reference)}" if reference else ""
    return f"{shape}; {group.rounds} round{'s' * (group.rounds > 1)}{threads}."


def _threads(row: Row) -> str:
    return f"{row.threads} thread{'s' * (row.threads > 1)}"


def _headline(groups: list[Group]) -> str:
    """Return a table of all median ratios with one column for each group."""
    names = {row.name: None for group in groups for row in group.rows}
    head = ["ratio to one process"]
    for g in groups:
        head.append(f"{g.name} p={g.processes}{', recomputed' if g.recompute else ''}")
    lines = []
    for name in names:
        cells = [name]
        for group in groups:
            row = next((r for r in group.rows if r.name == name), None)
            values = _ratios(group, row) if row else []
            cells.append(f"{median(values):.2f}" if values else "-")
        lines.append(cells)
    return _table(head, lines)


def ratios(group: Group) -> dict[str, float]:
    """Return the median ratio of each variant that several processes run."""
    found = {row.name: _ratios(group, row) for row in group.rows if row.name != REFERENCE}
    return {name: median(values) for name, values in found.items() if values}


def conclusion(groups: list[Group]) -> str:
    """Return a sentence for each group of several processes without recomputation: who is first."""
    lines = []
    for group in groups:
        found = ratios(group) if group.processes > 1 and not group.recompute else {}
        if not found:
            continue
        ordered = sorted(found, key=found.__getitem__)
        best = found[ordered[0]]
        first = [name for name in ordered if found[name] <= best + ALIKE]
        are = "are" if first[1:] else "is"
        to = f" to {found[first[-1]]:.2f}" if first[1:] else ""
        line = f"- {group.name}, {group.processes} processes: "
        line += f"{', '.join(first)} {are} the fastest ({best:.2f}{to})"
        theirs = [name for name in ordered if name.startswith(_TORCH)]
        ours = [name for name in ordered if not name.startswith(_TORCH)]
        if theirs and ours:
            line += f"; torch's best, {theirs[0]}, takes {found[theirs[0]] / found[ours[0]]:.2f} "
            line += f"times as long as our best, {ours[0]}"
        lines.append(line + f"; {ordered[-1]} is the slowest ({found[ordered[-1]]:.2f}).")
    return "\n".join(["**In short**, of what this page measured:\n", *lines]) if lines else ""


def draw(groups: Iterable[Group], path: Path) -> None:
    """Draw the ratios over processes, one panel for each size, without recomputation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plain = [g for g in groups if g.processes > 1 and not g.recompute and ratios(g)]
    sizes = list(dict.fromkeys(g.name for g in sorted(plain, key=_size_order)))
    figure, panels = plt.subplots(1, max(1, len(sizes)), figsize=(10, 4.2), squeeze=False)
    for panel, name in zip(panels[0], sizes):
        mine = sorted((g for g in plain if g.name == name), key=lambda g: g.processes)
        for variant in dict.fromkeys(v for g in mine for v in ratios(g) if v in DRAWN):
            points = [(g.processes, ratios(g)[variant]) for g in mine if variant in ratios(g)]
            theirs = variant.startswith(_TORCH)
            panel.plot(*zip(*points), "--s" if theirs else "-o", label=variant, alpha=0.8)
        panel.axhline(1.0, color="#888888", linewidth=1)
        panel.set_xlabel("processes")
        panel.set_xticks([g.processes for g in mine])
        panel.set_title(f"{name}: hidden size {mine[0].size['h']}", fontsize=10)
    panels[0][0].set_ylabel("time of a layer, one process = 1")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _times(group: Group) -> str:
    lines = []
    layers = group.size["layers"]
    for row in group.rows:
        if not row.seconds:
            continue
        forward, backward = (
            [1e3 * seconds[phase] / layers for seconds in row.seconds] for phase in (0, 1)
        )
        both = [f + b for f, b in zip(forward, backward)]
        cells = [row.name, row.title, f"{row.threads}"]
        cells += [_spread(values, 1) for values in (forward, backward, both)]
        cells.append(_spread(_ratios(group, row), 2))
        lines.append(cells)
    head = ["variant", "", "threads", "forward, ms", "backward, ms", "both, ms", "ratio"]
    return _table(head, lines)


def _volumes(group: Group) -> str:
    lines = []
    layers = group.size["layers"]
    for row in group.rows:
        if row.count is None or row.moved is None or row.formula is None or row.live is None:
            continue
        cells = [row.name]
        cells += [_collectives(count, layers) for count in row.count]
        cells += [_moved(m / layers, f) for m, f in zip(row.moved, row.formula)]
        for kind in ("parameters", "gradients", "kept"):
            cells.append(f"{row.live[kind] / layers / 2**20:.2f}")
        cells += [f"{row.live[kind] / 2**20:.2f}" for kind in ("workspace", "peak")]
        lines.append(cells)
    head = ["variant", "collectives forward", "backward", "moved forward", "backward"]
    return _table([*head, "parameters, MiB", "gradients", "kept", "workspace", "peak"], lines)


def _unable(group: Group) -> str:
    rows = [row for row in group.rows if row.obstacles]
    return "\n".join(f"- {r.title} cannot run: {', '.join(r.obstacles)}" for r in rows)


def _reference(group: Group) -> Row | None:
    return next((row for row in group.rows if row.name == REFERENCE), None)


def _ratios(group: Group, row: Row) -> list[float]:
    """Return the time divided by the reference's time, round by round."""
    reference = _reference(group)
    if reference is None or not reference.seconds or not row.seconds:
        return []
    return [sum(mine) / sum(its) for mine, its in zip(row.seconds, reference.seconds)]


def _spread(values: Sequence[float], digits: int) -> str:
    """Return median and quartiles as `12.3 [11.9, 13.0]`."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _collectives(count: dict[str, int], layers: int) -> str:
    """Return collectives per layer as `10: 6 all_gather, 4 reduce_scatter`."""
    if not count:
        return "0"
    total = _per(sum(count.values()), layers)
    kinds = [f"{_per(n, layers)} {kind}" for kind, n in Counter(count).most_common()]
    return f"{total}: {', '.join(kinds)}" if len(kinds) > 1 else kinds[0]


def _per(n: int, layers: int) -> str:
    return f"{n / layers:.2f}".rstrip("0").rstrip(".")


def _moved(measured: float, formula: float) -> str:
    if not formula:
        return f"{measured:,.0f}"
    return f"{measured:,.0f} ({measured / formula:.2f})"


def _table(head: list[str], lines: list[list[str]]) -> str:
    if not lines:
        return ""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *lines])
