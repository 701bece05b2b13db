"""Chooses how each product is carried out by the seconds that a cluster needs for it.

It tries every operand that may stay in place, schedule, number of chunks and kept operand that a
layout leaves open, takes the fastest that fits into the memory of a device, and prefers what the
rules of gridformer.parallel.auto.heuristics choose if that is about as fast. `gridformer plan` adds
up the `ProductTimes` of a step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gridformer.cluster.costs import Costs, GroupPlace, MeshGroups, MessageTime
from gridformer.cluster.file import load_cluster
from gridformer.cluster.messages import Op
from gridformer.config import LayoutConfig
from gridformer.mesh.node_placement import NodeBlock, sizes_of
from gridformer.parallel.auto.cost import Choice, Choices, ScheduleName, Stationary, Timed
from gridformer.parallel.auto.products import Product
from gridformer.parallel.registry import spec_of
from gridformer.utils.units import GIB, format_bytes

SMALL_BYTES = 64 << 20  # operands below this size may always be gathered at once
MOST_CHUNKS = 32  # keeps products large and messages few
MEMORY_SHARE = 0.8  # of a device, for what `Choices.held_bytes` estimates and what is gathered
GAIN = 0.99  # an option is only preferred to that of the rules if it takes less than this part
_RULES = ("stationary:", "schedule:", "chunks:", "keep_gathered:")  # begin their reasons
_SCHEDULES: tuple[ScheduleName, ...] = ("gather", "pipelined", "broadcast")

# The messages with which activations enter and leave a section, by `Choices.between`.
_OPS: dict[str, tuple[Op | None, Op]] = {
    "cut": ("all_gather", "reduce_scatter"),
    "replicated": (None, "all_reduce"),
    "first": ("broadcast", "reduce"),
}
# Kernels and messages that the host launches, in a forward and in a backward pass: around a product
# whatever its choice; for each axis over which operands travel; and more for each chunk (copies,
# gradients cast and added up) or panel (two messages, a product and the sum of its terms).
_AROUND, _PER_AXIS, _PER_CHUNK, _PER_PANEL = (6, 12), (2, 4), (4, 7), (4, 8)
# Passes over gathered keys and values, forward and backward: they are put in order, and gradients
# of two segments of queries are added up.
_KEYS_PASSES = 2, 8
_STATISTICS = 8  # bytes that a norm sends for each token: two sums in float32


@dataclass
class Load:
    """The work of one device in a part of a step.

    Attributes:
        products, attention, memory: Seconds of kernels by kind.
        launches: Kernels and messages that the host launches.
        exposed: Seconds by axis in which the device waits for messages.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels."""
        return self.products + self.attention + self.memory

    @property
    def device_s(self) -> float:
        """Seconds of kernels and of messages that the device waits for."""
        return self.compute_s + sum(self.exposed.values())

    def add(self, other: Load, times: float = 1.0) -> None:
        """Adds another load, a number of times, which may be a fraction."""
        self.products += other.products * times
        self.attention += other.attention * times
        self.memory += other.memory * times
        self.launches += other.launches * times
        for axis, seconds in other.exposed.items():
            self.exposed[axis] += seconds * times

    def on(self, costs: Costs, launch_s: float) -> float:
        """Returns the seconds that it takes with its launches; a CPU launches its own kernels."""
        host = self.launches * launch_s
        return self.device_s + host if costs.on_cpu else max(self.device_s, host)


class ProductTimes:
    """The times of products and messages of a layout on a cluster.

    Of `choices` only sizes and work count. `block` is the block of the mesh on each node, or None
    if ranks are placed in order.
    """

    def __init__(
        self, choices: Choices, layout: LayoutConfig, block: NodeBlock | None, costs: Costs
    ) -> None:
        self.choices, self.work, self.costs = choices, choices.work, costs
        boundary = spec_of(layout).boundary(layout)
        self.axis, self.between = boundary.axis, boundary.activation_layout
        self.dtype = choices.work.dtype or "float32"
        self.places = _places(layout, block, costs)

    def step_s(self, choice: Choice) -> float:
        """Returns the seconds of all such products in a step, the messages included."""
        product, work = choice.product, self.work
        if choice.common:
            return 0.0  # the same for every choice
        launch_s = self.costs.cluster.host.launch_us.value * 1e-6
        both = self.passes(choice)
        for load, n in zip(both, _AROUND):
            load.launches += n
        forward, backward = (load.on(self.costs, launch_s) for load in both)
        again = work.recompute == "full" and product.section != "head" and not product.ends_block
        return product.count * work.micro_batches * (forward * (1 + again) + backward)

    def passes(
        self, choice: Choice, before: tuple[float, float] | None = None
    ) -> tuple[Load, Load]:
        """Returns the loads of one such product in a micro-batch, forward and backward.

        Activations travel in turns with the products of their chunks, or behind the one of two
        products that does not wait for them.

        Args:
            before: Seconds of what is computed while its weight is gathered, forward and backward;
                None takes it to be as long as this product.
        """
        product, choices, costs, item = choice.product, self.choices, self.costs, self.work.itemsize
        rows, cols = (1, 1) if choice.common else (choices.rows, choices.cols)
        grid = rows * cols
        gathers, keeps_output = choice.schedule == "gather", choice.stationary == "output"
        chunks = max(choice.n_chunks, choices.loss_chunks(choice))
        panels = 1 if gathers else choices.panels
        steps = chunks * panels
        tokens = choices.head_tokens(choice)
        k, n = product.n_in, choice.n_out
        travels = tokens * (k if keeps_output else n) * item
        k, n = (k, max(1, n // cols)) if keeps_output else (max(1, k // cols), n)
        weight = k * n
        m, k = max(1, int(tokens / chunks)), max(1, k // panels)

        def product_s(m: int, n: int, k: int) -> float:
            return steps * costs.product_s(m, n, k, self.dtype, item)

        # The gradient of a gathered weight is multiplied block by block.
        blocks = rows if gathers and chunks == choice.n_chunks else 1
        one, grad_x = product_s(m, n, k), product_s(m, k, n)
        grad_w = blocks * product_s(max(1, k // blocks), n, m)
        more = _PER_CHUNK if gathers else _PER_PANEL
        parts = steps if steps > 1 else 0
        axes = (rows > 1) + (cols > 1)
        launches = [parts * more[way] + axes * _PER_AXIS[way] for way in range(2)]
        forward = Load(one, launches=1 + launches[0])
        backward = Load(grad_x + grad_w, launches=1 + blocks + launches[1])
        # A product adds up its weight's gradient itself, unless chunks, rows or parts are joined.
        added = weight * (2 * max(4, item) + item)
        joins = rows > 1 or product.parts or item >= 4
        n_bytes = added / rows * bool(joins) + 2 * item * weight * (rows > 1)
        n_bytes += (chunks > 1) * chunks * added * (grid > 1)
        backward.memory = costs.moved_s(n_bytes)
        if choice.common:
            return forward, backward
        if product.normed and self.between == "h":  # its own message
            waits = self.message("all_reduce", tokens * _STATISTICS, self.axis).seconds
            forward.exposed[self.axis] += waits
            backward.exposed[self.axis] += waits
        if not gathers:
            over = self.message(
                "broadcast" if keeps_output else "reduce", travels / steps, self.axis
            )
            down = self.message("broadcast", weight * item / panels, "row")
            hides = choice.schedule == "pipelined"
            # What stays in place is summed up panel by panel, in float32.
            summed = panels * tokens * (n if keeps_output else weight / n)
            (forward if keeps_output else backward).memory += costs.moved_s(
                summed * (2 * max(4, item) + item)
            )
            for axis, panel in ((self.axis, over), ("row", down)):
                forward.exposed[axis] += _in_turns(panel, steps, one * hides)
                backward.exposed[axis] += _in_turns(panel, 2 * steps, backward.products * hides)
            return forward, backward
        enter, leave = (
            self.message(op, travels / chunks, self.axis) for op in _OPS[choices.between]
        )
        if keeps_output:
            forward.exposed[self.axis] += _in_turns(enter, chunks, one)
            backward.exposed[self.axis] += chunks * leave.beside(grad_w / chunks)
            if not choice.keep_input:
                backward.exposed[self.axis] += chunks * enter.beside(grad_x / chunks)
        else:
            forward.exposed[self.axis] += _in_turns(leave, chunks, one)
            backward.exposed[self.axis] += _in_turns(enter, chunks, grad_x + grad_w)
        # Chunks of activations are copied, and blocks that are not contiguous in a message.
        scattered = self.between == "h" or (self.between == "s" and choices.row_sequences > 1)
        copied = 2 * travels * ((scattered and cols > 1) + (chunks > 1))
        forward.memory += costs.moved_s(copied)
        backward.memory += costs.moved_s(copied * (1 + keeps_output))
        if rows > 1:
            gather = self.message("all_gather", weight * item, "row")
            scatter = self.message("reduce_scatter", weight * item, "row")
            uses = self.work.micro_batches if choice.keep_weight else 1
            alone = chunks > choice.n_chunks  # a head is gathered before the chunks of its loss
            there_s, back_s = before or (forward.device_s, backward.compute_s / 2)
            forward.exposed["row"] += gather.beside(0 if alone else there_s) / uses
            backward.exposed["row"] += scatter.beside(0 if alone else grad_x)
            if not choice.keep_weight and not alone:
                backward.exposed["row"] += gather.beside(back_s)
        return forward, backward

    def keys(self, choice: Choice, n: int, there_s: float, back_s: float) -> tuple[Load, Load]:
        """Returns the loads of gathering a layer's keys and values over rows, and of its gradient.

        The chunks of heads travel behind attention of those before them.

        Args:
            n: The number of chunks.
            there_s: Seconds of attention in the forward pass.
            back_s: Seconds of attention in the backward pass, without what is recomputed.
        """
        loads = Load(), Load()
        n_bytes = self.choices.gathered_keys(choice) * self.work.itemsize
        gather, scatter = (
            self.message(op, n_bytes / n, "row") for op in ("all_gather", "reduce_scatter")
        )
        for load, message, seconds, passes in zip(
            loads, (gather, scatter), (there_s, back_s), _KEYS_PASSES
        ):
            load.exposed["row"] += _in_turns(message, n, seconds)
            load.memory += self.costs.moved_s(passes * n_bytes)
            load.launches += n * passes
        return loads

    def message(self, op: Op | None, n_bytes: float, axis: str) -> MessageTime:
        """Returns the time of a message, if there is one; 0 on an axis of one rank.

        The axis may also be `world`, or `replicas`, which share what `dp_mode` shards.
        """
        if op is None or not n_bytes or axis not in self.places:
            return MessageTime(0.0, 0.0)
        return self.costs.message(op, n_bytes, self.places[axis])


def _in_turns(message: MessageTime, n: int, kernels_s: float) -> float:
    """Returns the seconds to wait for n messages in turns with kernels, the first in any case."""
    return message.seconds + (n - 1) * message.beside(kernels_s / n)


def _places(
    layout: LayoutConfig, block: NodeBlock | None, costs: Costs
) -> dict[str, tuple[GroupPlace, ...]]:
    """Returns where groups of each axis with several ranks lie; of `pp` the pairs of neighbors."""
    within = layout.shard_over
    key = layout.scheme, *sizes_of(layout), layout.order, layout.common, within, block
    if key in costs.axes:
        return costs.axes[key]
    spec, mesh = spec_of(layout), spec_of(layout).ranks(layout, block).numpy()
    groups, places = MeshGroups(mesh, costs.cluster), dict[str, tuple[GroupPlace, ...]]()
    for i, name in enumerate(("pp", "dp", *spec.mesh)):
        if mesh.shape[i] > 1:
            line = mesh.swapaxes(0, i).reshape(mesh.shape[i], -1)[:, 0].tolist()
            pairs = itertools.pairwise(line) if name == "pp" else [line]
            places[name] = (*itertools.chain(*(groups.places(tuple(one)) for one in pairs)),)
    if (n := spec.replicas(layout)) > 1:
        replicas = mesh[0] if n > layout.dp else mesh[0].reshape(n, -1)[:, 0]
        places["replicas"] = groups.places(tuple(replicas.flatten().tolist()))
        lines = {"dp": mesh[0].reshape(layout.dp, -1)[:, 0], "replicas": replicas}
        for name, ranks in lines.items():
            line = sorted(ranks.flatten().tolist())
            if 0 < within < len(line):
                places[name] = groups.places(tuple(line[:within]))
                places[f"{name} across"] = groups.places(tuple(line[::within]))
    if mesh.size > 1:
        places["world"] = groups.places(tuple(range(mesh.size)))
    costs.axes[key] = places
    return places


# --------------------------------------------------------------------------- the choices


def fastest_choices(
    by_rules: Choices, layout: LayoutConfig, block: NodeBlock | None = None
) -> Choices:
    """Returns the fastest choices on the cluster of a layout, given those of the rules.

    `block` is the block of the mesh on each node, or None if ranks are placed in order.
    """
    cluster = load_cluster(layout.cluster).for_processes(layout.n_processes)
    times = ProductTimes(by_rules, layout, block, Costs(cluster))
    # What a device has left for operands that are gathered or kept.
    held, limit = by_rules.held_bytes, by_rules.work.memory_gib or cluster.limit_gib
    room = max(MEMORY_SHARE * limit * GIB - held, held * spec_of(layout).keep_share)
    best = {
        c.product.name: _best(c, by_rules, layout, times, room) for c in by_rules.products.values()
    }
    fastest = replace(by_rules, products=_keep(best, by_rules, layout, times, room))
    timed = {
        name: Timed(times.step_s(choice), by_rules[name], times.step_s(by_rules[name]))
        for name, choice in fastest.products.items()
        if not choice.common
    }
    reasons = [said for said in by_rules.reasons if not said.startswith(_RULES)]
    return replace(fastest, timed=timed, reasons=[*reasons, _why(layout, timed, room)])


def max_chunks(choices: Choices, layout: LayoutConfig, product: Product) -> int:
    """Returns the most chunks into which the activation of a product can be cut."""
    work, between = choices.work, spec_of(layout).boundary(layout).activation_layout
    if between == "s":  # chunks of whole sequences
        return choices.row_sequences
    if between == "b":  # chunks of all sequences
        return work.rows_of(product) // max(1, work.sequences)
    return work.rows_of(product) // choices.rows


def _best(
    rule: Choice, choices: Choices, layout: LayoutConfig, times: ProductTimes, room: float
) -> Choice:
    """Returns the fastest way to carry out a product that keeps nothing it may choose to keep."""
    if rule.common:
        return rule
    plain = choices.keeping(rule, False, False) if layout.keep_gathered == "auto" else rule
    fitting = [
        option
        for option in _options(rule, choices, layout)
        if choices.gathered_bytes(option) <= max(room, SMALL_BYTES)
    ]
    option = min(fitting, key=times.step_s, default=plain)
    return option if times.step_s(option) < GAIN * times.step_s(plain) else plain


def _options(rule: Choice, choices: Choices, layout: LayoutConfig) -> Iterator[Choice]:
    """Yields the ways to carry out a product that a layout leaves open."""
    spec, product = spec_of(layout), rule.product
    stationary: tuple[Stationary, ...] = (rule.stationary,)
    # A head shares its table with the embedding, and the parts of a joined weight lie by columns.
    turns = product.section != "head" and not product.parts
    if "stationary" in spec.keys and layout.stationary == "auto" and turns:
        stationary = ("output", "input")
    schedules: tuple[ScheduleName, ...] = (rule.schedule,)
    if "schedule" in spec.keys_of(layout) and layout.schedule == "auto":
        schedules = _SCHEDULES
    most = min(MOST_CHUNKS, max_chunks(choices, layout, product))
    counts = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
    for one, schedule in itertools.product(stationary, schedules):
        option = replace(rule, stationary=one, schedule=schedule, n_chunks=1)
        wish = layout.keep_gathered
        inputs, weights = wish in ("inputs", "all"), wish in ("weights", "all")
        yield (option := choices.keeping(option, inputs, weights))
        if schedule != "gather" or option.keep_input or product.section == "head":
            continue
        if one == "weight":
            continue
        if choices.activation_bytes(option) > 0:
            yield from (replace(option, n_chunks=n) for n in counts)


def _keep(
    best: dict[str, Choice],
    choices: Choices,
    layout: LayoutConfig,
    times: ProductTimes,
    room: float,
) -> dict[str, Choice]:
    """Keeps the gathered operands that save most seconds for each byte, as long as they fit."""
    if layout.keep_gathered != "auto":
        return best
    offers = []
    for name, choice in best.items():
        for inputs, weights in ((True, False), (False, True), (True, True)):
            option = choices.keeping(choice, inputs, weights)
            price, saved = choices.kept_bytes(option), times.step_s(choice) - times.step_s(option)
            if price > 0 and saved > (1 - GAIN) * times.step_s(choice):
                offers.append((saved / price, name, option, price))
    offers.sort(key=lambda offer: (-offer[0], offer[1]))
    chosen, paid = dict(best), dict.fromkeys(best, 0.0)
    for _, name, option, price in offers:
        if times.step_s(option) < times.step_s(chosen[name]) and price - paid[name] <= room:
            room -= price - paid[name]
            chosen[name], paid[name] = option, price
    return chosen


def _why(layout: LayoutConfig, timed: dict[str, Timed], room: float) -> str:
    now, before = sum(t.seconds for t in timed.values()), sum(t.by_rules_s for t in timed.values())
    return (
        f"cluster: products with their messages take {1e3 * now:.4g} ms of a step on "
        f"{layout.cluster}, and {1e3 * before:.4g} ms as volumes and thresholds would choose; "
        f"{format_bytes(room)} are free for operands that are gathered or kept"
    )
