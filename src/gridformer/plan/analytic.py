"""The time of a step by formulas: about a millisecond where `predict` takes seconds.

It adds up the loads of the passes (gridformer.plan.layer_passes and head_passes) over micro-batches
and stages, and adds what a pipeline waits, what replicas exchange, and the update. It is only good
for choosing what to trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.memory.analytic import quick_peak
from gridformer.memory.room import room_on
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.decisions import Decisions, placements, traffic_of
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.work import work_of
from gridformer.parallel.registry import spec_of
from gridformer.plan import head_passes, launches, layer_passes, once_a_step
from gridformer.plan.held import Held, held_by_ranks
from gridformer.plan.load import Costs, Load
from gridformer.plan.recorded import on_device
from gridformer.plan.sizes import Sizes
from gridformer.utils.units import GIB


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a step, and where it goes on the slowest rank, in seconds.

    Attributes:
        step_s, forward_s, backward_s, update_s: Seconds of the step and its parts.
        peak_gib, limit_gib: Memory of the fullest device, and what it can use.
        load: Kernels and messages of the slowest rank in the whole step.
        launch_s: Seconds in which the device waits for the host.
        bubble_s: Seconds in which a stage waits for others.
        block: What a node holds.
    """

    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    peak_gib: float
    limit_gib: float
    load: Load
    launch_s: float
    bubble_s: float
    block: NodeBlock | None = None

    @property
    def fits(self) -> bool:
        """Whether the estimated memory is within the limit."""
        return self.peak_gib <= self.limit_gib


@dataclass
class _Clock:
    """The host launches kernels, which the device runs; each of the two may wait for the other."""

    launch_s: float
    host: float = 0.0
    device: float = 0.0
    waited: float = 0.0
    total: Load = field(default_factory=Load)

    def run(self, load: Load, times: float = 1.0) -> float:
        """Runs a load a number of times and returns how long the device takes until it is done."""
        before = self.device
        self.host += load.launches * times * self.launch_s
        busy = load.device_s * times
        self.device = max(before + busy, self.host)
        self.waited += self.device - before - busy
        self.total.add(load, times)
        return self.device - before


def estimate(run: RunConfig, cluster: Cluster, costs: Costs | None = None) -> Estimate:
    """Estimates the time of a step of a checked run.

    Args:
        run: The run, whose layout is valid.
        cluster: The machine.
        costs: Remembers seconds of kernels and messages of this cluster; None makes new ones.
    """
    costs = costs or Costs(cluster)
    layout, train, work = run.layout, run.train, work_of(run)
    choices = decide(run.model, layout, work)
    spec = spec_of(layout)
    traffic = traffic_of(run, choices, work)
    block = Decisions(choices, traffic, *placements(layout, traffic)).block
    places = costs.places_of(run, block)
    dtype = "tf32" if train.tf32 and train.dtype == "float32" else train.dtype
    sizes = Sizes(run, choices, spec, costs, places, dtype)
    m, pp = layout.micro_batches, layout.pp
    passes = layer_passes.layers(sizes)
    once_a_step.gather_replicas(sizes, passes)
    head, lookup = head_passes.head(sizes), head_passes.embedding(sizes)
    ranks = _ranks(sizes, passes, head, lookup)
    slowest = max(range(pp), key=lambda i: ranks[i].device_s)
    rank = ranks[slowest]

    # In training the host of a GPU is a step ahead; see `gridformer.plan.price`.
    ahead = cluster.device.kind == "cuda" and train.dtype != "float16"
    clock = _Clock(0.0 if ahead else cluster.host.launch_us.value * 1e-6)
    bubbles = _bubbles(sizes, ranks, slowest, clock.launch_s)
    clock.device += bubbles[0]  # meanwhile the host launches what comes then
    once = {one: _each_step(sizes, one) for one in set(ranks)}
    clock.run(once[rank].casts)
    forward_s = clock.run(rank.forward, m)
    backward_s = clock.run(rank.backward, m)
    clock.device += bubbles[1]
    last, early_s = _last_to_end(ranks, once)
    reduce_s = clock.run(once[last].reductions) - early_s
    update_s = clock.run(once[last].update)
    clock.device -= early_s
    fixed = cluster.host.step_us.value * 1e-6
    step_s, waited = clock.device + fixed, clock.waited + fixed
    if ahead:
        most = max(m * one.launches + once[one].launches for one in once)
        launching = most * cluster.host.launch_us.value * 1e-6 + fixed
        step_s = max(clock.device, launching)
        waited = step_s - clock.device
        forward_s, backward_s, update_s, reduce_s = (
            seconds * step_s / clock.device
            for seconds in (forward_s, backward_s, update_s, reduce_s)
        )
    return Estimate(
        step_s=step_s,
        forward_s=forward_s + bubbles[0],
        backward_s=backward_s + reduce_s + bubbles[1],
        update_s=update_s,
        peak_gib=quick_peak(on_device(run, cluster.device.kind), choices) / GIB,
        limit_gib=room_on(run, cluster),
        load=clock.total,
        launch_s=waited,
        bubble_s=sum(bubbles),
        block=block,
    )


Both = tuple[Load, Load]  # forward and backward


@dataclass(frozen=True, eq=False)  # compared by identity
class _Rank:
    """A rank of a pipeline.

    Attributes:
        held: What it holds.
        forward, backward: Its loads for one micro-batch.
    """

    held: Held
    forward: Load
    backward: Load

    @property
    def device_s(self) -> float:
        return self.forward.device_s + self.backward.device_s

    @property
    def launches(self) -> float:
        return self.forward.launches + self.backward.launches


