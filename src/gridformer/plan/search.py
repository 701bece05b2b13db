"""Searches for the fastest layouts of a model on a cluster.

Every arrangement of the devices is first estimated with a few settings (gridformer.plan.analytic).
The best of them are improved one setting at a time, as long as a change makes a step faster within
the memory of a device. What is then fastest is traced (gridformer.plan.predict), and only layouts
whose trace fits are listed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gridformer.cluster.file import Cluster
from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.memory.layouts import candidates
from gridformer.parallel.registry import describe, spec_of
from gridformer.parallel.validation import broken_rules
from gridformer.plan.analytic import Estimate, estimate
from gridformer.plan.load import Costs
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction

IMPROVED = 24  # arrangements whose settings are improved
ROUNDS = 6  # single changes of settings in a row
# The estimate of memory is approximate: what exceeds the limit by less may fit when it is traced.
MARGIN = 1.1
FEWEST = 2  # layouts are traced, however long that takes
SPARE = 3  # so many times as many layouts are traced at most as are listed

Predict = Callable[[RunConfig, Cluster], Prediction]


@dataclass(frozen=True)
class Found:
    """A layout with the settings that were found for it.

    Attributes:
        run: The run with the layout and these settings.
        estimate: Its estimate.
        prediction: Its traced prediction; None if it was not traced.
    """

    run: RunConfig
    estimate: Estimate
    prediction: Prediction | None = None

    @property
    def name(self) -> str:
        """The layout in words."""
        return describe(self.run.layout)

    @property
    def step_s(self) -> float:
        return self.prediction.step_s if self.prediction else self.estimate.step_s


@dataclass
class Result:
    """What a search has found.

    Attributes:
        layouts: Layouts whose trace fits, fastest first.
        refused: Layouts that fit by the estimate but not by their trace.
        untraced: The next fastest layouts by estimate, for which there was no time. They may not
            fit.
        n_arrangements: Arrangements of the devices that are valid.
        n_estimates: Estimates that were made.
        seconds: How long the search took.
        smallest: The valid layout with the least memory by estimate, whether or not it fits.
    """

    layouts: list[Found] = field(default_factory=list)
    refused: list[Found] = field(default_factory=list)
    untraced: list[Found] = field(default_factory=list)
    n_arrangements: int = 0
    n_estimates: int = 0
    seconds: float = 0.0
    smallest: Found | None = None


class Search:
    """One search.

    Args:
        run: Model, data and training settings. Its layout, recomputation and micro-batches are
            replaced; its global batch is kept.
        cluster: The machine.
        n_devices: The number of devices.
        costs: The costs of another search on this cluster, which remember what it asked.
    """

    def __init__(
        self, run: RunConfig, cluster: Cluster, n_devices: int, costs: Costs | None = None
    ) -> None:
        self.run, self.cluster, self.n_devices = run, cluster, n_devices
        self.costs = costs or Costs(cluster)
        self.n_estimates = 0

    def arrangements(self) -> Iterator[RunConfig]:
        """Yields the run on every arrangement of the devices that is valid with this batch."""
        node = self.cluster.node_size
        placed = node if self.n_devices > node and self.n_devices % node == 0 else 0
        for layout in candidates(self.n_devices):
            layout = layout.model_copy(update={"devices_per_node": placed})
            rows = _rows_at_a_time(layout)
            if self.run.train.global_batch % rows:
                continue
            most = self.run.train.global_batch // rows
            fewest = min(divisors(most), key=lambda n: abs(n - min(most, layout.pp)))
            layout = layout.model_copy(update={"micro_batches": fewest})
            run = self.run.model_copy(update={"layout": layout})
            if not broken_rules(run):
                yield run

    def estimated(self, run: RunConfig) -> Found:
        """Returns the run with its estimate."""
        self.n_estimates += 1
        return Found(run, estimate(run, self.cluster, self.costs))

    def fits(self, found: Found, margin: float = MARGIN) -> bool:
        """Whether the estimate leaves it possible that a layout fits."""
        return found.estimate.peak_gib <= margin * found.estimate.limit_gib

    def first(self, run: RunConfig) -> Found:
        """Returns an arrangement with settings that fit, or those with the least memory.

        It tries replicas that share more and more, and with each smaller micro-batches and more
        recomputation.
        """
        best: Found | None = None
        least: Found | None = None
        for mode in _modes(run.layout):
            for m in _micro_batches(run):
                for recompute in ("none", "full"):
                    changes = mode | {"train.recompute": recompute, "layout.micro_batches": m}
                    other = changed(run, changes)
                    if other is None:
                        continue
                    found = self.estimated(other)
                    if least is None or found.estimate.peak_gib < least.estimate.peak_gib:
                        least = found
                    if self.fits(found):
                        if best is None or found.step_s < best.step_s:
                            best = found
                        break  # more recomputation takes more time
            if best is not None:
                break
        chosen = best or least
        assert chosen is not None, "the run itself is valid"
        return chosen

    def improved(self, found: Found, margin: float = MARGIN) -> Found:
        """Changes one setting at a time, always that which makes a step fastest.

        Args:
            found: A layout.
            margin: How many times the limit the estimated memory may be.
        """
        for _ in range(ROUNDS):
            others = [self.estimated(run) for _, run in neighbors(found.run)]
            fitting = [other for other in others if self.fits(other, margin)]
            best = min(fitting, key=lambda other: other.step_s, default=found)
            if best.step_s >= found.step_s * 0.999:
                return found
            found = best
        return found

    def smaller(self, found: Found, scale: float) -> Found | None:
        """Returns the fastest of a layout's neighbors, and theirs, that fits; None if none does.

        Args:
            found: A layout whose trace does not fit.
            scale: How many times as large as its estimate its traced memory is.
        """
        limit = found.estimate.limit_gib / scale
        tried = [found]
        for _ in range(2):
            more = [self.estimated(run) for one in tried for _, run in neighbors(one.run)]
            fitting = [one for one in more if one.estimate.peak_gib <= limit]
            if fitting:
                return min(fitting, key=lambda one: one.step_s)
            tried = sorted(more, key=lambda one: one.estimate.peak_gib)[:2]
        return None

    def ranked(self, improved: int = IMPROVED) -> tuple[list[Found], Result]:
        """Returns layouts that may fit by the estimate, fastest first, and what was counted.

        Args:
            improved: The settings of so many arrangements are improved.
        """
        result = Result()
        firsts = []
        for run in self.arrangements():
            result.n_arrangements += 1
            firsts.append(self.first(run))
        result.smallest = min(firsts, key=lambda one: one.estimate.peak_gib, default=None)
        fitting = sorted((one for one in firsts if self.fits(one)), key=lambda one: one.step_s)
        found = [self.improved(one) for one in fitting[:improved]] + fitting[improved:]
        result.n_estimates = self.n_estimates
        return sorted(found, key=lambda one: one.step_s), result


def search(
    run: RunConfig,
    cluster: Cluster,
    n_devices: int,
    top: int = 10,
    limit_s: float = float("inf"),
    predictor: Predict = predict,
    tell: Callable[[str], None] = lambda text: None,
) -> Result:
    """Returns the fastest layouts of a run on some devices of a cluster.

    Args:
        run: Model, data and training settings; see `Search`.
        cluster: The machine.
        n_devices: The number of devices.
        top: How many layouts to trace and list.
        limit_s: If a few layouts have been found, no trace is begun that would end after so many
            seconds if it takes as long as the one before it.
        predictor: Traces a run; tests replace it.
        tell: Is told what happens.
    """
    began = time.monotonic()
    tell("estimating layouts")
    asked = Search(run, cluster, n_devices)
    found, result = asked.ranked()
    last_s = 0.0
    queue = [(one.step_s, number, one) for number, one in enumerate(found)]
    for traces in range(top * SPARE):
        if not queue or len(result.layouts) == top:
            break
        here = time.monotonic()
        if len(result.layouts) >= min(top, FEWEST) and here - began + last_s > limit_s:
            break
        _, _, one = heapq.heappop(queue)
        tell(f"tracing {one.name}: {len(result.layouts) + 1} of {top}")
        prediction = predictor(one.run, cluster)
        last_s = time.monotonic() - here
        traced = Found(one.run, one.estimate, prediction)
        assert prediction.peak_gib is not None, "predict estimates memory, too"
        if prediction.fits:
            result.layouts.append(traced)
            continue
        result.refused.append(traced)
        smaller = asked.smaller(one, prediction.peak_gib / one.estimate.peak_gib)
        if smaller is not None:
            heapq.heappush(queue, (smaller.step_s, len(found) + traces, smaller))
    result.layouts.sort(key=lambda one: one.step_s)
    result.untraced = [one for _, _, one in sorted(queue)][: top - len(result.layouts)]
    result.n_estimates, result.seconds = asked.n_estimates, time.monotonic() - began
    return result


# --------------------------------------------------------------------------- settings


def neighbors(run: RunConfig) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yields valid runs that differ in one setting, with the change."""
    for changes in _single_changes(run):
        other = changed(run, changes)
        if other is not None and other != run:
            yield changes, other


