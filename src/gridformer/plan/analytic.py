"""The time of a step by formulas: about a millisecond where `predict` takes seconds.

It adds up the loads of the passes (gridformer.plan.layer_passes and head_passes) over micro-batches
and stages, and adds what a pipeline waits, what replicas exchange, and the update. It is only good
for choosing what to trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gridformer.cluster.file import Cluster
from gridformer.cluster.messages import Op
from gridformer.config import RunConfig
from gridformer.memory.analytic import quick_peak
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.decisions import Decisions, placements, traffic_of
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.work import work_of
from gridformer.parallel.registry import spec_of
from gridformer.plan import head_passes, layer_passes
from gridformer.plan.load import Costs, Load, Place
from gridformer.plan.sizes import Sizes
from gridformer.utils.units import GIB

ADAM_BYTES = 28  # reads a parameter, its gradient and two moments, and writes all but the gradient
NORM_BYTES = 4  # the norm of gradients reads them
JOIN_BYTES = 12  # of a parameter whose gradient is summed by parts: copied to a message and summed
SHARE_BYTES = 12  # the same for the updated parts of parameters that return
PARAMETERS = 12  # of a layer
VECTORS = 8  # of a layer: norms and biases
VECTORS_BYTES = 1e5  # of the gradients of norms and biases, roughly
BUCKETS = 4  # of gradients at least; all but the last are summed during the backward pass


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
    forward, backward = layer_passes.layers(sizes)
    head, head_back = head_passes.head(sizes)
    lookup, lookup_back = head_passes.embedding(sizes)
    m, pp, k = layout.micro_batches, layout.pp, layout.stages_per_rank
    _gather_replicas(sizes, forward, backward)
    rank, others = _slowest(sizes, forward, backward, (head, head_back), (lookup, lookup_back))

    # In training the host of a GPU is a step ahead; see `gridformer.plan.price`.
    ahead = cluster.device.kind == "cuda" and train.dtype != "float16"
    clock = _Clock(0.0 if ahead else cluster.host.launch_us.value * 1e-6)
    bubbles = (0.0, 0.0)
    if pp > 1:
        # One micro-batch passes through the other ranks before and after the slowest one works.
        sends = (pp * k - 1) * costs.message_s("send", _border_bytes(sizes), sizes.place("pp"))
        launch_s = clock.launch_s
        bubbles = tuple(max(o.device_s, o.launches * launch_s) / k + sends for o in others)  # type: ignore[assignment]
    if pp > m and k > 1:
        # With fewer micro-batches than ranks a rank waits for each of its stages' turn.
        bubbles = (bubbles[0] * k, bubbles[1] * k)
    clock.device += bubbles[0]  # meanwhile the host launches what comes then
    clock.run(_casts(sizes, rank.share))
    forward_s = clock.run(rank.forward, m)
    backward_s = clock.run(rank.backward, m)
    clock.device += bubbles[1]
    bubble = sum(bubbles)
    reduce_s = clock.run(_reductions(sizes, rank))
    update_s = clock.run(_update(sizes, rank.share))
    fixed = cluster.host.step_us.value * 1e-6
    step_s, waited = clock.device + fixed, clock.waited + fixed
    if ahead:
        launching = clock.total.launches * cluster.host.launch_us.value * 1e-6 + fixed
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
        peak_gib=quick_peak(run, choices) / GIB,
        limit_gib=limit_gib(run, cluster),
        load=clock.total,
        launch_s=waited,
        bubble_s=bubble,
        block=block,
    )


def limit_gib(run: RunConfig, cluster: Cluster) -> float:
    """Returns the GiB that a rank's tensors may take: the run's limit or that of the device."""
    own = run.train.memory_gib
    return min(own, cluster.limit_gib) if own else cluster.limit_gib


# --------------------------------------------------------------------------- stages

Both = tuple[Load, Load]  # forward and backward


@dataclass(frozen=True)
class _Rank:
    """The slowest rank of a pipeline.

    Attributes:
        share: The fraction of the model's layers that it has.
        forward, backward: Its loads for one micro-batch.
    """

    share: float
    forward: Load
    backward: Load

    @property
    def device_s(self) -> float:
        return self.forward.device_s + self.backward.device_s


def _slowest(
    sizes: Sizes, forward: Load, backward: Load, head: Both, lookup: Both
) -> tuple[_Rank, Both]:
    """Returns the slowest rank, and the loads of one micro-batch on all others.

    The first rank looks up tokens, and the last one has the head.
    """
    first_share, last_share = _shares(sizes.run)
    found = []
    for share, ends in ((first_share, (lookup,)), (last_share, (head,))):
        if sizes.run.layout.pp == 1:
            share, ends = 1.0, (lookup, head)  # type: ignore[assignment]
        there, back = forward.times(share), backward.times(share)
        for end in ends:
            there.add(end[0])
            back.add(end[1])
        if sizes.run.layout.pp > 1:
            _borders(sizes, there, back)
        found.append(_Rank(share, there, back))
    rank = max(found, key=lambda one: one.device_s)
    there, back = Load(), Load()
    for total, parts, mine in (
        (there, (forward, head[0], lookup[0]), rank.forward),
        (back, (backward, head[1], lookup[1]), rank.backward),
    ):
        for part in parts:
            total.add(part)
        total.add(mine, -1)
    return rank, (there, back)


def _shares(run: RunConfig) -> tuple[float, float]:
    """Returns the fraction of the layers of the first rank, and of the last one.

    The partition counts the head as so many layers as have its work; see
    `gridformer.parallel.pipeline.partition`.
    """
    model, layout = run.model, run.layout
    n, n_stages = _n_layers(run), layout.n_stages
    if n_stages == 1:
        return 1.0, 1.0
    scores = 2 * run.seq_len * model.n_heads * model.head_width
    head = model.vocab_size * model.hidden_size / (model.layer_elements + scores)
    best = min(
        range(n + 1),
        key=lambda last: (max(math.ceil((n - last) / (n_stages - 1)), last + head), -last),
    )
    others = math.ceil((n - best) / (n_stages - 1))
    k = layout.stages_per_rank
    return min(1.0, k * others / n), min(1.0, ((k - 1) * others + best) / n)


def _n_layers(run: RunConfig) -> int:
    return run.model.n_layers + run.model.n_decoder_layers * run.model.two_stacks


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
    for load in (there, back):
        load.message("pp", seconds * k, load.compute_s, 2 * k)
        sliced = sizes.choices.between == "replicated" and sizes.run.layout.scatter_gather
        if sliced and sizes.choices.cols > 1:
            # A tensor that is replicated is sent in slices, which are gathered when they arrive.
            whole = _border_bytes(sizes) * sizes.choices.cols
            axis = sizes.activation_axis
            load.message(axis, k * sizes.costs.message_s("all_gather", whole, sizes.place(axis)))


# --------------------------------------------------------------------------- once a step


def _casts(sizes: Sizes, share: float) -> Load:
    """Returns the load of casting weights to the type of the computation once a step."""
    choices, layout = sizes.choices, sizes.run.layout
    if choices.work.itemsize != 2:
        return Load(launches=10)
    times = 1 if choices.cast_once else 3 * layout.micro_batches
    held: float = _held(sizes, share)
    if layout.dp_mode == "fsdp":
        held /= max(1, sizes.spec.replicas(layout))
    load = Load(memory=sizes.costs.memory_s(held * 6 * times), launches=10 + 8)
    if layout.dp_mode == "fsdp":  # what is outside layers is gathered when a step begins
        n_bytes = _table(sizes) * sizes.wide
        load.message("dp", sizes.costs.message_s("all_gather", n_bytes, sizes.place("replicas")))
        load.memory += sizes.costs.memory_s(_table(sizes) * SHARE_BYTES)
    return load


def _held(sizes: Sizes, share: float) -> float:
    """Returns the elements of matrices that a device computes with."""
    choices, found = sizes.choices, 0.0
    for choice in choices.products.values():
        head = choice.product.section == "head"
        elements: float = choice.elements + choices.table * (choice.product.name == "head")
        elements /= 1 if choice.common else choices.rows * choices.cols
        found += elements * (1 if head else share)
    return found


def _gather_replicas(sizes: Sizes, forward: Load, backward: Load) -> None:
    """Adds the gathers of parameters layer by layer, each during the layer before it."""
    layout = sizes.run.layout
    if layout.dp_mode != "fsdp":
        return
    place = sizes.place("replicas")
    n = _n_layers(sizes.run)
    outside = _held(sizes, 0.0)
    a_layer = (_held(sizes, 1.0) - outside) / n
    one = sizes.costs.message_s("all_gather", a_layer * sizes.itemsize, place)
    times = 1.0 if sizes.choices.reshard == "layer" else 1 / layout.micro_batches
    # A gathered layer is copied from the message into its parameters.
    backward.launches += 1.3 * PARAMETERS * n / layout.micro_batches  # joins gradients
    forward.launches += 1.4 * PARAMETERS * n * times
    backward.launches += 0.7 * PARAMETERS * n
    forward.memory += sizes.costs.memory_s(4 * sizes.itemsize * a_layer) * n * times
    backward.memory += sizes.costs.memory_s(2 * sizes.itemsize * a_layer) * n * times
    forward.message("dp", n * one * times, forward.device_s, n * times)
    if sizes.choices.reshard == "layer":
        backward.message("dp", n * one, backward.device_s, n)


def _reductions(sizes: Sizes, rank: _Rank) -> Load:
    """Returns the load of summing gradients over replicas after the last backward pass."""
    layout, load, costs = sizes.run.layout, Load(launches=10), sizes.costs
    for axis in (sizes.activation_axis, "row"):  # vectors
        load.message(axis, costs.message_s("reduce", VECTORS_BYTES, sizes.place(axis)))
    load.message("world", 2 * costs.message_s("all_reduce", 64, sizes.place("world")), 0.0, 2)
    held = _n_layers(sizes.run) * rank.share
    if sizes.lies in ("s", "h"):  # vectors are copied to messages and back, before and after
        load.launches += VECTORS * held * (1 + (sizes.choices.rows > 1))
    if layout.dp_mode == "zero1":
        load.launches += 3 * PARAMETERS * held
    table = _table(sizes)
    if layout.pp > 1 and sizes.run.model.tied_head:  # shared by the first stage and the last
        sums = costs.message_s("all_reduce", table * sizes.wide, sizes.place("pp"))
        load.message("pp", sums)
        load.memory += costs.memory_s(4 * sizes.wide * table)
    for elements, last, where in _summed(sizes, rank.share):
        op: Op = "all_reduce" if layout.dp_mode == "replicate" else "reduce_scatter"
        n_bytes, last_bytes = elements * sizes.wide, last * sizes.wide
        buckets = max(BUCKETS, n_bytes / (25 << 20))
        hidden = costs.message_s(op, n_bytes - last_bytes, where)
        load.message("dp", hidden, rank.backward.device_s, buckets)
        load.message("dp", costs.message_s(op, last_bytes, where))
        if layout.dp_mode != "replicate":
            load.memory += costs.memory_s(elements * JOIN_BYTES)
        if layout.dp_mode == "zero1":
            load.memory += costs.memory_s(elements * SHARE_BYTES)
            load.message("dp", costs.message_s("all_gather", n_bytes, where))
    return load


def _table(sizes: Sizes) -> float:
    """Returns the elements of the table of the tokens on a device."""
    choice = sizes.choices["head"]
    grid = 1 if choice.common else sizes.choices.rows * sizes.choices.cols
    return choice.product.n_in * choice.product.n_out / grid


def _summed(sizes: Sizes, share: float) -> list[tuple[float, float, Place]]:
    """Returns the gradients that are summed over replicas.

    Returns:
        For each set of replicas the elements, those of them that are complete only when the
        backward pass ends, and the replicas. The table of the tokens is the last to be complete.
    """
    choices, layout = sizes.choices, sizes.run.layout
    common = 0.0
    for choice in choices.products.values():
        if choice.common:
            head = choice.product.section == "head"
            common += choice.elements * (1 if head else share)
            common += choices.table * (choice.product.name == "head")
    table, replicas, found = _table(sizes), sizes.place("replicas"), []
    head_is_common = choices["head"].common
    if layout.dp > 1:
        last = 0.0 if head_is_common else table
        found.append((_held(sizes, share) - common, last, sizes.place("dp")))
    if replicas.size > 1 and common:
        found.append((common, table if head_is_common else 0.0, replicas))
    return found


def _update(sizes: Sizes, share: float) -> Load:
    """Returns the load of clipping and of the optimizer."""
    layout = sizes.run.layout
    replicas = 1 if layout.dp_mode == "replicate" else sizes.spec.replicas(layout)
    held = _held(sizes, share) / max(1, replicas)
    wide = 2 if sizes.run.train.dtype == "float64" else 1
    seconds = sizes.costs.memory_s(held * (ADAM_BYTES + NORM_BYTES) * wide)
    return Load(memory=seconds, launches=40)
