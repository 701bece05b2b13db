"""Which ranks of a layout hold the most memory, so that only few must be estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.parallel.registry import spec_of
from gridformer.utils.errors import ConfigError


def largest_ranks(run: RunConfig, decisions: Decisions | None = None) -> dict[int, str]:
    """Returns the fullest rank of each group of similar ranks, and a description of the group.

    The first rank of a grid owns the grid's vectors besides its shards of everything else, and the
    first replica has as many rows as any other. In D&SP-cSub the first sub-grid, which alone has
    the common layers, is represented apart from the others. Among pipeline stages with the same
    layers the first has the most micro-batches in flight. With zb_h1 and zbv the last has the most
    late gradients of weights, and stands for itself.
    """
    layout, decisions = run.layout, decisions or decide_run(run)
    ranks = mesh_ranks(layout, decisions.block)
    largest: dict[int, str] = {}
    for pp, stages in _stages(run, decisions).items():
        here = ranks[pp]
        if spec_of(layout).boundary(layout).activation_layout == "first":
            largest[int(here[0, 0])] = _join(stages, "first sub-grid")
            if here.shape[1] > 1:
                largest[int(here[0, 1])] = _join(stages, "other sub-grids")
        else:
            alike = f"all {here.numel()} alike" if here.numel() > 1 else ""
            if decisions.choices.copied_parameters:  # whose moments only their owner has
                alike = f"fullest of {here.numel()}"
            largest[int(here.flatten()[0])] = _join(stages, alike)
    return largest


def _stages(run: RunConfig, decisions: Decisions) -> dict[int, str]:
    """Returns the first index along pp of each group that holds the same links, and its name."""
    layout = run.layout
    if layout.pp == 1:
        return {0: ""}
    names = [name.rstrip("0123456789. ") for name in link_names(run.model)]
    stages = stages_of(run.model, layout.n_stages, decisions.choices.work)
    alike: dict[frozenset[tuple[str, int]], list[int]] = {}
    for pp in range(layout.pp):
        held = Counter(names[i] for stage in layout.stages_on(pp) for i in stages[stage])
        alike.setdefault(frozenset(held.items()), []).append(pp)
    groups = [*alike.values()]
    if layout.splits_backward:
        groups = [part for one in groups for part in (one[:-1], one[-1:]) if part]
    names_of = {}
    for first, *others in groups:
        like = f" (as {ranges([i + 1 for i in others])})" if others else ""
        names_of[first] = f"stage {first + 1} of {layout.pp}{like}"
    return names_of


def ranges(numbers: Sequence[int]) -> str:
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
    """Returns the ranks of the option --ranks, and what each represents; see `largest_ranks`.

    Args:
        run: The checked run.
        wanted: Numbers such as `0,5,7`, `all`, or an empty string for the fullest ranks.
        decisions: The result of `decide_run(run)`; None calls it.

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
        raise ConfigError(f"--ranks {wanted}: use numbers, as in 0,5,7, or all") from None
    wrong = [rank for rank in ranks if not 0 <= rank < n]
    if wrong:
        last = f"0 to {n - 1}" if n > 1 else "0"
        raise ConfigError(f"--ranks {wanted}: there is no rank {wrong[0]}; use {last}, or all")
    return dict.fromkeys(ranks, "")
