"""Pipelines with fewer stages, from whose times those of a deep pipeline follow.

The ranks in the middle of a pipeline do the same, but for when. With as many rounds of
micro-batches a pipeline takes the same time longer for each of them. So a deep one is traced with
few stages, three times, and its times are extended along a line through two of them. The third must
lie on that line; if it does not, all stages are traced.

Where the machine has nodes and racks that hold several stages, ranks in the middle come and go in
numbers that fill these: messages between stages then take the same links.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.partition import link_names, stages_of, with_stages
from gridformer.plan.fewer_layers import extended
from gridformer.plan.fewer_rounds import KEPT
from gridformer.plan.program import Spent

LEAST = 8  # ranks of the shortest pipeline along pp
SAMPLES = 3
_MOST = 16  # ranks along pp that come and go together
PASSES = 6000  # of all ranks, each way: with fewer of them a pipeline is traced whole
_SAME = 1e-4  # by how much the longest sample may be off the line through the others


@dataclass(frozen=True)
class Pipeline:
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
        pipelines: They, the shortest first, each with `step` more ranks along pp.
        step: See there.
        more: How many times `step` ranks the deep one has besides those of the second.
    """

    pipelines: tuple[Pipeline, ...]
    step: int
    more: int

    def extended(self, samples: Sequence[Sequence[Spent]]) -> list[Spent] | None:
        """Returns what ranks of the deep pipeline spend their time on.

        These are its first ones and its last ones, as many as the shortest pipeline has.

        Args:
            samples: What the ranks of each pipeline spend, in their order along pp.

        Returns:
            The times, or None if the longest pipeline is not on the line through the others.
        """
        shortest, depth = samples[0], self.pipelines[0].run.layout.pp
        first = len(shortest) // depth * (depth // 2)
        one, two, three = (
            [*some[:first], *some[len(some) - len(shortest) + first :]] for some in samples
        )
        for a, b, c in zip(one, two, three):
            if abs(extended(b, a, 1).end - c.end) > _SAME * c.end:
                return None
        return [extended(b, a, self.more) for a, b in zip(one, two)]


def fewer_stages(run: RunConfig, decisions: Decisions, cluster: Cluster) -> FewerStages | None:
    """Returns shorter pipelines from whose times those of a run follow; None if there are none.

    Args:
        run: The run.
        decisions: The result of `decide_run(run)`.
        cluster: The cluster.
    """
    layout, model = run.layout, run.model
    rounds, rest = divmod(layout.micro_batches, layout.pp)
    passes = layout.pp**2 * layout.stages_per_rank * min(rounds, 2 * KEPT + 1)
    if passes < PASSES or model.two_stacks or (rest and layout.stages_per_rank > 1):
        return None
    if cluster.device.kind == "cpu":  # its processes share cores, and so their number counts
        return None
    mesh = mesh_ranks(layout, decisions.block)
    step = _period(mesh, cluster)
    if step is None:
        return None
    least = LEAST + (layout.pp - LEAST) % step
    depths = [least + i * step for i in range(SAMPLES)]
    stages = stages_of(model, layout.n_stages, decisions.choices.work)
    if depths[-1] > layout.pp or not _alike(run, stages, least):
        return None
    if not _same_places(run, decisions, mesh, depths, cluster):
        return None
    pipelines = tuple(_shorter(run, stages, pp, least // 2) for pp in depths)
    return FewerStages(pipelines, step, (layout.pp - depths[1]) // step)


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


def _alike(run: RunConfig, stages: Sequence[range], least: int) -> bool:
    """Returns whether all ranks that may be left out have equal layers, and those beside them."""
    pp = run.layout.pp
    names = [name.rstrip("0123456789") for name in link_names(run.model)]
    middle = range(least // 2 - 1, pp - (least - least // 2) + 1)
    for chunk in range(run.layout.stages_per_rank):
        held = {tuple(names[i] for i in stages[chunk * pp + place]) for place in middle}
        if len(held) > 1:
            return False
    return True


def _same_places(
    run: RunConfig, decisions: Decisions, mesh: Tensor, depths: Sequence[int], cluster: Cluster
) -> bool:
    """Returns whether shorter pipelines lie on the machine as the ends of the deep one do."""
    ends = [_apart(mesh, cluster)]
    for pp in depths:
        layout = run.layout.model_copy(update={"pp": pp})
        shorter = mesh_ranks(layout, decisions.block)
        if not torch.equal(shorter, mesh[:pp]):
            return False
        ends.append(_apart(shorter, cluster))
    return all(one == other for one, other in itertools.pairwise(ends))


def _apart(mesh: Tensor, cluster: Cluster) -> list[bool]:
    """Returns for each level of the network whether the first and the last stage lie in one unit.

    Some messages go between them: sums of gradients of a tied table.
    """
    first, last = int(mesh[0].flatten()[0]), int(mesh[-1].flatten()[0])
    return [first // level.size == last // level.size for level in cluster.levels[:-1]]


def _shorter(run: RunConfig, stages: Sequence[range], pp: int, first: int) -> Pipeline:
    """Returns the pipeline with pp ranks: the first ones, and of the others the last ones."""
    layout, model, train = run.layout, run.model, run.train
    gone = layout.pp - pp
    lengths = [
        len(stages[chunk * layout.pp + (place if place < first else place + gone)])
        for chunk in range(layout.stages_per_rank)
        for place in range(pp)
    ]
    ends = [0, *itertools.accumulate(lengths)]
    layers = model.n_layers - (sum(len(stage) for stage in stages) - ends[-1])
    rounds, rest = divmod(layout.micro_batches, layout.pp)
    m = rounds * pp + rest
    changed = run.model_copy(
        update={
            "model": model.model_copy(update={"n_layers": layers}),
            "layout": layout.model_copy(update={"pp": pp, "micro_batches": m}),
            "train": train.model_copy(
                update={"global_batch": train.global_batch // layout.micro_batches * m}
            ),
        }
    )
    return Pipeline(changed, tuple(range(a, b) for a, b in itertools.pairwise(ends)))
