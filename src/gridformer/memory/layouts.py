"""Lists all layouts of a model on a number of processes, and why some of them do not work."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, divisors
from gridformer.parallel.registry import describe_layout, spec_of, specs
from gridformer.parallel.validation import violations
from gridformer.utils.units import format_setting

_OF_MACHINES = ("cluster", "devices_per_node", "nodes_per_rack", "order")  # keys of machines


@dataclass(frozen=True)
class Listed:
    """A layout and whether it works.

    Attributes:
        global_batch: The global batch that it was checked with.
        problems: Why it does not work, without offers; empty if it does.
        modes: The values of `layout.dp_mode` that work, in the order of that key, each with the
            approximate peak of a rank in bytes (without the vocabulary's share if the model's
            vocabulary is not known). Without replicas there is only one.
    """

    layout: LayoutConfig
    global_batch: int
    problems: tuple[str, ...]
    modes: dict[str, float]

    @property
    def name(self) -> str:
        """A short description such as `optimus 2x2, dp=2`."""
        return describe_layout(self.layout)

    @property
    def settings(self) -> str:
        """The layout as command-line overrides of a run file without a layout."""
        return self.settings_over(LayoutConfig())

    def settings_over(self, layout: LayoutConfig) -> str:
        """Returns the layout as command-line overrides of a run file with some layout.

        Settings of that layout that this one does not have are reset to their defaults, except
        those that describe machines.
        """
        plain = LayoutConfig().model_dump(mode="json")
        before = layout.model_dump(mode="json")
        changed = {
            key: value
            for key, value in self.layout.model_dump(mode="json").items()
            if value != before[key] and (value != plain[key] or key not in _OF_MACHINES)
        }
        return " ".join(format_setting(f"layout.{key}", value) for key, value in changed.items())


def list_layouts(
    run: RunConfig,
    devices: int,
    global_batch: int = 0,
    schemes: Sequence[str] = (),
    seconds: float = math.inf,
) -> list[Listed]:
    """Lists every arrangement of `devices` for a run, checked as `gridformer train` would.

    A pipeline gets as many micro-batches as it has stages.

    Args:
        run: The run, whose layout does not count.
        devices: The number of devices, one per process.
        global_batch: The global batch. 0 uses `common_batch`, so that only the model decides
            whether a layout works.
        schemes: The schemes to list; empty lists all.
        seconds: Processor time for the checks; candidates that are not checked by then are left
            out. The time of other programs, and that of loading torch from a cold disk, does not
            count.
    """
    listed = []
    end = time.process_time() + seconds
    batch = global_batch or common_batch(devices, schemes)
    train = run.train.model_copy(update={"global_batch": batch})
    for layout in candidates(devices, schemes):
        if time.process_time() > end:
            break
        run = run.model_copy(update={"layout": layout, "train": train})
        problems = _problems(run)
        modes = {} if problems else {"replicate": _held(run)}
        for mode in ("zero1", "fsdp") if not problems else ():
            other = run.model_copy(update={"layout": layout.model_copy(update={"dp_mode": mode})})
            if not _problems(other):
                modes[mode] = _held(other)
        listed.append(Listed(layout, batch, tuple(problems), modes))
    return listed


def common_batch(processes: int, schemes: Sequence[str] = ()) -> int:
    """Returns the smallest global batch that every one of `candidates` can split."""
    every = candidates(processes, schemes)
    return math.lcm(*(spec_of(one).batch_parts(one) * one.micro_batches for one in every))


def candidates(processes: int, schemes: Sequence[str] = ()) -> Iterator[LayoutConfig]:
    """Yields all arrangements of pipeline stages, replicas and grid, without checking any model.

    `schemes` are those of the layouts; empty means all.
    """
    for pp in divisors(processes):
        for dp in divisors(processes // pp):
            rest = processes // (pp * dp)
            common: dict[str, Any] = {"pp": pp, "dp": dp, "micro_batches": pp}
            for name, spec in specs().items():
                if schemes and name not in schemes:
                    continue
                for arrangement in spec.arrangements(rest):
                    yield LayoutConfig(scheme=name, **arrangement, **common)


def over_experts(model: ModelConfig, layout: LayoutConfig, node: int) -> Iterator[LayoutConfig]:
    """Yields a layout, and for a model with experts also with these over devices.

    They lie over all of the grid and as many replicas as there are experts, or as `node` devices
    hold.
    """
    yield layout
    keys = [key for key in spec_of(layout).axes if getattr(layout, key) > 1]
    grid = math.prod(getattr(layout, key) for key in keys)
    if not model.n_experts or grid > model.n_experts:
        return
    fitting = [n for n in divisors(layout.dp) if n * grid <= model.n_experts]
    inside = [n for n in fitting if n * grid <= node]
    for n in dict.fromkeys((*fitting[-1:], *inside[-1:])):
        over = (*keys, *["dp"] * (n > 1))
        if over:
            groups = n if 1 < n < layout.dp else 0
            yield layout.model_copy(update={"experts_over": over, "experts_dp": groups})


@dataclass(frozen=True)
class Reason:
    """A reason for which layouts do not work, and how many.

    Attributes:
        where: The sizes to which it applies, such as `cols=2, 4, 8`, or `cols=8 to 128` if these
            are many and no listed layout has another size between them.
    """

    where: str
    why: str
    n_layouts: int


def reasons(listed: Sequence[Listed]) -> list[Reason]:
    """Groups layouts that fail for the same reason, whatever their sizes; the most frequent first.

    A layout counts toward the first of its problems.
    """
    sizes: dict[str, dict[str, set[int]]] = {}
    possible = divisors(listed[0].layout.n_processes) if listed else []
    counts: Counter[str] = Counter()
    for one in listed:
        if not one.problems:
            continue
        what, where = _cause(one)
        counts[what] += 1
        for name, size in where.items():
            sizes.setdefault(what, {}).setdefault(name, set()).add(size)
    every = []
    for what, count in counts.most_common():
        parts = (
            f"{name}={_enumerated(sorted(mine), possible)}"
            for name, mine in sorted(sizes.get(what, {}).items())
        )
        every.append(Reason("; ".join(parts), what, count))
    return every


def _enumerated(sizes: Sequence[int], possible: Sequence[int]) -> str:
    """Returns `2, 4, 8`, or `8 to 128` for more than three sizes with no possible one between."""
    between = [size for size in possible if sizes[0] <= size <= sizes[-1]]
    if len(sizes) > 3 and between == [*sizes]:
        return f"{sizes[0]} to {sizes[-1]}"
    return ", ".join(map(str, sizes))


_SIZE = re.compile(r"layout\.(\w+)(?:=| \()(\d+)\)?")


def _cause(one: Listed) -> tuple[str, dict[str, int]]:
    """Returns the first problem of a layout without its sizes, and these sizes by name."""
    problem = one.problems[0].partition(": use ")[0]
    where = {name: int(size) for name, size in _SIZE.findall(problem) if int(size) > 1}
    head, over, _ = problem.partition(" over layout.")
    if over and head.startswith("train."):  # a batch, which is split over several axes
        return head, {"samples at a time": math.prod(where.values())}
    if over:
        return head, where
    return problem.partition(": ")[2] if problem.startswith("layout.") else problem, where


def _problems(run: RunConfig) -> list[str]:
    return [broken.text for broken in violations(run)]


def _held(run: RunConfig) -> float:
    from gridformer.memory.quick import quick_estimate

    return quick_estimate(run)
