"""Predicts how long a step of a run takes on a cluster, from traces of the ranks that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.ranks import fullest_ranks
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.plan.fewer_stages import FewerStages, ShorterPipeline, fewer_stages
from gridformer.plan.prediction import Prediction
from gridformer.plan.price import Prices, warnings_of
from gridformer.plan.program import Spent
from gridformer.plan.recorded import KEPT, Shortened, joined, on_device_type, unfused
from gridformer.trace.events import Trace
from gridformer.utils.beside import shared, started
from gridformer.utils.units import GIB

_NOTICEABLE = 1e-3  # of a step: if a layer more hides this much, more layers are traced
_MOST_KEPT = 12  # layers of the shortest sample


class _Sample(NamedTuple):
    """What the traces with one number of layers show.

    Attributes:
        spent: What the ranks spend their time on, for each number of rounds of micro-batches.
        warnings: What makes the prediction less certain.
    """

    spent: list[list[Spent]]
    warnings: list[str]


def predict(
    run: RunConfig,
    cluster: Cluster,
    layers_only: bool = False,
    training: bool = True,
    memory: bool = True,
    timeline: bool = False,
    on_all_cores: bool = False,
) -> Prediction:
    """Predicts one optimizer step of a checked run on a cluster.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The run.
        cluster: The cluster.
        layers_only: Whether only transformer layers count, forward and backward.
        training: Whether it is an optimizer step; otherwise the forward passes of a batch.
        memory: Whether the memory is estimated, too: that of an optimizer step.
        timeline: Whether the prediction keeps what each rank does when.
        on_all_cores: Whether copies of this process do it, as many as there are cores.

    Raises:
        UserError: The step of this run fails, which `gridformer check` explains.
    """
    kind = cluster.device.kind
    run = on_device_type(run, kind)
    decisions = decide_run(run)
    prices = Prices(run, decisions, training, cluster, layers_only)
    memory = memory and training
    held = _held(unfused(run, cluster), decisions) if memory else []
    if not timeline and (fewer := fewer_stages(run, decisions, cluster)):
        deep, peaks = _of_pipelines(fewer, prices, held, on_all_cores)
        if deep is not None:
            prediction = prices.of_ranks(deep.spent[0])
            prediction.warnings = deep.warnings
            return _with_memory(prediction, peaks)
        held = [partial(int, peak) for peak in peaks]
    shortened = Shortened.of(run, decisions, training, whole=timeline)

    def sample(number: int) -> _Sample:
        return timed(number, shortened.traces(kind, shortened.layers[number]))

    def timed(number: int, traces: list[list[Trace]]) -> _Sample:
        spent = prices.replayed(traces, timeline and not number)
        return _Sample(spent, [] if number else warnings_of(run, prices.cluster, traces[0]))

    samples: list[_Sample]
    if not on_all_cores:
        peaks = [peak() for peak in held]
        samples = [sample(number) for number, _ in enumerate(shortened.layers)]
    elif len(shortened.layers) > 1:
        pieces = [partial(sample, number) for number, _ in enumerate(shortened.layers)]
        # What takes longest comes first: in a pipeline its many passes, else memory, which runs
        # all layers.
        work: list[Callable[[], Any]] = [*pieces, *held] if run.layout.pp > 1 else [*held, *pieces]
        found = shared(work)
        samples = [one for one in found if isinstance(one, _Sample)]
        peaks = [one for one in found if isinstance(one, int)]
    else:
        # The one sample takes longer than all the rest, and its traces are too large to come from
        # a copy, except for those of stages that are like no others. Peaks can wait.
        longest, *others = shortened.lines(kind, 0)
        rest, peaks_of = started(others, then=held)
        traces = longest()
        samples = [timed(0, joined([traces, *rest()]))]
        peaks = peaks_of()
    if kept := _layers_to_keep(run, samples):
        shortened = Shortened.of(run, decisions, training, kept=kept)
        numbers = range(len(shortened.layers))
        samples = [sample(number) for number in numbers]
    layers, rounds = shortened.layers[0], shortened.rounds[0]
    prediction = prices.prediction([one.spent for one in samples], layers, rounds)
    prediction.warnings = samples[0].warnings
    return _with_memory(prediction, peaks)


def _with_memory(prediction: Prediction, peaks: Sequence[int]) -> Prediction:
    """Adds the peaks of ranks to a prediction, in bytes, if they were estimated."""
    if peaks:
        prediction.peak_gib = max(peaks) / GIB
        prediction.fits = prediction.peak_gib <= prediction.limit_gib
    return prediction


def _of_pipelines(
    fewer: FewerStages, prices: Prices, held: Sequence[Callable[[], int]], on_all_cores: bool
) -> tuple[_Sample | None, list[int]]:
    """Returns what follows from shorter pipelines, None if nothing does, and the peaks of ranks.

    Args:
        fewer: The shorter pipelines.
        prices: Those of the run with all stages.
        held: What estimates the peaks.
        on_all_cores: See `predict`.
    """
    work: list[Callable[[], Any]] = [*held]
    work += [partial(_of_pipeline, one, prices) for one in reversed(fewer.pipelines)]
    done = shared(work) if on_all_cores else [one() for one in work]
    pipelines: list[_Sample] = done[len(held) :][::-1]
    spent = fewer.extended([one.spent[0] for one in pipelines])
    found = None if spent is None else _Sample([spent], pipelines[0].warnings)
    return found, done[: len(held)]


def _of_pipeline(pipeline: ShorterPipeline, whole: Prices) -> _Sample:
    """Returns what the ranks of a shorter pipeline spend their time on, in their order along pp.

    Args:
        pipeline: The shorter pipeline.
        whole: The prices of the run with all stages.
    """
    run, kind, decisions = pipeline.run, whole.cluster.device.kind, whole.decisions
    n = whole.run.layout.n_processes
    prices = Prices(run, decisions, whole.training, whole.cluster, whole.layers_only, n)
    with pipeline.cut():
        shortened = Shortened.of(run, decisions, whole.training)
        traces = [shortened.traces(kind, n) for n in shortened.layers]
        samples = [prices.replayed(one) for one in traces]
    spent = prices.spent(samples, shortened.layers[0], shortened.rounds[0])
    stages = mesh_ranks(run.layout, decisions.block).flatten(1).tolist()
    place = {rank: stage for stage, ranks in enumerate(stages) for rank in ranks}
    spent = sorted(spent, key=lambda one: place[one.rank])
    return _Sample([spent], warnings_of(whole.run, whole.cluster, traces[0][0]))


def _layers_to_keep(run: RunConfig, samples: Sequence[_Sample]) -> int:
    """Returns with how many layers the run is to be traced again; 0 if it is not.

    The sum of a large table's gradient, which is the first, may take longer than the backward pass
    of a few layers. Then one more layer hides more of it, but only until all of it is hidden.

    Args:
        run: The run.
        samples: Those with the fewest layers, the shortest one last.
    """
    if len(samples) < 2 or run.layout.pp > 1:
        return 0
    kept = 0
    more, fewer = (one.spent[0] for one in samples)
    for longer, shorter in zip(more, fewer):
        for axis, seconds in shorter.exposed.items():
            hidden = seconds - longer.exposed.get(axis, 0.0)
            if hidden > _NOTICEABLE * longer.end:
                kept = max(kept, KEPT + math.ceil(seconds / hidden))
    return min(kept, _MOST_KEPT)


def _held(run: RunConfig, decisions: Decisions) -> list[Callable[[], int]]:
    """Returns what estimates the peaks of the ranks with the most memory, in bytes."""

    def peak(rank: int) -> int:
        return estimate_rank(run, rank, decisions, timeline=False).needed

    return [partial(peak, rank) for rank in fullest_ranks(run, decisions)]
