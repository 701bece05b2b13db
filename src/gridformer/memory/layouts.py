"""All layouts of a model on a number of processes: which work, and why the others do not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import LayoutConfig, RunConfig, Scheme, divisors
from gridformer.parallel.registry import SPECS, describe, spec_of
from gridformer.parallel.validation import check
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import format_setting


@dataclass(frozen=True)
class Listed:
    """A layout, with the batch that it was checked with.

    problems: none where it works. modes: of its replicas, those that work, in the order of
    `layout.dp_mode`'s values, each with about the most bytes that a rank holds then (nothing where
    the model's vocabulary is not known); one where there are no replicas.
    """

    layout: LayoutConfig
    global_batch: int
    problems: tuple[str, ...]
    modes: dict[str, float]

    @property
    def name(self) -> str:
        """In a few words, `optimus 2x2, dp=2`."""
        return describe(self.layout)

    @property
    def settings(self) -> str:
        """What to write in a run file's layout, as overrides."""
        default = LayoutConfig()
        changed = {
            key: value
            for key, value in self.layout.model_dump(mode="json").items()
            if value != getattr(default, key)
        }
        return " ".join(format_setting(f"layout.{key}", value) for key, value in changed.items())


def list_layouts(
    model: dict[str, Any],
    processes: int,
    global_batch: int = 0,
    seq_len: int = 0,
    schemes: Sequence[Scheme] = (),
) -> list[Listed]:
    """Every way to arrange `processes` for a model, checked as `gridformer train` would.

    model: the mapping of a run file's section. global_batch: 0 takes for each layout the smallest
    batch that it can cut, so that only the model decides. Pipelines are given as many micro-batches
    as they have stages. A rank's memory is estimated for float32.
    Raises ConfigError where the model itself cannot be.
    """
    found = []
    for layout in candidates(processes):
        if schemes and layout.scheme not in schemes:
            continue
        batch = global_batch or _smallest_batch(layout)
        run = _run(model, layout, batch, seq_len)
        problems = _problems(run)
        modes = {} if problems else {"replicate": _held(run)}
        for mode in ("zero1", "fsdp") if not problems else ():
            other = _run(model, layout.model_copy(update={"dp_mode": mode}), batch, seq_len)
            if not _problems(other):
                modes[mode] = _held(other)
        found.append(Listed(layout, batch, tuple(problems), modes))
    return found


def candidates(processes: int) -> Iterator[LayoutConfig]:
    """Arrangements by pipeline stages, replicas and grid, whether a model allows them or not."""
    for pp in divisors(processes):
        for dp in divisors(processes // pp):
            rest = processes // (pp * dp)
            common: dict[str, Any] = {"pp": pp, "dp": dp, "micro_batches": pp}
            for name, spec in SPECS.items():
                for arrangement in spec.arrangements(rest):
                    yield LayoutConfig(scheme=name, **arrangement, **common)


@dataclass(frozen=True)
class Reason:
    """Why some layouts do not work. where: what they have in common, `cols=2, 4, 8`."""

    where: str
    why: str
    n_layouts: int


def reasons(listed: Sequence[Listed]) -> list[Reason]:
    """One for all layouts that fail for the same reason, whatever their sizes; the most first.

    A layout counts for the first of its problems.
    """
    sizes: dict[str, dict[str, set[int]]] = {}
    counts: Counter[str] = Counter()
    for one in listed:
        if not one.problems:
            continue
        what, where = _cause(one)
        counts[what] += 1
        for name, size in where.items():
            sizes.setdefault(what, {}).setdefault(name, set()).add(size)
    found = []
    for what, count in counts.most_common():
        parts = (
            f"{name}={', '.join(map(str, sorted(found_sizes)))}"
            for name, found_sizes in sorted(sizes.get(what, {}).items())
        )
        found.append(Reason("; ".join(parts), what, count))
    return found


_SIZE = re.compile(r"layout\.(\w+)(?:=| \()(\d+)\)?")


def _cause(one: Listed) -> tuple[str, dict[str, int]]:
    """The first problem of a layout without its sizes, and those sizes."""
    problem = one.problems[0].partition(": use ")[0]
    where = {name: int(size) for name, size in _SIZE.findall(problem) if int(size) > 1}
    head, over, _ = problem.partition(" over layout.")
    if over and head.startswith("train."):  # a batch, over all that it is cut for
        return head, {"samples at a time": math.prod(where.values())}
    if over:
        return head, where
    return problem.partition(": ")[2] if problem.startswith("layout.") else problem, where


def _run(model: dict[str, Any], layout: LayoutConfig, global_batch: int, seq_len: int) -> RunConfig:
    data = {"path": ".", "seq_len": seq_len}
    return RunConfig.model_validate(
        {"model": model, "layout": layout, "data": data, "train": {"global_batch": global_batch}}
    )


def _problems(run: RunConfig) -> list[str]:
    try:
        check(run)
    except ConfigError as error:
        return error.problems
    return []


def _held(run: RunConfig) -> float:
    from gridformer.memory.analytic import quick_estimate

    return quick_estimate(run)


def _smallest_batch(layout: LayoutConfig) -> int:
    axis = spec_of(layout).samples_over(layout)
    return layout.dp * (getattr(layout, axis) if axis else 1) * layout.micro_batches
