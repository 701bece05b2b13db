"""Pipelines with fewer stages, from whose times those of a deep pipeline follow.

The ranks in the middle of a pipeline do the same work at different times. If the rounds of
micro-batches stay the same, each further rank makes the step longer by the same time. So a deep
pipeline is traced with few stages, three times, and its times are extended along a line through two
of these samples. The third must lie on that line; if it does not, all stages are traced.

If stages have different numbers of layers, some stages of each kind are left out. If the nodes and
racks of the machine hold several stages, stages are left out in numbers that fill these, so that
messages between stages take the same links. With several stages a rank, rounds may have more
micro-batches than there are ranks. These get more with the number of ranks, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.partition import link_names, stages_of, with_stages
from gridformer.plan.extended import extended
from gridformer.plan.fewer_rounds import KEPT
from gridformer.plan.program import Spent

LEAST = 6  # equal ranks along pp, one after the other, that the shortest pipeline keeps
SAMPLES = 3
MOST = 2 * KEPT + 1  # rounds of micro-batches that are traced of a pipeline with all its ranks
PASSES = 6000  # of all ranks, each way: with fewer of them a pipeline is traced whole
WORTH = 0.5  # a pipeline is traced whole if its samples have more than this part of its passes
_MOST = 16  # ranks along pp that are left out together
_TIMES = (1, 2, 3, 4)  # ratios of the ranks that are left out of different segments
_SAME = 1e-4  # by how much the longest sample may be off the line through the others


@dataclass(frozen=True)
class ShorterPipeline:
    """A shorter pipeline.

    Attributes:
        run: Its run.
        stages: The links of each stage.
    """

    run: RunConfig
    stages: tuple[range, ...]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cuts its model into its stages, inside the context."""
        with with_stages(self.run.model, self.stages):
            yield


@dataclass(frozen=True)
class FewerStages:
    """Shorter pipelines that stand for a deep one.

    Attributes:
        pipelines: The shorter pipelines, the shortest first.
        kept: How many ranks along pp the shortest one keeps of each segment. A segment consists of
            successive ranks with equal stages.
        step: How many more ranks of each segment each further pipeline has.
        more: The deep pipeline has this many times `step` ranks more than the second one.
    """

    pipelines: tuple[ShorterPipeline, ...]
    kept: tuple[int, ...]
    step: tuple[int, ...]
    more: int

    def extended(self, samples: Sequence[Sequence[Spent]]) -> list[Spent] | None:
        """Returns what ranks of the deep pipeline spend their time on.

        These are the first and the last ones of each segment, as many as the shortest pipeline has.

        Args:
            samples: What the ranks of each pipeline spend, in their order along pp.

        Returns:
            The times, or None if the longest pipeline is not on the line through the others.
        """
        each = len(samples[0]) // sum(self.kept)  # ranks of a stage
        one, two, three = (
            [some[place * each + i] for place in self._ends(number) for i in range(each)]
            for number, some in enumerate(samples)
        )
        for a, b, c in zip(one, two, three):
            if abs(extended(b, a, 1).end - c.end) > _SAME * c.end:
                return None
        return [extended(b, a, self.more) for a, b in zip(one, two)]

    def _ends(self, number: int) -> list[int]:
        """Returns the places along pp of a sample that the shortest one has, too."""
        longer = [kept + number * step for kept, step in zip(self.kept, self.step)]
        return _ends_of(longer, self.kept)


def fewer_stages(run: RunConfig, decisions: Decisions, cluster: Cluster) -> FewerStages | None:
    """Returns shorter pipelines from whose times those of a run follow; None if there are none.

    Args:
        run: The run.
        decisions: The result of `decide_run(run)`.
        cluster: The cluster.
    """
    layout, model = run.layout, run.model
    rounds, rest = divmod(layout.micro_batches, layout.pp)
    passes = layout.pp * layout.stages_per_rank * min(layout.micro_batches, MOST * layout.pp)
    if passes < PASSES or model.two_stacks:
        return None
    if not rounds and layout.pipeline_order != "gpipe":
        return None  # shorter pipelines come to alternate between forward and backward passes
    if cluster.device.kind == "cpu":  # its processes share cores, and so their number counts
        return None
    mesh = mesh_ranks(layout, decisions.block)
    period = _period(mesh, cluster)
    if period is None:
        return None
    stages = stages_of(model, layout.n_stages, decisions.choices.work)
    lengths = _segments(run, stages)

    def rests_of(depths: Sequence[int], times: int) -> list[int]:
        if rest and layout.stages_per_rank > 1:
            return _rests(rest, rounds, layout.pp, depths, times)
        return [rest] * SAMPLES

    best = _best_step(lengths, period, rests_of)
    if best is None:
        return None
    kept, step, times = best
    depths = _depths(kept, step)
    if not _same_places(run, decisions, mesh, depths):
        return None
    rests, pipelines = rests_of(depths, times), []
    for number in range(SAMPLES):
        longer = [most - (times - number) * less for most, less in zip(lengths, step)]
        places = _ends_of(lengths, longer, kept)
        pipelines.append(_shorter(run, stages, places, rounds * len(places) + rests[number]))
    return FewerStages(tuple(pipelines), kept, step, times - 1)


def _segments(run: RunConfig, stages: Sequence[range]) -> list[int]:
    """Returns how many ranks along pp have equal stages, one after the other."""
    pp = run.layout.pp
    names = [name.rstrip("0123456789") for name in link_names(run.model)]
    held = [
        tuple(tuple(names[i] for i in stage) for stage in stages[place::pp]) for place in range(pp)
    ]
    return [len([*same]) for _, same in itertools.groupby(held)]


