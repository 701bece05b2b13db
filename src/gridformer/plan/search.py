"""Searches for the fastest layouts of a model on a cluster by estimates.

Every arrangement of the devices is first estimated with a few settings (gridformer.plan.roofline).
The best of them are improved one setting at a time, as long as a change makes a step faster within
the memory of a device. What is then fastest is traced (gridformer.plan.trace_candidates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product, zip_longest
from typing import TypeVar

from gridformer.cluster.costs import Costs
from gridformer.cluster.file import Cluster
from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.memory.layouts import candidates, over_experts
from gridformer.parallel.auto.decisions import Decisions, decisions_of
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.plan.prediction import Prediction
from gridformer.plan.roofline import Estimate, estimate
from gridformer.plan.settings import changed, micro_batches, modes, neighbors
from gridformer.utils.process import on_all_cores

IMPROVED = 36  # arrangements whose settings are improved
ROUNDS = 6  # single changes of settings in a row
# The estimate of memory is approximate: what exceeds the limit by less may fit when it is traced.
MARGIN = 1.1
GAIN = 0.995  # with choices for the cluster, an estimate must be below this part of that without

T = TypeVar("T")
# The kind of a layout for errors of estimated memory: scheme, recomputation, order of a pipeline.
MemoryKind = tuple[str, str, str]


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with settings, its estimate, its prediction if it was traced, and who wanted it."""

    run: RunConfig
    estimate: Estimate
    prediction: Prediction | None = None
    asked: bool = False  # by the user

    @property
    def name(self) -> str:
        """The layout in words."""
        return describe_layout(self.run.layout)

    @property
    def key(self) -> str:
        """What it is told apart by: its name, but rows alone do the same under our two schemes."""
        layout = self.run.layout
        ours = type(spec_of(layout)).__module__.startswith("gridformer.")
        same = ours and sharding(layout) == "rows alone"
        return self.name.removeprefix(layout.scheme) if same else self.name

    @property
    def kind(self) -> str:
        """The kind of layout with which it takes turns."""
        return layout_kind(self.run.layout)

    @property
    def memory_kind(self) -> MemoryKind:
        """What it has in common with layouts whose estimates of memory have like errors."""
        layout = self.run.layout
        pipeline = layout.pipeline_order if layout.pp > 1 else ""
        return layout.scheme, self.run.train.recompute, pipeline

    @property
    def step_s(self) -> float:
        """Seconds of a step, as predicted, or else as estimated."""
        return self.prediction.step_s if self.prediction else self.estimate.step_s

    @property
    def traced(self) -> Prediction:
        """The prediction of a layout that was traced."""
        assert self.prediction is not None, "only traced layouts are listed"
        return self.prediction

    @property
    def peak_gib(self) -> float:
        """The memory of the fullest device of a layout that was traced."""
        assert self.traced.peak_gib is not None, "predict estimates memory, too"
        return self.traced.peak_gib


@dataclass
class Result:
    """What a search has found.

    Attributes:
        layouts: Layouts whose trace fits, fastest first; of those with equal keys the fastest.
        refused: Layouts whose trace does not fit.
        passed_over: Layouts that were not traced, because by the traces of others they need more
            than is estimated, and so do not fit.
        untraced: Layouts that were to be traced, for which there was no time. They may not fit.
        too_large: Kinds of layouts of which none fits by estimate.
        n_arrangements: Arrangements of the devices that are valid.
        seconds: How much of the processor's time the search took.
        smallest: The valid layout with the least memory by estimate, whether or not it fits.
        top: How many layouts are listed, besides those that were asked for.
    """

    layouts: list[PlannedLayout] = field(default_factory=list)
    refused: list[PlannedLayout] = field(default_factory=list)
    passed_over: list[PlannedLayout] = field(default_factory=list)
    untraced: list[PlannedLayout] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)
    n_arrangements: int = 0
    n_estimates: int = 0
    seconds: float = 0.0
    smallest: PlannedLayout | None = None
    top: int = 10

    @property
    def listed(self) -> list[PlannedLayout]:
        """The fastest layouts, and those that were asked for, which may be slow or not fit."""
        rest = [*self.layouts[self.top :], *self.refused]
        return self.layouts[: self.top] + [one for one in rest if one.asked]