def _single_changes(run: RunConfig) -> Iterator[dict[str, Any]]:
    layout = run.layout
    at_most = run.train.global_batch // _rows_at_a_time(layout)
    sizes = divisors(at_most)
    here = sizes.index(layout.micro_batches) if layout.micro_batches in sizes else 0
    for place in (here - 2, here - 1, here + 1, here + 2):
        if 0 <= place < len(sizes):
            yield {"layout.micro_batches": sizes[place]}
    for recompute in ("none", "selective", "full"):
        yield {"train.recompute": recompute}
    if spec_of(layout).replicas(layout) > 1:
        for mode in ("replicate", "zero1", "fsdp"):
            yield {"layout.dp_mode": mode, "layout.reshard": "layer"}
        yield {"layout.dp_mode": "fsdp", "layout.reshard": "step"}
    if layout.pp > 1:
        for k in (1, 2, 3, 4):
            yield {"layout.stages_per_rank": k}
    spec = spec_of(layout)
    if layout.n_processes > 1 and layout.devices_per_node and spec.node_blocks:
        yield {"layout.devices_per_node": 0}
    for key in ("order",):
        if key in spec.keys:
            for value in ("topology", "contiguous"):
                yield {f"layout.{key}": value}


def _modes(layout: LayoutConfig) -> list[dict[str, Any]]:
    """Returns the modes of replicas; each takes less memory than the one before it."""
    modes = ["replicate"]
    if spec_of(layout).replicas(layout) > 1:
        modes += ["zero1", "fsdp"]
    return [{"layout.dp_mode": mode} for mode in modes]