def _depths(kept: Sequence[int], step: Sequence[int]) -> list[int]:
    """Returns the ranks along pp of each sample."""
    return [sum(kept) + number * sum(step) for number in range(SAMPLES)]


def _best_step(
    lengths: Sequence[int],
    period: int,
    rests_of: Callable[[Sequence[int], int], list[int]],
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Chooses how many ranks of each segment are left out.

    Args:
        lengths: The ranks of each segment.
        period: The ranks of a segment are left out in multiples of this.
        rests_of: Returns the micro-batches beyond whole rounds of each sample, from their ranks and
            from how many times `step` is left out; none if there are no such samples.

    Returns:
        `FewerStages.kept` and `step`, and how many times `step` is left out of the deep pipeline to
        get the shortest one. None if the samples are not much less work than the deep one.
    """
    # All places in a node or a rack are at either end, and no node or rack holds both ends.
    shortest = max(LEAST, 2 * period)
    long = [i for i, n in enumerate(lengths) if n >= shortest + SAMPLES * period]
    best, least = None, WORTH * sum(lengths) ** 2
    for times_each in itertools.product(_TIMES, repeat=len(long)) if 0 < len(long) <= 3 else ():
        step = [0] * len(lengths)
        for i, times in zip(long, times_each):
            step[i] = times * period
        for times in range(min((lengths[i] - shortest) // step[i] for i in long), SAMPLES - 1, -1):
            kept = [most - times * less for most, less in zip(lengths, step)]
            depths = _depths(kept, step)
            work = sum(depth**2 for depth in depths)
            if work > least:
                break
            if rests_of(depths, times):
                best, least = (tuple(kept), tuple(step), times), work
                break
    return best


def _rests(rest: int, rounds: int, pp: int, depths: Sequence[int], times: int) -> list[int]:
    """Returns by how many micro-batches the rounds of each sample are longer than its ranks.

    A step is linear in these and in the ranks as long as there are no more rounds.

    Args:
        rest: Those of all rounds of the deep pipeline.
        rounds: Its rounds, which are equally long.
        pp: Its ranks along pp.
        depths: The ranks along pp of each sample.
        times: The deep pipeline has this many times the difference of two samples more than the
            first one.

    Returns:
        Those of all rounds of each sample; none if there are no such samples.
    """
    share = (depths[1] - depths[0]) * rest / pp
    for more in sorted(range(0, rest // times + 1, rounds), key=lambda more: abs(more - share)):
        rests = [rest - (times - number) * more for number in range(SAMPLES)]
        if all(0 < some < depth for some, depth in zip(rests, depths)):
            return rests
    return []


def _ends_of(
    lengths: Sequence[int], kept: Sequence[int], last: Sequence[int] | None = None
) -> list[int]:
    """Returns the places of the first and the last ranks of each segment.

    Args:
        lengths: The ranks of each segment.
        kept: How many of them are kept. More than one half of `last` are the first ones.
        last: Half of these, rounded up, are the last ones; None stands for `kept`.
    """
    found: list[int] = []
    begin = 0
    for length, here, all_last in zip(lengths, kept, last or kept):
        at_end = all_last - all_last // 2
        found += range(begin, begin + here - at_end)
        found += range(begin + length - at_end, begin + length)
        begin += length
    return found


def _period(mesh: Tensor, cluster: Cluster) -> int | None:
    """Returns after how many ranks along pp the mesh lies in nodes and racks as before."""
    ranks = mesh.flatten(1)
    sizes = [level.size for level in cluster.levels[:-1]]
    for step in range(1, _MOST + 1):
        if step * SAMPLES > len(ranks):
            break
        moved = ranks[step:] - ranks[:-step]
        by = int(moved[0, 0])
        if bool((moved == by).all()) and all(by % size == 0 for size in sizes):
            return step
    return None


def _same_places(run: RunConfig, decisions: Decisions, mesh: Tensor, depths: Sequence[int]) -> bool:
    """Returns whether shorter pipelines have the ranks with which the deep one begins."""
    for pp in depths:
        layout = run.layout.model_copy(update={"pp": pp})
        if not torch.equal(mesh_ranks(layout, decisions.block), mesh[:pp]):
            return False
    return True


def _shorter(
    run: RunConfig, stages: Sequence[range], places: Sequence[int], m: int
) -> ShorterPipeline:
    """Returns the pipeline of m micro-batches that has only the ranks at some places along pp."""
    layout, model, train = run.layout, run.model, run.train
    lengths = [
        len(stages[chunk * layout.pp + place])
        for chunk in range(layout.stages_per_rank)
        for place in places
    ]
    ends = [0, *itertools.accumulate(lengths)]
    layers = model.n_layers - (sum(len(stage) for stage in stages) - ends[-1])
    order = {"pp": len(places), "micro_batches": m, "pipeline": layout.pipeline_order}
    changed = run.model_copy(
        update={
            "model": model.model_copy(update={"n_layers": layers}),
            "layout": layout.model_copy(update=order),
            "train": train.model_copy(
                update={"global_batch": train.global_batch // layout.micro_batches * m}
            ),
        }
    )
    return ShorterPipeline(changed, tuple(range(a, b) for a, b in itertools.pairwise(ends)))
