"""Which ranks of a layout hold the most memory, so that only few must be estimated."""

from __future__ import annotations

from collections import Counter

from gridformer.config import RunConfig
from gridformer.memory.quick import quick_peaks
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.parallel.registry import spec_of
from gridformer.utils.errors import ConfigError

_CLOSE = 0.78  # of the largest quick peak; see `fullest_ranks`
_CLEARLY = 1.08  # times as large a quick peak; see `fullest_ranks`


def largest_ranks(run: RunConfig, decisions: Decisions | None = None) -> dict[int, str]:
    """Returns the fullest rank of each group of similar ranks, and a description of the group.

    The first rank of a grid owns the grid's vectors besides its shards of everything else, and the
    first replica has as many rows as any other. In D&SP-cSub the first sub-grid, which alone has
    the common layers, is represented apart from the others. Among pipeline stages with the same
    layers the first has the most micro-batches in flight.

    Args:
        run: The checked run.
        decisions: The result of `decide_run(run)`; None calls it.
    """
    layout, decisions = run.layout, decisions or decide_run(run)
    ranks = mesh_ranks(layout, decisions.block)
    found: dict[int, str] = {}
    for pp, stages in _stages(run, decisions).items():
        here = ranks[pp]
        if spec_of(layout).boundary(layout).lies == "first":
            found[int(here[0, 0])] = _join(stages, "first sub-grid")
            if here.shape[1] > 1:
                found[int(here[0, 1])] = _join(stages, "other sub-grids")
        else:
            alike = f"all {here.numel()} alike" if here.numel() > 1 else ""
            if decisions.choices.copied_parameters:  # whose moments only their owner has
                alike = f"fullest of {here.numel()}"
            found[int(here.flatten()[0])] = _join(stages, alike)
    return found


def fullest_ranks(run: RunConfig, decisions: Decisions) -> list[int]:
    """Returns those of `largest_ranks` that may hold the most memory of all ranks.

    The others hold far less by quick estimates, whose errors are similar for all ranks of a run: in
    80 random runs with pipelines the fullest rank had at least 87% of the largest quick peak. Or
    they hold less than an earlier rank of the pipeline, each of whose stages has all that theirs
    have. In none of these runs the fullest rank was left out.

    Args:
        run: The checked run.
        decisions: The result of `decide_run(run)`.
    """
    found = [*largest_ranks(run, decisions)]
    if len(found) == 1:
        return found
    peaks = quick_peaks(run, decisions.choices)
    mesh = mesh_ranks(run.layout, decisions.block).flatten(1).tolist()
    quick = {rank: peak for ranks, peak in zip(mesh, peaks) for rank in ranks}
    least = _CLOSE * max(quick[rank] for rank in found)
    found = [rank for rank in found if quick[rank] >= least]
    place = {rank: pp for pp, ranks in enumerate(mesh) for rank in ranks}
    held = {rank: _held(run, decisions, place[rank]) for rank in found}

    def is_fuller(rank: int, than: int) -> bool:
        more = place[rank] < place[than] and quick[rank] >= _CLEARLY * quick[than]
        return more and all(a >= b for a, b in zip(held[rank], held[than]))

    return [rank for rank in found if not any(is_fuller(other, rank) for other in found)]


def _held(run: RunConfig, decisions: Decisions, pp: int) -> list[Counter[str]]:
    """Returns how many links of each name the stages of a rank have, for its index along pp."""
    stages = stages_of(run.model, run.layout.n_stages, decisions.choices.work)
    names = _names(run)
    return [Counter(names[i] for i in stage) for stage in stages[pp :: run.layout.pp]]


def _names(run: RunConfig) -> list[str]:
    """Returns the names of a model's links without numbers."""
    return [name.rstrip("0123456789. ") for name in link_names(run.model)]


def _stages(run: RunConfig, decisions: Decisions) -> dict[int, str]:
    """Returns the first index along pp of each group that holds the same links, and its name."""
    layout = run.layout
    if layout.pp == 1:
        return {0: ""}
    stages, names = stages_of(run.model, layout.n_stages, decisions.choices.work), _names(run)
    alike: dict[frozenset[tuple[str, int]], list[int]] = {}
    for pp in range(layout.pp):
        held = Counter(names[i] for stage in stages[pp :: layout.pp] for i in stage)
        alike.setdefault(frozenset(held.items()), []).append(pp)
    found = {}
    for first, *others in alike.values():
        like = f" (as {_listed([i + 1 for i in others])})" if others else ""
        found[first] = f"stage {first + 1} of {layout.pp}{like}"
    return found


def _listed(numbers: list[int]) -> str:
    """Formats sorted numbers as ranges, such as `3-5, 8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def chosen_ranks(run: RunConfig, wanted: str, decisions: Decisions | None = None) -> dict[int, str]:
    """Parses the option --ranks.

    Args:
        run: The checked run.
        wanted: Numbers such as `0,5,7`, `all`, or an empty string for the fullest ranks.
        decisions: The result of `decide_run(run)`; None calls it.

    Returns:
        The ranks, and what each represents (see `largest_ranks`).

    Raises:
        ConfigError: `wanted` contains something that is not the number of a rank.
    """
    n = run.layout.n_processes
    if not wanted:
        return largest_ranks(run, decisions)
    if wanted == "all":
        return dict.fromkeys(range(n), "")
    try:
        ranks = [int(word) for word in wanted.split(",")]
    except ValueError:
        raise ConfigError([f"--ranks {wanted}: use numbers, as in 0,5,7, or all"]) from None
    wrong = [rank for rank in ranks if not 0 <= rank < n]
    if wrong:
        last = f"0 to {n - 1}" if n > 1 else "0"
        raise ConfigError([f"--ranks {wanted}: there is no rank {wrong[0]}; use {last}, or all"])
    return dict.fromkeys(ranks, "")
