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
from gridformer.parallel.auto.decisions import Decisions, choices_of, placements, traffic_of
from gridformer.parallel.auto.work import replica_work
from gridformer.parallel.pipeline.stage_shares import StageShares, shares_of_rank, shares_of_stages
from gridformer.parallel.registry import spec_of
from gridformer.plan import head_passes, launches, layer_passes, once_a_step
from gridformer.plan.load import Load, StepCosts, hop_from
from gridformer.plan.pipeline_time import PassSeconds, pass_times
from gridformer.plan.recorded import on_device_type, unfused
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


def estimate(run: RunConfig, cluster: Cluster, costs: StepCosts | None = None) -> Estimate:
    """Estimates the time of a step of a checked run.

    Args:
        run: The run, whose layout is valid.
        cluster: The machine.
        costs: Remembers seconds of kernels and messages of this cluster; None makes new ones.
    """
    cluster = costs.cluster if costs else cluster.for_processes(run.layout.n_processes)
    costs = costs or StepCosts(cluster)
    layout, train, work = run.layout, run.train, replica_work(run)
    choices = choices_of(run)
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
    stages = shares_of_stages(run)
    found = _Ranks(sizes, passes, head, lookup)
    ranks = [found.of(stages[i::pp]) for i in range(pp)]
    once = {one: _each_step(sizes, one) for one in set(ranks)}

    # In training the host of a GPU is a step ahead; see `gridformer.plan.price`.
    ahead = cluster.device.kind == "cuda" and not train.waits_each_step
    clock = _Clock(0.0 if ahead else cluster.host.launch_us.value * 1e-6)
    seconds = [_pass_seconds(sizes, found.of([one]), clock.launch_s) for one in stages]
    places_of_hops = [sizes.place(hop_from(i)) for i in range(pp)]
    sends_s = [costs.message_s("send", _border_bytes(sizes), place) for place in places_of_hops]
    begins = [once[one].casts.device_s for one in ranks]
    times = pass_times(layout, seconds, begins, sends_s)
    tails = [end + once[one].reductions.device_s for one, (_, end) in zip(ranks, times)]
    last = max(range(pp), key=lambda i: tails[i])
    rank, (begin, end) = ranks[last], times[last]
    clock.run(once[rank].casts)
    before_s = max(0.0, begin - clock.device)
    clock.device += before_s  # meanwhile the host launches what comes next
    forward_s = clock.run(rank.forward, m)
    backward_s = clock.run(rank.backward, m)
    waits_s = max(0.0, end - clock.device)
    clock.device += waits_s
    gathered_s = sum(one.gathered for one in seconds[last::pp])
    gathers_s = min(waits_s, max(0.0, gathered_s - rank.forward.device_s))
    clock.total.message("dp", gathered_s, gathered_s - gathers_s, 0)
    reduce_s = clock.run(once[rank].reductions)
    update_s = clock.run(once[rank].update)
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
        forward_s=forward_s + before_s + gathers_s,
        backward_s=backward_s + reduce_s + waits_s - gathers_s,
        update_s=update_s,
        peak_gib=quick_peak(on_device_type(unfused(run, cluster), cluster.device.kind), choices)
        / GIB,
        limit_gib=room_on(run, cluster),
        load=clock.total,
        launch_s=waited,
        bubble_s=before_s + waits_s - gathers_s,
        block=block,
    )


Both = tuple[Load, Load]  # forward and backward


@dataclass(frozen=True, eq=False)  # compared by identity
class _Rank:
    """A rank of a pipeline, or one of its stages.

    Attributes:
        shares: Which part of the model it has.
        forward, backward: Its loads for one micro-batch.
    """

    shares: StageShares
    forward: Load
    backward: Load

    @property
    def device_s(self) -> float:
        return self.forward.device_s + self.backward.device_s

    @property
    def launches(self) -> float:
        return self.forward.launches + self.backward.launches


class _Ranks:
    """The ranks of a pipeline; those that have the same part are one object."""

    def __init__(self, sizes: Sizes, passes: Mapping[str, Both], head: Both, lookup: Both) -> None:
        self._how = sizes, passes, head, lookup
        self._found: dict[tuple[StageShares, int], _Rank] = {}

    def of(self, stages: Sequence[StageShares]) -> _Rank:
        """Returns the rank that has these stages."""
        key = shares_of_rank(stages), len(stages)
        if key not in self._found:
            sizes, passes, head, lookup = self._how
            self._found[key] = _rank_of(sizes, *key, passes, head, lookup)
        return self._found[key]


def _rank_of(
    sizes: Sizes, shares: StageShares, k: int, passes: Mapping[str, Both], head: Both, lookup: Both
) -> _Rank:
    rank = _Rank(shares, Load(), Load())
    parts = [(passes[stack], share) for stack, share in shares.layers]
    for (there, back), times in (*parts, (head, float(shares.head)), (lookup, shares.lookups)):
        rank.forward.add(there, times)
        rank.backward.add(back, times)
    n_stacks = sum(share > 0 for _, share in shares.layers)
    once = launches.EACH_STACK.get(sizes.run.model.family, (0, 0))
    rank.forward.launches += once[0] * n_stacks
    rank.backward.launches += once[1] * n_stacks
    if sizes.run.layout.pp > 1:
        _borders(sizes, k, rank.forward, rank.backward)
    return rank


def _pass_seconds(sizes: Sizes, stage: _Rank, launch_s: float) -> PassSeconds:
    """Returns what the passes of a micro-batch take, where a rank may wait for its host."""
    return PassSeconds(
        max(stage.forward.device_s, stage.forward.launches * launch_s),
        max(stage.backward.device_s, stage.backward.launches * launch_s),
        once_a_step.gathered_s(sizes, stage.shares),
        once_a_step.adds_s(sizes, stage.shares),
    )


class _Once(NamedTuple):
    """The loads that a rank has once a step."""

    casts: Load
    reductions: Load
    update: Load

    @property
    def launches(self) -> float:
        return sum(load.launches for load in self)


def _each_step(sizes: Sizes, rank: _Rank) -> _Once:
    return _Once(
        once_a_step.casts(sizes, rank.shares),
        once_a_step.reductions(sizes, rank.shares, rank.backward),
        once_a_step.update(sizes, rank.shares),
    )


def _border_bytes(sizes: Sizes) -> float:
    """Returns the bytes that a device sends to the next stage for one micro-batch."""
    work, layout = sizes.choices.work, sizes.run.layout
    lies = sizes.spec.boundary(layout).lies
    sent_whole = lies == "first" or (lies == "replicated" and not layout.scatter_gather)
    devices = 1 if sent_whole else sizes.choices.rows * sizes.choices.cols
    elements = (work.tokens + work.source) * sizes.run.model.hidden_size / devices
    return elements * work.itemsize


def _borders(sizes: Sizes, k: int, there: Load, back: Load) -> None:
    """Adds messages of k stages to other stages; what waits for them is in `pass_times`."""
    seconds = sizes.costs.message_s("send", _border_bytes(sizes), sizes.place("pp"))
    tensors = 1 + sizes.run.model.two_stacks  # the output of the encoder goes to all later stages
    for load in (there, back):
        load.message("pp", seconds * k, seconds * k, 2 * k * tensors)
        sliced = sizes.choices.between == "replicated" and sizes.run.layout.scatter_gather
        if sliced and sizes.choices.cols > 1:
            # A tensor that is replicated is sent in slices, which are gathered when they arrive.
            whole = _border_bytes(sizes) * sizes.choices.cols
            axis = sizes.activation_axis
            load.message(axis, k * sizes.costs.message_s("all_gather", whole, sizes.place(axis)))