class Search:
    """One search for layouts of a run on some devices of a cluster.

    Args:
        run: Model, data and training settings. Its layout, recomputation and micro-batches are
            replaced; its global batch is kept.
        costs: The costs of another search on this cluster, which remember what it asked.
        named: The cluster as `layout.cluster` takes it: layouts that are faster with choices for it
            get it. Empty if none are to.
    """

    def __init__(
        self,
        run: RunConfig,
        cluster: Cluster,
        n_devices: int,
        costs: Costs | None = None,
        named: str = "",
    ) -> None:
        self.run, self.n_devices, self.named = run, n_devices, named
        self.cluster = cluster = cluster.for_processes(n_devices)
        if costs is None or costs.cluster.processes != cluster.processes:
            costs = Costs(cluster)
        self.costs = costs
        self.n_estimates = 0
        self._known: dict[tuple[object, ...], Estimate] = {}

    def arrangements(self) -> Iterator[RunConfig]:
        """Yields the run on every arrangement of the devices that is valid with this batch."""
        node = self.cluster.node_size
        placed = node if self.n_devices > node and self.n_devices % node == 0 else 0
        racked = self.cluster.nodes_per_rack if placed else 0
        if racked and self.n_devices // node % racked:
            racked = 0  # racks of different sizes
        for layout in candidates(self.n_devices):
            parts = spec_of(layout).batch_parts(layout)
            if self.run.train.global_batch % parts and "rows_over" in spec_of(layout).keys_of(
                layout
            ):
                layout = layout.model_copy(update={"rows_over": "sequence"})
                parts = layout.dp
            if self.run.train.global_batch % parts:
                continue
            most = self.run.train.global_batch // parts
            fewest = min(divisors(most), key=lambda n: abs(n - min(most, layout.pp)))
            placement = {"devices_per_node": placed, "nodes_per_rack": racked}
            layout = layout.model_copy(update=placement | {"micro_batches": fewest})
            each = modes(layout) if layout_kind(layout) == REPLICAS else [{}]
            for one, mode in product(over_experts(self.run.model, layout, node), each):
                run = changed(self.run.model_copy(update={"layout": one}), mode)
                if run is not None and spec_of(layout).may_win(run):
                    yield run

    def estimated(self, run: RunConfig, decisions: Decisions | None = None) -> PlannedLayout:
        """Returns the run with its estimate; `decisions` are those of the run, if known."""
        self.n_estimates += 1
        key = run.model, run.data, run.layout, run.train
        if key not in self._known:
            self._known[key] = estimate(run, self.cluster, self.costs, decisions)
        return PlannedLayout(run, self._known[key])

    def fits(self, one: PlannedLayout, margin: float = MARGIN) -> bool:
        """Whether a layout may fit, where its estimate may be `margin` times the limit."""
        return one.estimate.peak_gib <= margin * one.estimate.limit_gib

    def first(self, run: RunConfig) -> PlannedLayout:
        """Returns an arrangement with settings that fit, or those with the least memory.

        It tries modes of replicas that shard more and more, until one fits without recomputation,
        and with each mode smaller micro-batches, sums in each of them, and more recomputation.
        """
        best: PlannedLayout | None = None
        tried: list[PlannedLayout] = []
        for mode in [{}] if layout_kind(run.layout) == REPLICAS else modes(run.layout):
            for m in micro_batches(run):
                sharded = mode.get("layout.dp_mode", run.layout.dp_mode) == "fsdp"
                syncs = ("step", "micro_batch") if sharded and m > 1 else ("step",)
                for recompute, sync in product(("none", "full"), syncs):
                    changes = mode | {"train.recompute": recompute, "train.recompute_layers": 0}
                    changes |= {"layout.micro_batches": m, "layout.gradient_sync": sync}
                    other = changed(run, changes)
                    if other is None:
                        continue
                    tried.append(one := self.estimated(other))
                    if self.fits(one):
                        best = one if best is None or one.step_s < best.step_s else best
                        break  # more recomputation takes more time
            if best is not None and best.run.train.recompute == "none":
                break
        # The run itself is valid, so something was tried.
        return best or min(tried, key=lambda one: one.estimate.peak_gib)

    def improved(self, best: PlannedLayout, margin: float = MARGIN) -> PlannedLayout:
        """Changes one setting at a time, always the one that makes a step fastest."""
        for _ in range(ROUNDS):
            runs = [run for _, run in neighbors(best.run)]
            if best.kind == REPLICAS:  # their modes are layouts of their own
                runs = [run for run in runs if run.layout.dp_mode == best.run.layout.dp_mode]
            fitting = [one for one in map(self.estimated, runs) if self.fits(one, margin)]
            fastest = min(fitting, key=lambda one: one.step_s, default=best)
            if fastest.step_s >= best.step_s * 0.999:
                break
            best = fastest
        return self.fewest_recomputed(best)

    def fewest_recomputed(self, best: PlannedLayout) -> PlannedLayout:
        """Recomputes no more layers of each stage than memory demands, where it recomputes all."""
        run = best.run
        if not run.train.recomputes_blocks or run.train.recompute_layers:
            return best
        model = run.model
        layers = model.n_layers + model.n_decoder_layers * model.two_stacks
        low, high = 1, layers // run.layout.n_stages if run.layout.pp > 1 else layers
        while low < high:
            k = (low + high) // 2
            other = changed(run, {"train.recompute_layers": k})
            one = self.estimated(other) if other is not None else best
            if self.fits(one, 1.0):
                best, high = one, k
            else:
                low = k + 1
        return best

    def for_cluster(self, one: PlannedLayout) -> PlannedLayout:
        """Returns a layout with `layout.cluster` if it is faster with choices for the cluster."""
        if not self.named or one.run.layout.cluster:
            return one
        other = changed(one.run, {"layout.cluster": self.named})
        if other is None:
            return one
        mine, theirs = decisions_of(one.run), decisions_of(other)
        if mine.choices.products == theirs.choices.products:
            return one
        timed = self.estimated(other, theirs)
        return timed if self.fits(timed) and timed.step_s < GAIN * one.step_s else one

    def smaller(self, large: PlannedLayout, scale: float) -> PlannedLayout | None:
        """Returns the fastest of a layout's neighbors, and theirs, that fits; None if none does.

        The layout's traced memory is `scale` times as large as its estimate.
        """
        limit = large.estimate.limit_gib / scale
        tried = [large]
        for _ in range(2):
            more = [self.estimated(run) for one in tried for _, run in neighbors(one.run)]
            fitting = [one for one in more if one.estimate.peak_gib <= limit]
            if fitting:
                return min(fitting, key=lambda one: one.step_s)
            tried = sorted(more, key=lambda one: one.estimate.peak_gib)[:2]
        return None

    def ranked(
        self, improved: int = IMPROVED, copies: bool = False
    ) -> tuple[list[PlannedLayout], Result]:
        """Returns layouts that may fit by the estimate, fastest first, and what was counted.

        Args:
            improved: The settings of this many arrangements are improved; kinds take turns.
            copies: Whether copies of this process share the work, where they can.
        """
        runs = [*self.arrangements()]
        firsts = self._each(self.first, runs, copies)
        fitting = sorted((one for one in firsts if self.fits(one)), key=lambda one: one.step_s)
        of_kind: dict[str, list[PlannedLayout]] = {}
        for one in fitting:
            of_kind.setdefault(one.kind, []).append(one)
        in_turns = [one for turn in zip_longest(*of_kind.values()) for one in turn if one]
        best = self._each(
            lambda one: self.for_cluster(self.improved(one)), in_turns[:improved], copies
        )
        layouts = sorted(best + in_turns[improved:], key=lambda one: one.step_s)
        return layouts, Result(
            too_large=sorted({one.kind for one in firsts} - {*of_kind}),
            n_arrangements=len(runs),
            n_estimates=self.n_estimates,
            smallest=min(firsts, key=lambda one: one.estimate.peak_gib, default=None),
        )

    def _each(
        self, function: Callable[[T], PlannedLayout], work: Sequence[T], copies: bool
    ) -> list[PlannedLayout]:
        """Returns what a function finds for each piece of work, and counts its estimates."""

        def counted(some: Sequence[T]) -> list[tuple[PlannedLayout, int]]:
            results = []
            for one in some:
                self.n_estimates = 0
                results.append((function(one), self.n_estimates))
            return results

        before = self.n_estimates
        each = on_all_cores(counted, work) if copies else counted(work)
        self.n_estimates = before + sum(n for _, n in each)
        return [one for one, _ in each]


REPLICAS, PIPELINE = "data parallel", "pipeline"


def layout_kind(layout: LayoutConfig) -> str:
    """Returns the kind of a layout, of which a search compares several with each other kind."""
    return PIPELINE if layout.pp > 1 else sharding(layout)


def sharding(layout: LayoutConfig) -> str:
    """Returns how a layout shards products, whatever its pipeline and replicas."""
    rows, cols = spec_of(layout).grid(layout)
    if layout.branches > 1:
        return "sub-graph"
    if rows > 1:
        return "2-D grid" if cols > 1 else "rows alone"
    return "Megatron" if cols > 1 else REPLICAS


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
