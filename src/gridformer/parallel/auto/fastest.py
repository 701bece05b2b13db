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

from gridformer.cluster.costs import Costs, GroupPlace, KernelWork, MeshGroups, MessageTime
from gridformer.cluster.file import load_cluster
from gridformer.cluster.messages import Op
from gridformer.config import LayoutConfig
from gridformer.mesh.node_placement import NodeBlock, sizes_of
from gridformer.parallel.auto.cost import Choice, Choices, ScheduleName, Stationary, Timed
from gridformer.parallel.auto.products import Product
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import expert_axes
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
# Kernels and messages that the host launches, in a forward and in a backward pass: for a product
# whatever its choice; for each axis over which operands travel; and more for each chunk (copies,
# gradients cast and added up, or a message, a copy and a product if it only hides a message) or
# panel (two messages, a product and the sum of its terms).
_PER_AXIS, _PER_CHUNK, _PER_HIDDEN, _PER_PANEL = (2, 4), (4, 7), (2, 3), (4, 8)
# Passes of memory-bound kernels, forward and backward: over an activation between sections (a norm
# in float32, which casts its result, and what is added after a section) and over one inside.
_NORM, _RMS_NORM, _RESIDUAL = (2, 3), (7, 17.5), (3, 3)
_GRID_NORM, NORM_LAUNCHES = (5, 19), (10, 14)  # where devices sum the statistics of a norm
_INSIDE, _JOINED = (1, 3.5), (3, 8)  # joined products are rotated, or parts of them multiplied
_BIAS = 2, 1  # forward only where the product does not add it
CAST_BYTES = 6  # of casting an element between types of 2 and 4 bytes
_LAUNCH_PRICES = (0.0, 1.0, 0.5, 0.2)  # of a second of the host, which runs ahead of a GPU
# Passes over gathered keys and values, forward and backward: they are put in order, and gradients
# of two segments of queries are added up.
_KEYS_PASSES = 2, 8
# Launches of a mixture of experts besides its products, and passes over rows that are sorted.
_MIXTURE, _SORTS = 30, 6
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
        # The axis over which norms sum; empty if a device has whole rows.
        self.norm_axis = boundary.h_over or boundary.axis * (self.between == "h")
        self.dtype = choices.work.dtype or "float32"
        self.launch_price, self._totals = 1.0, dict[Choice, tuple[float, float]]()
        self.places = _places(layout, block, costs)

    def step_s(self, choice: Choice) -> float:
        """Returns the seconds of all such products in a step, the messages included.

        The host's seconds count by `launch_price`.
        """
        device_s, host_s = self.totals(choice)
        return device_s + self.launch_price * host_s

    def totals(self, choice: Choice) -> tuple[float, float]:
        """Returns the seconds of the device and of the host for all such products in a step.

        They include what is computed around a product in a layer, with about a causal attention.
        """
        product, work = choice.product, self.work
        if choice.common:
            return 0.0, 0.0  # the same for every choice
        if choice not in self._totals:
            forward, backward = self.passes(choice)
            if product.section != "head":
                for load, around in zip((forward, backward), self.around(choice)):
                    load.add(around)
            if product.section == "attention" and product.closes:
                tokens, width = self.choices.tokens(product), product.n_in / self.choices.cols
                flop = 2.0 * tokens * width * work.tokens / max(1, work.sequences)
                kernel = KernelWork("attention", flop, 0.0, self.dtype)
                backward.attention += 3 * self.costs.kernel_s(kernel)
            again = work.recomputed * (product.section != "head" and not product.ends_block)
            backward.add(forward, 1 + again)
            launch_s = self.costs.cluster.host.launch_us.value * 1e-6
            n = product.count * work.micro_batches
            self._totals[choice] = n * backward.device_s, n * backward.launches * launch_s
        return self._totals[choice]

    def around(self, choice: Choice) -> Iterator[Load]:
        """Yields the loads of the memory-bound kernels around a product, forward and backward."""
        product, choices, item = choice.product, self.choices, self.work.itemsize
        h = product.n_out if product.closes else product.n_in
        wide, casts = max(4, item), 2 * (item == 2)
        cut = 1 if choices.between != "cut" else choices.within
        # A product adds its bias itself, if it is one product and its device has the whole bias.
        joins = choice.stationary == "output" or (
            choice.stationary == "input" and self.between != "h"
        )
        apart = not choice.common and choices.rows * choices.cols > 1
        apart &= not joins or choice.schedule != "gather" or choice.n_chunks > 1
        norm, inner = (_RMS_NORM if product.rms else _NORM), (_JOINED if product.parts else _INSIDE)
        summed = self.norm_axis in self.places
        norm = _GRID_NORM if summed else norm
        for way in range(2):
            bias = product.bias * _BIAS[way] * (apart or way)
            launches = (bias > 0) + way * (1 + casts / 2) * (1 + product.bias)  # and gradients
            if product.closes:
                n_bytes = (_RESIDUAL[way] + bias) * item * h / cut
                launches += 1
            else:
                n_bytes = (norm[way] * wide + casts * CAST_BYTES) * h / cut
                n_bytes += (inner[way] + bias) * item * choice.n_out / choices.within
                alone = norm[way] / 2 + 2 if product.rms else 1
                launches += (NORM_LAUNCHES[way] if summed else alone) + casts
                launches += inner[way] if product.parts else 1
            seconds = self.costs.moved_s(choices.tokens(product) * n_bytes)
            yield Load(memory=seconds, launches=launches)

    def passes(
        self, choice: Choice, before: tuple[float, float, float] | None = None
    ) -> tuple[Load, Load]:
        """Returns the loads of one such product in a micro-batch, forward and backward.

        Activations travel in turns with the products of their chunks, or behind the one of two
        products that does not wait for them.

        Args:
            before: Seconds of what is computed while its weight is gathered, forward and backward,
                and while the weight's gradient is summed; None takes them to be those of this
                product.
        """
        if choice.stationary == "weight" and not choice.common:
            return self._stationary(choice)
        product, choices, costs, item = choice.product, self.choices, self.costs, self.work.itemsize
        rows, cols = (1, 1) if choice.common else (choices.rows, choices.cols)
        grid = rows * cols
        gathers, keeps_output = choice.schedule == "gather", choice.stationary == "output"
        chunks = max(choice.n_chunks, choices.loss_chunks(choice))
        whole = choice.whole_backward
        late = choices.late_gradients and (whole or chunks == 1)
        turned = self.between == "h" and not costs.on_cpu  # see `summa.Sharded`
        # In how many chunks gradients of activations are multiplied, and those of the weight.
        turns = 1 if late or (whole and keeps_output) else chunks
        sums = 1 if whole and (keeps_output or not turned) else chunks
        panels = 1 if gathers else choices.panels
        steps, apart = chunks * panels, self._rows_apart(choice)
        tokens = choices.head_tokens(choice)
        k, n = product.n_in, choice.n_out
        travels = tokens * (k if keeps_output else n) * item
        k, n = (k, max(1, n // cols)) if keeps_output else (max(1, k // cols), n)
        weight = k * n
        k = max(1, k // panels)

        def product_s(chunks: int, n: int, k: int) -> float:
            batch = apart if chunks > 1 else 1
            m = max(1, int(tokens / chunks / batch))
            return chunks * panels * costs.product_s(m, n, k, self.dtype, item, batch)

        # Over gloo the gradient of a gathered weight is multiplied block by block.
        blocks = rows if gathers and chunks == choice.n_chunks and costs.on_cpu else 1
        one, grad_x = product_s(chunks, n, k), product_s(turns, k, n)
        m = max(1, int(tokens / sums))
        one_block = costs.product_s(max(1, k // blocks), n, m, self.dtype, item)
        grad_w = sums * panels * blocks * one_block
        more = (_PER_HIDDEN if whole else _PER_CHUNK) if gathers else _PER_PANEL
        axes = (rows > 1) + (cols > 1)
        parts = [several if several > 1 else 0 for several in (steps, turns * panels)]
        launches = [parts[way] * more[way] + axes * _PER_AXIS[way] for way in range(2)]
        forward = Load(one, launches=1 + launches[0])
        backward = Load(grad_x + grad_w, launches=1 + blocks + launches[1])
        # A product adds up its weight's gradient itself, unless chunks, rows or parts are joined.
        added = weight * (2 * max(4, item) + item)
        joins = rows > 1 or product.parts or item >= 4
        n_bytes = added / rows * bool(joins) + 2 * item * weight * (blocks > 1)
        if sums > 1 and grid > 1:  # a GPU adds where it multiplies
            n_bytes += sums * added if costs.on_cpu else weight * (max(4, item) + item)
        backward.memory = costs.moved_s(n_bytes)
        if choice.common:
            return forward, backward
        if product.normed and self.norm_axis:  # its own message
            waits = self.message("all_reduce", tokens * _STATISTICS, self.norm_axis).seconds
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
            [self.message(op, travels / n, self.axis) for n in (chunks, turns)]
            for op in _OPS[choices.between]
        )
        # A gradient that is multiplied late is that of the product after.
        late_s = before[1] if before and late else grad_w
        if keeps_output:
            forward.exposed[self.axis] += _in_turns(enter[0], chunks, one)
            backward.exposed[self.axis] += turns * leave[1].beside(late_s / turns)
            if not choice.keep_input:
                backward.exposed[self.axis] += turns * enter[1].beside(grad_x / turns)
        else:
            forward.exposed[self.axis] += _in_turns(leave[0], chunks, one)
            waiting = grad_x + (0 if whole else grad_w)
            backward.exposed[self.axis] += (
                enter[1].beside(late_s) if late else _in_turns(enter[1], turns, waiting)
            )
        if cols > 1:
            # Blocks of activations are copied that are not contiguous in a message.
            copied = [2 * travels * self._scattered(choice, n) for n in (chunks, turns)]
            copied[1] *= 1 + keeps_output
            if turned:  # parts, before they are gathered
                again = not (keeps_output and choice.keep_input)
                copied = [2 * travels / cols * gathered for gathered in (keeps_output, again)]
            # So is the other factor of a weight's gradient if its tokens lie apart.
            beside = 2 * tokens * (n if keeps_output else k) * item
            copied[1] += beside * (turns > 1 and apart > 1)
            forward.memory += costs.moved_s(copied[0])
            backward.memory += costs.moved_s(copied[1])
        if rows > 1:
            gather = self.message("all_gather", weight * item, "row")
            scatter = self.message("reduce_scatter", weight * item, "row")
            uses = self.work.micro_batches if choice.keep_weight else 1
            alone = chunks > choice.n_chunks  # a head is gathered before the chunks of its loss
            half = backward.compute_s / 2
            there_s, back_s, sum_s = before or (forward.device_s, half, half)
            forward.exposed["row"] += gather.beside(0 if alone else there_s) / uses
            backward.exposed["row"] += scatter.beside(0 if alone else sum_s)
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

    def _rows_apart(self, choice: Choice) -> int:
        """Returns how many rows of tokens of a chunk lie apart in the full activation."""
        if self.between == "b" and choice.n_chunks > 1:
            return max(1, self.work.sequences)
        # A feed-forward gathers tokens device by device.
        whole = 1 if choice.product.section == "feed_forward" else self.choices.row_sequences
        return self.choices.cols if self.between == "s" and choice.n_chunks > whole else 1

    def _scattered(self, choice: Choice, chunks: int) -> bool:
        """Whether a message of a chunk of an activation has blocks that are not contiguous."""
        if self.between == "s" and choice.product.section != "feed_forward":
            return self.choices.row_sequences > chunks
        return self.between == "h"

    def _stationary(self, choice: Choice) -> tuple[Load, Load]:
        """Returns the loads of a product whose weight stays, all of whose messages are waited for.

        Only the gradient of the input travels during a product, that of the weight.
        """
        product, choices, item = choice.product, self.choices, self.work.itemsize
        r, c, tokens = choices.rows, choices.cols, choices.tokens(product)
        enter, leave, over = (
            ("row", self.axis, (c, r)) if product.closes else (self.axis, "row", (r, c))
        )
        k, n = max(1, product.n_in // over[0]), max(1, choice.n_out // over[1])

        def product_s(m: int, n: int, k: int) -> float:
            return self.costs.product_s(m, n, k, self.dtype, item)

        grad_w = product_s(k, n, tokens)
        forward = Load(product_s(tokens, n, k), launches=1 + 2 * _PER_AXIS[0])
        backward = Load(product_s(tokens, k, n) + grad_w, launches=2 + 2 * _PER_AXIS[1])
        x, y = tokens * k * item, tokens * n * item
        forward.exposed[enter] += self.message("all_gather", x, enter).seconds
        forward.exposed[leave] += self.message("reduce_scatter", y, leave).seconds
        backward.exposed[leave] += self.message("all_gather", y, leave).seconds
        backward.exposed[enter] += self.message("reduce_scatter", x, enter).beside(grad_w)
        if not choice.keep_input:
            again = self.message("all_gather", x, enter)
            backward.exposed[enter] += again.beside(backward.products - grad_w)
        if product.normed:
            norm = self.message("all_reduce", tokens / c * _STATISTICS, self.norm_axis)
            for load in (forward, backward):
                load.exposed[self.norm_axis] += norm.seconds
        for load in (forward, backward):  # blocks of features are not contiguous
            load.memory += self.costs.moved_s(2 * (x if product.closes else y) * (r > 1))
        return forward, backward

    def redistributes(self, choice: Choice) -> Load:
        """Returns the load of sending what a product computes or reads from tokens to heads."""
        load, n_bytes = Load(), self.choices.redistributed(choice) * self.work.itemsize
        load.exposed["row"] = self.message("all_to_all", n_bytes, "row").seconds
        load.memory, load.launches = self.costs.moved_s(6 * n_bytes), 5.0
        return load

    def experts(self, hidden_size: int, k: int) -> Load:
        """Returns the load of sending tokens to k experts each and back, in one direction.

        Their rows are sorted before and after.
        """
        tokens = self.work.tokens / self.choices.routed_apart
        n_bytes = tokens * k * hidden_size * self.work.itemsize
        load = Load(memory=self.costs.moved_s(_SORTS * n_bytes), launches=_MIXTURE)
        load.exposed["experts"] = 2 * self.message("all_to_all", n_bytes, "experts").seconds
        return load

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
    over = layout.experts_over, layout.experts_dp
    key = layout.scheme, *sizes_of(layout), layout.order, layout.common, within, block, *over
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
    if axes := expert_axes(layout):
        n_dp = layout.experts_dp or layout.dp
        some = [slice(n_dp) if "dp" in axes else 0]
        some += [slice(None) if name in axes else 0 for name in spec.mesh]
        line = mesh[0][tuple(some)]
        if line.size > 1:
            places["experts"] = groups.places(tuple(sorted(line.flatten().tolist())))
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
    # What a device has left for operands that are gathered or kept.
    held, limit = by_rules.held_bytes, by_rules.work.memory_gib or cluster.limit_gib
    room = max(MEMORY_SHARE * limit * GIB - held, held * spec_of(layout).keep_share)
    longer = max(map(by_rules.activation_bytes, by_rules.products.values()))
    costs = Costs(cluster)
    # Processes that share a CPU gain nothing: while one of them waits, another one multiplies.
    late = not costs.on_cpu and 2 * longer < room and by_rules.cols > 1
    late = late and spec_of(layout).boundary(layout).activation_layout == "s"
    by_rules = replace(by_rules, late_gradients=late)
    times = ProductTimes(by_rules, layout, block, costs)
    found = list[tuple[float, float, dict[str, Choice]]]()
    for price in (1.0,) if times.costs.on_cpu else _LAUNCH_PRICES:
        times.launch_price = price
        best = {
            c.product.name: _best(c, by_rules, layout, times, room)
            for c in by_rules.products.values()
        }
        products = _keep(best, by_rules, layout, times, room)
        device_s, host_s = map(sum, zip(*map(times.totals, products.values())))
        found.append((max(device_s, host_s), price, products))
        if price == 0 and host_s <= device_s:
            break
    _, times.launch_price, products = min(found, key=lambda one: one[0])
    fastest = replace(by_rules, products=products)
    timed = {
        name: Timed(times.step_s(choice), by_rules[name], times.step_s(by_rules[name]))
        for name, choice in fastest.products.items()
        if not choice.common
    }
    reasons = [said for said in by_rules.reasons if not said.startswith(_RULES)]
    if late:
        reasons.append(
            "gradients: that of a weight is multiplied in the backward pass of the product before, "
            "while that waits for an activation"
        )
    return replace(fastest, timed=timed, reasons=[*reasons, _why(layout, timed, room)])


def max_chunks(choices: Choices, layout: LayoutConfig, product: Product) -> int:
    """Returns the most chunks into which the activation of a product can be cut."""
    work, between = choices.work, spec_of(layout).boundary(layout).activation_layout
    if between == "b":  # chunks of all sequences
        return work.rows_of(product) // max(1, work.sequences)
    return work.rows_of(product) // choices.rows // (choices.cols if between == "s" else 1)


def _chunk_counts(choices: Choices, layout: LayoutConfig, product: Product) -> list[int]:
    """Returns the numbers of chunks to try; over s those of whole sequences or of parts of each."""
    most = min(MOST_CHUNKS, max_chunks(choices, layout, product))
    counts = [2**i for i in range(1, most.bit_length()) if 2**i <= most]
    if spec_of(layout).boundary(layout).activation_layout == "s":
        each = choices.row_sequences
        counts = [n if n <= each else n // each * each for n in counts]
    return counts


def _best(
    rule: Choice, choices: Choices, layout: LayoutConfig, times: ProductTimes, room: float
) -> Choice:
    """Returns the fastest way to carry out a product that keeps nothing it may choose to keep."""
    if rule.common:
        return rule
    plain = choices.keeping(rule, False, False) if layout.keep_gathered == "auto" else rule
    if choices.late_gradients and rule.product.section != "head":
        plain = replace(plain, n_chunks=1)  # fits, and chunks that save memory are not late
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
    counts = _chunk_counts(choices, layout, product)
    for one, schedule in itertools.product(stationary, schedules):
        option = replace(rule, stationary=one, schedule=schedule, n_chunks=1)
        wish = layout.keep_gathered
        inputs, weights = wish in ("inputs", "all"), wish in ("weights", "all")
        yield (option := choices.keeping(option, inputs, weights))
        if schedule != "gather" or option.keep_input or product.section == "head":
            continue
        if one == "weight":
            continue
        if choices.activation_bytes(option) > 0 and not choices.late_gradients:
            yield from (replace(option, n_chunks=n) for n in counts)
        if choices.between == "cut" or (choices.replicated and one == "input"):
            yield from (replace(option, n_chunks=n, whole_backward=True) for n in counts)


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