def _micro_batches(run: RunConfig) -> list[int]:
    """Returns a few numbers of micro-batches, the smallest first."""
    layout = run.layout
    sizes = divisors(run.train.global_batch // _rows_at_a_time(layout))
    if layout.pp > 1:
        enough = [m for m in sizes if m >= 2 * layout.pp] or sizes[-1:]
        return list(dict.fromkeys((enough[0], sizes[-1])))
    return list(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def _rows_at_a_time(layout: LayoutConfig) -> int:
    axis = spec_of(layout).samples_over(layout)
    return layout.dp * (int(getattr(layout, axis)) if axis else 1)


def changed(run: RunConfig, changes: dict[str, Any]) -> RunConfig | None:
    """Returns the run with some values changed, or None if that is not valid."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    # Values of one key at a time are valid by themselves, so nothing is validated but the rules.
    other = run.model_copy(
        update={
            name: getattr(run, name).model_copy(update=values) for name, values in sections.items()
        }
    )
    return None if broken_rules(other) else other


# --------------------------------------------------------------------------- defaults of a plan

STEP_TOKENS = 1 << 19  # tokens of a step if nobody says: the batch of GPT-2 and of GPT-3's smallest


def default_batch(run: RunConfig, n_devices: int) -> int:
    """Returns the global batch of a plan for a model alone.

    It is a power of two with about half a million tokens, and at least one sequence per device.
    """
    batch = 1
    while batch * run.seq_len < STEP_TOKENS:
        batch *= 2
    return max(batch, n_devices)


def fastest_dtype(cluster: Cluster) -> str:
    """Returns the type in which a device multiplies fastest; bfloat16 before float16."""
    peaks = cluster.device.peak_tflops
    half = [name for name in ("bfloat16", "float16") if name in peaks]
    best = max(half, key=lambda name: peaks[name].value, default="float32")
    single = peaks.get("float32")
    return best if half and (not single or peaks[best].value > single.value) else "float32"