def _ranks(sizes: Sizes, passes: Mapping[str, Both], head: Both, lookup: Both) -> list[_Rank]:
    """Returns the ranks of a pipeline in order; those that hold the same are one object."""
    found: dict[Held, _Rank] = {}
    held = held_by_ranks(sizes.run)
    for one in held:
        if one not in found:
            found[one] = _rank_of(sizes, one, passes, head, lookup)
    return [found[one] for one in held]


def _rank_of(
    sizes: Sizes, held: Held, passes: Mapping[str, Both], head: Both, lookup: Both
) -> _Rank:
    rank = _Rank(held, Load(), Load())
    parts = [(passes[stack], share) for stack, share in held.shares]
    for (there, back), times in (*parts, (head, float(held.head)), (lookup, held.lookups)):
        rank.forward.add(there, times)
        rank.backward.add(back, times)
    n_stacks = sum(share > 0 for _, share in held.shares)
    once = launches.EACH_STACK.get(sizes.run.model.family, (0, 0))
    rank.forward.launches += once[0] * n_stacks
    rank.backward.launches += once[1] * n_stacks
    if sizes.run.layout.pp > 1:
        _borders(sizes, rank.forward, rank.backward)
    return rank


def _bubbles(
    sizes: Sizes, ranks: Sequence[_Rank], slowest: int, launch_s: float
) -> tuple[float, float]:
    """Returns how long the slowest rank of a pipeline waits before and after it works.

    Its first micro-batch passes through the ranks before it, and its last gradient goes back
    through them. The first gradient comes from the ranks after it, while it does the other forward
    passes with which 1F1B begins; the last gradients come as fast as those ranks make them.

    Args:
        sizes: The sizes.
        ranks: All ranks, in order.
        slowest: The number of the slowest.
        launch_s: Seconds of a launch, if a rank waits for its host.
    """
    layout = sizes.run.layout
    m, pp, k = layout.micro_batches, layout.pp, layout.stages_per_rank
    if pp == 1:
        return 0.0, 0.0
    send = sizes.costs.message_s("send", _border_bytes(sizes), sizes.place("pp"))
    forward = [max(r.forward.device_s, r.forward.launches * launch_s) for r in ranks]
    backward = [max(r.backward.device_s, r.backward.launches * launch_s) for r in ranks]
    if k > 1:
        # With fewer micro-batches than ranks a rank waits for each of its stages' turn.
        turns = k if pp > m else 1
        sends = (pp * k - 1) * send
        there = (sum(forward) - forward[slowest]) / k + sends
        back = (sum(backward) - backward[slowest]) / k + sends
        return there * turns, back * turns
    up, down = slice(slowest), slice(slowest + 1, pp)
    there, back = sum(forward[up]) + slowest * send, sum(backward[up]) + slowest * send
    if slowest < pp - 1:
        # The forward passes after the first, which it does before a gradient comes.
        ahead = min(m, pp - slowest) - 1
        around = sum(forward[down]) + sum(backward[down]) + 2 * (pp - 1 - slowest) * send
        back += max(0.0, around - ahead * forward[slowest])
        each = max(f + b for f, b in zip(forward[down], backward[down]))
        back += ahead * max(0.0, each - backward[slowest])
    return there, back


class _Once(NamedTuple):
    """The loads that a rank has once a step."""

    casts: Load
    reductions: Load
    update: Load

    @property
    def launches(self) -> float:
        return sum(load.launches for load in self)

    @property
    def tail_s(self) -> float:
        """Seconds of what comes after the last pass."""
        return self.reductions.device_s + self.update.device_s


def _each_step(sizes: Sizes, rank: _Rank) -> _Once:
    return _Once(
        once_a_step.casts(sizes, rank.held),
        once_a_step.reductions(sizes, rank.held, rank.backward),
        once_a_step.update(sizes, rank.held),
    )


def _last_to_end(ranks: Sequence[_Rank], once: Mapping[_Rank, _Once]) -> tuple[_Rank, float]:
    """Returns the rank that ends a step, and how much earlier than the first it begins to end it.

    The last gradient goes back through the pipeline, so the first rank has the last pass.
    """
    found, before = [], 0.0
    for rank in ranks:
        found.append((once[rank].tail_s - before, rank, before))
        before += rank.backward.device_s
    _, rank, early_s = max(found, key=lambda one: one[0])
    return rank, early_s


def _border_bytes(sizes: Sizes) -> float:
    """Returns the bytes that a device sends to the next stage for one micro-batch."""
    work, layout = sizes.choices.work, sizes.run.layout
    lies = sizes.spec.boundary(layout).lies
    sent_whole = lies == "first" or (lies == "replicated" and not layout.scatter_gather)
    devices = 1 if sent_whole else sizes.choices.rows * sizes.choices.cols
    elements = (work.tokens + work.source) * sizes.run.model.hidden_size / devices
    return elements * work.itemsize


def _borders(sizes: Sizes, there: Load, back: Load) -> None:
    """Adds messages to other stages, which travel during computation."""
    seconds = sizes.costs.message_s("send", _border_bytes(sizes), sizes.place("pp"))
    k = sizes.run.layout.stages_per_rank
    tensors = 1 + sizes.run.model.two_stacks  # the output of the encoder goes to all later stages
    for load in (there, back):
        load.message("pp", seconds * k, load.compute_s, 2 * k * tensors)
        sliced = sizes.choices.between == "replicated" and sizes.run.layout.scatter_gather
        if sliced and sizes.choices.cols > 1:
            # A tensor that is replicated is sent in slices, which are gathered when they arrive.
            whole = _border_bytes(sizes) * sizes.choices.cols
            axis = sizes.activation_axis
            load.message(axis, k * sizes.costs.message_s("all_gather", whole, sizes.place(axis)))
