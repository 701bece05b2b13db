"""Traces what ranks of a run do in a step, as far as its time on any cluster follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from gridformer.check.sample import alike_stages
from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.registry import spec_of
from gridformer.plan.fewer_rounds import removable_rounds, without_rounds
from gridformer.trace.device import Backend
from gridformer.trace.events import Trace
from gridformer.trace.fewer_layers import removable, without_layers
from gridformer.trace.rank import trace_runs
from gridformer.utils.errors import UserError
from gridformer.utils.garbage import no_garbage_collection

Kind = Literal["cuda", "cpu"]
KEPT = 2  # layers of the shortest stage of the shorter sample; the other one has one more


@dataclass(frozen=True)
class Recorded:
    """What the ranks of a run do, from which its time on any cluster of a kind follows.

    Attributes:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        traces: The traces of the ranks that differ.
        training: Whether it is an optimizer step.
        shorter: Traces with one layer fewer in each stage; empty if `traces` have all layers.
        more: How many layers each stage has besides those of `traces`.
        earlier: The same with one round of micro-batches fewer; None if there is no such sample.
        rounds: How many rounds the run has besides those of this record.
    """

    run: RunConfig
    decisions: Decisions
    traces: list[Trace]
    training: bool
    shorter: list[Trace] = field(default_factory=list)
    more: int = 0
    earlier: Recorded | None = None
    rounds: int = 0


@dataclass(frozen=True)
class Shortened:
    """Which shortened steps of a run are traced, and what is left out of them.

    Attributes:
        run: The run, on the type of device.
        decisions: The decisions of its layout.
        training: Whether it is an optimizer step.
        layers: How many layers of each stage each sample leaves out; the first leaves out one fewer
            than the second, if there are two.
        rounds: The same for rounds of micro-batches.
    """

    run: RunConfig
    decisions: Decisions
    training: bool
    layers: tuple[int, ...] = (0,)
    rounds: tuple[int, ...] = (0,)

    @staticmethod
    def of(
        run: RunConfig,
        decisions: Decisions,
        training: bool,
        whole: bool = False,
        kept: int = KEPT,
    ) -> Shortened:
        """Returns the shortened steps from which the time of a step follows.

        Args:
            run, decisions, training: See `Shortened`.
            whole: Whether all layers and micro-batches are traced.
            kept: How many layers the shortest stage keeps in the shortest sample.
        """
        if whole:
            return Shortened(run, decisions, training)
        n, m = removable(run, decisions, kept), removable_rounds(run)
        if run.layout.pp > 1 and run.model.two_stacks:
            n = 0  # with as many layers fewer in each stage, other stages would be the slowest
        layers, rounds = ((k - 1, k) if k else (0,) for k in (n, m))
        return Shortened(run, decisions, training, layers, rounds)

    def traces(self, kind: Kind, fewer: int) -> list[list[Trace]]:
        """Returns the traces with this many layers fewer, for each number of rounds.

        Args:
            kind: The type of device.
            fewer: How many layers each stage has less than in the run.

        Returns:
            For each number of rounds, the traces of the ranks that differ.

        Raises:
            UserError: The step of this run fails.
        """
        return joined(line() for line in self.lines(kind, fewer))

    def lines(self, kind: Kind, fewer: int) -> list[Callable[[], list[list[Trace]]]]:
        """Returns functions that make the traces, each for one list of `different_ranks`.

        The longest list comes first. See `traces`.
        """

        def line(ranks: Sequence[int]) -> list[list[Trace]]:
            with without_layers(self.run, self.decisions, fewer) as part, no_garbage_collection():
                runs = [without_rounds(part, n) for n in self.rounds]
                return _traces_of(runs, ranks, kind, self.decisions, self.training)

        with without_layers(self.run, self.decisions, fewer) as part:
            ranks = different_ranks(part, self.decisions)
        return [partial(line, some) for some in sorted(ranks, key=len, reverse=True)]


def joined(lines: Iterable[list[list[Trace]]]) -> list[list[Trace]]:
    """Returns the traces of all lines, for each number of rounds in the order of ranks."""
    return [
        sorted((trace for traces in some for trace in traces), key=lambda trace: trace.rank)
        for some in zip(*lines)
    ]


def on_device_type(run: RunConfig, kind: Kind) -> RunConfig:
    """Returns a run on a type of device."""
    return run.model_copy(update={"train": run.train.model_copy(update={"device": kind})})


def unfused(run: RunConfig, cluster: Cluster) -> RunConfig:
    """Returns the run with attention that keeps its scores if the cluster has no fused one.

    Scores of attention without dropout are then kept like those with very little of it, which no
    fused kernel computes.
    """
    if cluster.device.fused_attention:
        return run
    model = run.model
    if not model.attention_dropout:
        model = model.model_copy(update={"attention_dropout": 1e-6})
    train = run.train.model_copy(update={"kernels": "torch"})
    return run.model_copy(update={"model": model, "train": train})


def record_run(
    run: RunConfig,
    kind: Kind = "cuda",
    decisions: Decisions | None = None,
    training: bool = True,
    whole: bool = False,
    kept: int = KEPT,
) -> Recorded:
    """Traces a run's step for `gridformer.plan.price`.

    Args:
        run: The checked run.
        kind: The type of device.
        decisions: What `decide_run(run)` returns, or others, such as another block of a node.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        whole: Whether all layers and micro-batches are traced; otherwise see
            `gridformer.trace.fewer_layers` and `gridformer.plan.fewer_rounds`.
        kept: How many layers the shortest stage keeps in the shortest sample.

    Raises:
        UserError: The step of this run fails.
    """
    run = on_device_type(run, kind)
    shortened = Shortened.of(run, decisions or decide_run(run), training, whole, kept)
    samples = [shortened.traces(kind, fewer) for fewer in shortened.layers]

    def with_rounds(number: int) -> Recorded:
        traces, *shorter = (sample[number] for sample in samples)
        return Recorded(
            run,
            shortened.decisions,
            traces,
            training,
            shorter[0] if shorter else [],
            shortened.layers[0],
        )

    later = with_rounds(0)
    if len(shortened.rounds) == 1:
        return later
    return replace(later, earlier=with_rounds(1), rounds=shortened.rounds[0])


def _traces_of(
    runs: Sequence[RunConfig],
    ranks: Sequence[int],
    kind: Kind,
    decisions: Decisions,
    training: bool,
) -> list[list[Trace]]:
    """Traces ranks whose stages have equal layers.

    Args:
        runs: The run, and the same with fewer micro-batches if it is asked for.
        ranks: The ranks.
        kind: The type of device.
        decisions: The decisions of its layout.
        training: Whether it is an optimizer step.

    Returns:
        The traces of each run.

    Raises:
        UserError: A trace does not come to its end.
    """
    backend: Backend = "nccl" if kind == "cuda" else "gloo"
    found = trace_runs(runs, ranks, decisions, True, backend, training)
    for trace in (trace for traces in found for trace in traces):
        if not trace.complete:
            raise UserError(
                f"the step of rank {trace.rank} fails: {trace.troubles[-1].text}; "
                "`gridformer check` says more"
            )
    return found


def different_ranks(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns ranks that stand for all, in lists of those whose stages have equal layers.

    These are the first rank of each stage, on each kind of sub-grid.
    """
    layout = run.layout
    mesh = mesh_ranks(layout, decisions.block)
    places = [0]
    if spec_of(layout).boundary(layout).lies == "first" and mesh[0, 0].numel() > 1:
        places.append(1)  # a sub-grid without the common layers
    stages = alike_stages(run, decisions)
    return [
        [int(mesh[stage].flatten()[place]) for stage in line] for line in stages for place in places
    ]
