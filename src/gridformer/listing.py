"""All layouts of a model on a number of processes: which work, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import LayoutConfig, RunConfig, Scheme, as_yaml, divisors
from gridformer.errors import ConfigError
from gridformer.layout import check
from gridformer.parallel.registry import SPECS, spec_of


@dataclass(frozen=True)
class Listed:
    """A layout, with the batch that it was checked with.

    problems: none where it works. modes: of its replicas, those that work, in the order of
    `layout.dp_mode`'s values; one where there are no replicas.
    """

    layout: LayoutConfig
    global_batch: int
    problems: tuple[str, ...]
    modes: tuple[str, ...]

    @property
    def settings(self) -> str:
        """What to write in a run file's layout, as overrides."""
        default = LayoutConfig()
        changed = {
            key: value
            for key, value in self.layout.model_dump(mode="json").items()
            if value != getattr(default, key)
        }
        return " ".join(f"layout.{key}={as_yaml(value)}" for key, value in changed.items())


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
    as they have stages. Raises ConfigError where the model itself cannot be.
    """
    found = []
    for layout in candidates(processes):
        if schemes and layout.scheme not in schemes:
            continue
        batch = global_batch or _smallest_batch(layout)
        problems = _problems(model, layout, batch, seq_len)
        modes = ["replicate"] if not problems else []
        for mode in ("zero1", "fsdp") if not problems else ():
            other = layout.model_copy(update={"dp_mode": mode})
            if not _problems(model, other, batch, seq_len):
                modes.append(mode)
        found.append(Listed(layout, batch, tuple(problems), tuple(modes)))
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


def by_reason(listed: Sequence[Listed]) -> dict[str, list[Listed]]:
    """Those that do not work, by the first reason why."""
    found: dict[str, list[Listed]] = {}
    for one in listed:
        if one.problems:
            found.setdefault(one.problems[0], []).append(one)
    return found


def _problems(
    model: dict[str, Any], layout: LayoutConfig, global_batch: int, seq_len: int
) -> list[str]:
    data = {"path": ".", "seq_len": seq_len}
    run = RunConfig.model_validate(
        {"model": model, "layout": layout, "data": data, "train": {"global_batch": global_batch}}
    )
    try:
        check(run)
    except ConfigError as error:
        return error.problems
    return []


def _smallest_batch(layout: LayoutConfig) -> int:
    axis = spec_of(layout).samples_over(layout)
    return layout.dp * (getattr(layout, axis) if axis else 1) * layout.micro_batches
