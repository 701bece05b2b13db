"""The time of a step by a roofline: two milliseconds where `predict` takes seconds.

It adds up products and attention by their shapes, memory-bound kernels by the bytes of activations
and weights, and messages by their volumes. It only chooses what is traced, so it knows no kernels
of a family or scheme.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from gridformer.cluster.costs import Costs, KernelWork
from gridformer.cluster.file import Cluster
from gridformer.cluster.messages import Op
from gridformer.config import RunConfig
from gridformer.memory.quick import fused_loss, quick_peaks
from gridformer.memory.room import room_on
from gridformer.parallel.auto.cost import Choice, resolved
from gridformer.parallel.auto.decisions import Decisions, decisions_of
from gridformer.parallel.auto.fastest import CAST_BYTES, NORM_LAUNCHES, Load, ProductTimes
from gridformer.parallel.auto.products import EXPERTS, keys_chunks, parameter_bytes
from gridformer.parallel.data.buckets import BUCKET_BYTES
from gridformer.parallel.pipeline.partition import (
    StageShares,
    shares_of_ranks,
    stack_of,
    stacks_of,
)
from gridformer.parallel.registry import spec_of
from gridformer.plan.predict import on_device_type, unfused
from gridformer.train.compile import why_uncompiled
from gridformer.train.muon import TOGETHER
from gridformer.utils.units import GIB

# Passes of memory-bound kernels over logits.
_LOGITS, _SHARDED_LOGITS = 6, 10  # in float32, forward and backward together
_COMPILED_LOGITS = 2  # where the loss is compiled
# The fractions that are left in compiled layers of passes over activations, and of their launches.
_JOINED, _LAUNCHED = 0.5, 0.3
_FUSED_LOGITS = 3  # of gridformer's kernels, in their own type
_UPDATE, _MOMENTS = 32, 16  # bytes of a parameter: that its update moves, and that a host may have
_TURNS, _COPIES = 5, 2.5  # of Muon's iteration, and of what devices gather in each turn
# Kernels that move little: of a step, of a parameter once a step, and of a chunk of the loss.
_STEP, _PARAMETER, _CHUNK = 70, {"replicate": 1, "zero1": 4, "fsdp": 3}, (15, 30)


@dataclass(frozen=True)
class Estimate:
    """The estimated time of a step, and the memory of the fullest device."""

    step_s: float
    peak_gib: float
    limit_gib: float
    load: Load  # kernels and messages of the slowest rank in the whole step

    @property
    def fits(self) -> bool:
        """Whether the estimated memory is within the limit."""
        return self.peak_gib <= self.limit_gib


def estimate(
    run: RunConfig,
    cluster: Cluster,
    costs: Costs | None = None,
    decisions: Decisions | None = None,
) -> Estimate:
    """Estimates the time and the memory of a step of a checked run.

    Costs of this cluster remember what was asked; None makes new ones. `decisions` are those of the
    run; None decides.
    """
    costs = costs or Costs(cluster.for_processes(run.layout.n_processes))
    cluster, layout, host = costs.cluster, run.layout, costs.cluster.host
    decisions = decisions or decisions_of(run)
    choices, traffic = decisions.choices, decisions.traffic
    step = _Step(resolved(run, choices), ProductTimes(choices, layout, decisions.block, costs))
    m, k = layout.micro_batches, layout.stages_per_rank
    # In training the host of a GPU launches a step while the GPU is at the step before.
    ahead = not costs.on_cpu and not run.train.waits_each_step
    launch_s, fixed_s = host.launch_us.value * 1e-6, host.step_us.value * 1e-6
    waits_s = 0.0 if ahead else launch_s
    shares = shares_of_ranks(run)
    passes = {share: step.passes(share) for share in {*shares}}
    each = {share: [x.on(costs, waits_s) for x in both] for share, both in passes.items()}
    seconds = {share: sum(both) for share, both in each.items()}
    slowest = max(seconds, key=lambda share: seconds[share])
    overheads = (step.overheads(share, both[1]) for share, both in passes.items())
    load = max(overheads, key=lambda load: load.device_s)
    step_s = load.on(costs, waits_s) + m * seconds[slowest]
    for one in passes[slowest]:
        load.add(one, m)
    if layout.pp > 1:
        # Nothing hides what stages send while a pipeline fills and empties, or in turns if a rank
        # has one stage, which runs no more passes ahead than there are stages after it.
        n_bytes, hops = traffic["pp"] / (2 * k * m), step.times.places["pp"]
        sends = 2 * k * fmean(costs.message("send", n_bytes, (hop,)).seconds for hop in hops)
        waits = sends * (layout.pp - 1) * (m / layout.pp if k == 1 else 1)
        waits = max(waits, m * (sends - seconds[slowest]))
        load.exposed["pp"] += waits
        # Late gradients of weights, which take about as long as forward passes, fill the end.
        filled = 2 if layout.splits_backward else 0
        idle = {share: max(0.0, seconds[share] - filled * each[share][0]) for share in each}
        step_s += waits + (sum(idle[share] for share in shares) - idle[slowest]) / k
    step_s = max(step_s, load.launches * launch_s + fixed_s) if ahead else step_s + fixed_s
    there = on_device_type(unfused(run, cluster), cluster.device.kind)
    peak_gib = max(quick_peaks(there, choices)) / GIB
    return Estimate(step_s, peak_gib, room_on(run, cluster), load)


class _Step:
    """The work of a device in a step of a run, whose `reshard` is decided."""

    def __init__(self, run: RunConfig, times: ProductTimes) -> None:
        self.run, self.times, self.costs, self.choices = run, times, times.costs, times.choices
        self.layout, self.work, self.item = run.layout, times.work, times.work.itemsize
        self.wide = parameter_bytes(run)
        # How many passes of a stage follow each other, while its rank communicates for others.
        interleaved = self.layout.pipeline_order == "interleaved"
        self.several = min(self.layout.micro_batches, self.layout.pp) if interleaved else 1
        self.compiled = not why_uncompiled(run, times.costs.cluster.device.kind)
        self.gathers_s = 0.0  # of a rank's layers, during a backward pass
        self.stacks = {stack: self._layers(stack, n) for stack, n in stacks_of(run).items()}
        self.head, self.lookup = self._head(), self._lookup()

    def passes(self, share: StageShares) -> tuple[Load, Load]:
        """Returns the loads of a micro-batch of a rank that has this part of the model."""
        both = Load(), Load()
        parts = [(self.stacks[stack], part) for stack, part in share.layers]
        for loads, times in (*parts, (self.head, float(share.head)), (self.lookup, share.lookups)):
            for load, one in zip(both, loads):
                load.add(one, times)
        return both

    def overheads(self, share: StageShares, backward: Load) -> Load:
        """Returns the load of what a rank does once a step: casts, sums over replicas, updates."""
        layout, train, load = self.layout, self.run.train, Load(launches=_STEP)
        sharded = layout.dp_mode != "replicate"
        shards = layout.shard_over or spec_of(layout).replicas(layout)
        part = 1 / shards if sharded else 1.0
        op: Op = "reduce_scatter" if sharded else "all_reduce"
        k, held = layout.stages_per_rank, 0.0
        sums = layout.micro_batches if layout.gradient_sync == "micro_batch" else 1
        beside = max(0.0, backward.device_s * (1 + (k - 1) * self.several) / k - self.gathers_s)
        for axis in ("dp", "replicas"):
            layers, table = self._held(share, common=axis == "replicas")
            held += sum(layers) + table
            # A cast, and what is copied to messages, of each matrix and about as many vectors.
            load.launches += len(layers) * (1 + 2 * _PARAMETER[layout.dp_mode] * sums)
            # The table's gradient is the last that is complete, and its parameters the first.
            table_s, seconds = (self._sent_s(op, one, axis) for one in ([table], layers))
            load.exposed["dp"] += sums * (max(0.0, seconds - beside) + table_s)
            beside = max(0.0, beside - seconds)
            if layout.shard_over:  # parts, which travel a layer later
                parts = [one * part for one in layers]
                seconds = self._sent_s("all_reduce", parts, f"{axis} across")
                table_s = self._sent_s("all_reduce", [table * part], f"{axis} across")
                load.exposed["dp"] += max(0.0, seconds - beside) + table_s
                beside = max(0.0, beside - seconds)
            if sharded:
                updated = [table, *layers] if layout.dp_mode == "zero1" else [table]
                load.exposed["dp"] += self._sent_s("all_gather", updated, axis)
        if self.item == 2:
            copies = 1 if self.choices.cast_once else 2 * layout.micro_batches
            cast = held * (part if layout.dp_mode == "fsdp" else 1)
            load.memory += self.costs.moved_s(CAST_BYTES * cast * copies)
        if train.optimizer == "muon":
            self._orthogonalize(load, share, shards if sharded else 1)
        held *= part * self.wide / 4
        load.memory += self.costs.moved_s(_UPDATE * held)
        if train.offload == "optimizer":
            load.memory += self.costs.kernel_s(KernelWork("copy", 0.0, _MOMENTS * held))
        return load

    def _orthogonalize(self, load: Load, share: StageShares, replicas: int) -> None:
        """Adds Muon's products of blocks, and their messages; see gridformer.train.muon."""
        item, dtype = (2, "bfloat16") if self.item == 2 else (4, "float32")
        axes = "row", self.times.axis
        for choice in self.choices.products.values():
            product, here = choice.product, share.share_of(choice.product)
            rows, cols = (1, 1) if choice.common else (self.choices.rows, self.choices.cols)
            for width, _ in product.parts or [(choice.n_out, 0)]:
                if product.section == "head" or not here:
                    continue
                k, n = sorted((product.n_in, width))
                mine = -(-round(product.count * here * product.held) // replicas)
                together = min(mine, max(1, TOGETHER * rows * cols // (k * n)))
                times = _TURNS * mine / together
                for m, inner in ((k / cols, n), (k / cols, k), (n / cols, k)):
                    shape = math.ceil(k / rows), math.ceil(m), inner
                    load.products += times * self.costs.product_s(*shape, dtype, item, together)
                moved = (k * n / cols, k * k / cols), (*[k * k / rows] * 3,)
                n_bytes = _COPIES * item * sum(map(sum, moved))
                load.memory += _TURNS * mine * self.costs.moved_s(n_bytes)
                for axis, elements in ((axis, x) for axis, each in zip(axes, moved) for x in each):
                    n_bytes = elements * item * together
                    message = self.times.message("all_gather", n_bytes, axis)
                    load.exposed[axis] += times * message.seconds * (not choice.common)
                load.launches += times * (4 + 8 * (rows * cols > 1))

    # ------------------------------------------------------------------ parts of a model

    def _layers(self, stack: str, n: int) -> tuple[Load, Load]:
        """Returns the loads of all layers of a stack in a micro-batch."""
        forward, backward, layer = Load(), Load(), 0.0
        again = self.work.recomputed
        attends_again = 1.0 if self.work.recompute == "selective" else again
        every = self.choices.products.values()
        products = [one for one in every if one.product.section != "head"]
        products = [one for one in products if stack_of(one.product) == stack]
        for choice, (there, back) in zip(products, self._in_turns(products)):
            for load, one, around in zip(
                (forward, backward), (there, back), self.times.around(choice)
            ):
                if self.compiled:
                    around.memory *= _JOINED
                    around.launches *= _LAUNCHED
                one.add(around)
                load.add(one, choice.product.count)
            if again and not choice.product.ends_block:
                backward.add(there, choice.product.count * again)  # with the kernels around it
            layer += self._elements(choice) / n * self.item
            if choice.product.name == f"{EXPERTS}_up" and self.layout.experts_over:
                model = self.run.model
                sent = self.times.experts(model.hidden_size, model.experts_per_token)
                forward.add(sent, choice.product.count * (1 + again))
                backward.add(sent, choice.product.count)
            if self.choices.redistributed(choice):
                sent = self.times.redistributes(choice)
                forward.add(sent, choice.product.count)
                backward.add(sent, choice.product.count * (1 + attends_again))
        keyed = [choice for choice in products if choice.product.keys]
        for choice, (there_s, back_s) in zip(keyed, self._attention(stack)):
            there, back = (
                Load(attention=there_s, launches=1),
                Load(attention=back_s, launches=3 - attends_again),
            )
            if self.choices.gathered_keys(choice):
                biased = self.run.model.family == "t5" and not choice.product.name.endswith(".kv")
                chunks = keys_chunks(self.run.model, self.choices.cols, biased)
                there.launches, back.launches = 2 * chunks, 4 * chunks
                gathers = self.times.keys(choice, chunks, there_s, back_s)
                for load, one in zip((there, back), gathers):
                    load.add(one)
            forward.add(there, n)
            if self.work.recompute == "except_attention":  # keys and values are gathered again
                there.attention = 0.0
            back.add(there, attends_again)
            backward.add(back, n)
        inputs = self.choices.inputs_again() * self.item / self.run.model.n_layers
        gather = self.times.message("all_gather", inputs, self.times.axis)
        backward.exposed[self.times.axis] += n * gather.seconds
        if self.layout.dp_mode == "fsdp":  # parameters are gathered during the layer before
            gather, kept = self.times.message("all_gather", layer, "replicas"), 1
            if self.choices.reshard == "step":
                kept = self.layout.micro_batches
            else:
                self.gathers_s += n * gather.seconds / self.layout.pp
            for load in (forward, backward)[: 1 if self.choices.reshard == "step" else 2]:
                several = self.several if self.choices.reshard == "step" else 1
                load.exposed["dp"] += n * gather.beside(several * load.device_s / n) / kept
                load.memory += self.costs.moved_s(2 * layer) * n / kept
        return forward, backward

    def _in_turns(self, products: Sequence[Choice]) -> list[tuple[Load, Load]]:
        """Returns the loads of a layer's products.

        Weights are gathered during the products before, and the sums of their gradients travel
        during those of the backward pass after.
        """
        loads = [self.times.passes(choice) for choice in products]
        if self.choices.rows == 1 and not self.choices.late_gradients:
            return loads
        halves = [back.compute_s / 2 for _, back in loads]
        before = [
            (loads[i - 1][0].compute_s, halves[(i + 1) % len(loads)], halves[i - 1])
            for i in range(len(loads))
        ]
        return [self.times.passes(choice, one) for choice, one in zip(products, before)]

    def _attention(self, stack: str) -> Iterator[tuple[float, float]]:
        """Yields the seconds of each kind of attention in a layer of a stack, of both passes."""
        model, s, source = self.run.model, self.run.seq_len, self.run.source_len
        batch, rows = self.choices.row_sequences, self.choices.sequence_rows
        heads, d = max(1, model.n_heads // self.choices.within), model.head_width
        if self.choices.heads_over_rows:
            heads, rows = heads // rows, 1
        causal = stack == "decoder" or model.family in ("gpt2", "llama", "network")
        own = stack == "encoder" or model.attention_dropout or self.run.data.document_mask
        hides = min(model.window or 1, s) if causal else 0
        kinds = [(source, source, 0) if stack == "encoder" else (s, s, hides)]
        op = "attention" if own else "sdpa"
        for queries, keys, hidden in [*kinds, *[(s, source, 0)] * (stack == "decoder")]:
            segments = [(queries, keys)]
            if rows > 1:  # those of the first row; all rows have as much work
                part = queries // (2 * rows)
                segments = [(part, part if hidden else keys), (part, keys)]
            there_s = back_s = 0.0
            for n, seen in segments:
                shape, scores = (batch, heads, n, seen, d, hidden), batch * heads * n * seen
                moved = 2 * batch * heads * (n + seen) * d * self.item
                work = KernelWork("attention", 4.0 * scores * d, moved, self.times.dtype, shape, op)
                back = work._replace(flop=2 * work.flop, bytes=2 * moved, op=f"{op}_backward")
                there_s += self.costs.kernel_s(work)
                back_s += self.costs.kernel_s(back)
            yield there_s, back_s

    def _head(self) -> tuple[Load, Load]:
        forward, backward = Load(), Load()
        for choice in self.choices.products.values():
            is_head = choice.product.name == "head"
            if choice.product.section != "head" or (is_head and not self.run.model.token_head):
                continue
            for load, one in zip((forward, backward), self.times.passes(choice)):
                load.add(one)
            if is_head:
                cols = 1 if choice.common else self.choices.within
                passes = _LOGITS if cols == 1 else _SHARDED_LOGITS
                each = passes * max(4, self.item) + 2 * CAST_BYTES * (self.item == 2)
                if fused_loss(self.run):
                    each = _FUSED_LOGITS * self.item
                elif self.compiled and cols == 1:
                    each = _COMPILED_LOGITS * max(4, self.item)
                logits = self.choices.head_tokens(choice) * choice.product.n_out / cols
                forward.memory += self.costs.moved_s(logits * each)
                norm = sum(NORM_LAUNCHES) * (self.times.norm_axis in self.times.places)
                forward.launches += (_CHUNK[cols > 1] + norm) * self.choices.loss_chunks(choice)
        return forward, backward

    def _lookup(self) -> tuple[Load, Load]:
        """Returns the loads of looking up tokens in a table that may be sharded over a grid."""
        loads, axis = (Load(), Load()), self.times.axis
        common, rows = self.choices["head"].common, max(1, self.choices.rows)
        holds = common or self.choices.holds_weights
        column = self._elements(self.choices["head"]) * (1 if holds else rows) * self.wide
        read = (self.work.tokens + self.work.source) / rows * self.run.model.hidden_size * self.wide
        ops: tuple[Op, Op] = "all_gather", "reduce_scatter"
        for way, (load, op) in enumerate(zip(loads, ops)):
            load.memory = self.costs.moved_s(2 * read + 3 * column * way)
            if not common:
                load.exposed[axis] += self.times.message("reduce_scatter", read, axis).seconds
                if not holds:
                    load.exposed["row"] += self.times.message(op, column, "row").seconds
        return loads

    # ------------------------------------------------------------------ parameters

    def _elements(self, choice: Choice) -> float:
        """Returns the elements on a device of all products of a name."""
        return choice.elements / (1 if choice.common else self.choices.rows * self.choices.cols)

    def _held(self, share: StageShares, common: bool) -> tuple[list[float], float]:
        """Returns the elements of a rank's matrices, common ones or others, and of its table."""
        matrices, table = [0.0], 0.0
        tied = share.head and share.lookups > 0 and self.run.model.tied_head
        for choice in self.choices.products.values():
            product, here = choice.product, share.share_of(choice.product)
            if choice.common == common and product.name == "head" and share.lookups:
                table = self._elements(choice)
            if choice.common != common or not here or (tied and product.name == "head"):
                continue
            for width, _ in product.parts or [(choice.n_out, 0)]:
                one = self._elements(choice) / product.count * width / choice.n_out
                matrices += [one] * round(product.count * here)
        return matrices, table

    def _sent_s(self, op: Op, tensors: Sequence[float], axis: str) -> float:
        """Returns the seconds of sending tensors over replicas: small ones of a layer together."""
        large = Counter(one for one in tensors if one * self.wide >= BUCKET_BYTES)
        small = sum(one for one in tensors if one not in large) * self.wide
        works = [(float(n), one * self.wide) for one, n in large.items()]
        if small:
            n_layers = self.run.model.n_layers // self.layout.pp if len(tensors) > 1 else 1
            joined = max(1, n_layers, -(-small // BUCKET_BYTES))
            works.append((joined, small / joined))
        return sum(n * self.times.message(op, n_bytes, axis).seconds for n, n_bytes in works)
