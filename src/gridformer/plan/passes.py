"""The loads of layers, embedding and head of one micro-batch, by formulas.

Products, their shapes and what travels for them follow from `Choices` and from the scheme's spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gridformer.config import RunConfig
from gridformer.parallel.auto.cost import Choice, Choices, Product
from gridformer.parallel.scheme import SchemeSpec
from gridformer.plan.load import Costs, Load, Place

# Passes over an activation by memory-bound kernels, forward and backward. A kernel that reads two
# tensors and writes one makes three. They are those that the record of the real code shows, which
# tests/plan/test_analytic.py compares.
RESIDUAL = (3, 3)  # the sum of two tensors, and of two gradients
ACTIVATION = (2, 3)
GATE = (2.5, 7.5)  # of both halves: SiLU and product, whose gradients are joined
DROPOUT = (2, 2)
BIAS = (2, 1)  # added in place where a product is sharded; backward a sum over tokens
GRADIENT_OF_HEADS = 4  # of queries, keys and values: stacked, then copied to their order
GRADIENT_OF_PARTS = 2  # the same of a joined product
ROTARY = (7, 9)  # of queries and keys
ROTARY_LAUNCHES = 6
NORM = (2, 3)  # in float32: reads and writes; backward it reads one more
RMS_NORM = (7, 17.5)  # the same of an RMSNorm, which is made of many kernels
RMS_LAUNCHES = (6, 9)
NORM_INSIDE = 5  # backward of a norm inside a product, which normalizes again
RMS_NORM_INSIDE = (7, 23)
RMS_INSIDE_LAUNCHES = (6, 21)
LOGITS = 8  # in float32: log-softmax and the targets' logits, forward and backward
LOGITS_SHARDED = 13  # the same with the vocabulary over an axis
WITH_RMS = ("t5", "llama")  # whose norms are RMSNorms
ALONE = Place((0,))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a micro-batch on one device.

    Attributes:
        run: The run.
        choices: Its choices.
        spec: The spec of its scheme.
        costs: Seconds of kernels and messages.
        places: Where the axes lie; those of one device are left out.
        dtype: The type of products, which may be tf32.
    """

    run: RunConfig
    choices: Choices
    spec: SchemeSpec
    costs: Costs
    places: Mapping[str, Place]
    dtype: str

    @property
    def itemsize(self) -> int:
        return self.choices.work.itemsize

    def place(self, axis: str) -> Place:
        return self.places.get(axis, ALONE)

    @cached_property
    def activation_axis(self) -> str:
        """The axis over which sections are entered and left."""
        return self.spec.boundary(self.run.layout).axis

    @cached_property
    def lies(self) -> str:
        """How activations lie between sections, see `BoundarySpec`."""
        return self.spec.boundary(self.run.layout).lies

    def tokens(self, product: Product) -> int:
        """Returns the rows of a product's input on one row of devices."""
        return max(1, self.choices.work.rows_of(product) // self.choices.rows)

    def between(self, product: Product, width: int) -> float:
        """Returns the elements of an activation of that width between sections on a device."""
        share = self.choices.cols if self.choices.between == "cut" else 1
        return self.tokens(product) * width / share

    def memory_s(self, elements: float) -> float:
        return self.costs.memory_s(elements * self.itemsize)

    @property
    def wide(self) -> int:
        """Bytes of an element of norms, losses and parameters."""
        return max(4, self.itemsize)

    @property
    def cast(self) -> int:
        """Bytes that casting an element between the types of products and of norms moves."""
        return self.itemsize + self.wide if self.itemsize < self.wide else 0


def layers(sizes: Sizes) -> tuple[Load, Load]:
    """Returns the forward and the backward load of all layers of the model."""
    forward, backward, again = Load(), Load(), Load()
    recompute = sizes.run.train.recompute
    for choice in sizes.choices.products.values():
        product = choice.product
        if product.section == "head":
            continue
        there, back = _product(sizes, choice)
        around, back_around = _around(sizes, choice)
        for load, parts in ((forward, (there, around)), (backward, (back, back_around))):
            for part in parts:
                load.add(part, product.count)
        if recompute == "full":
            if not product.ends_block:
                again.add(there, product.count)
            again.add(around, product.count)
    for there, back in _attention(sizes):
        forward.add(there)
        backward.add(back)
        if recompute != "none":
            again.add(there)
    backward.add(again)
    return forward, backward


def head(sizes: Sizes) -> tuple[Load, Load]:
    """Returns the loads of the products outside layers, with the loss, and of the embedding.

    A loss in chunks computes its gradients in the forward pass.
    """
    forward, backward = Load(), Load()
    for choice in sizes.choices.products.values():
        if choice.product.section == "head":
            there, back = _product(sizes, choice)
            forward.add(there)
            if choice.product.name == "head" and _chunks(sizes, choice) > 1:
                forward.add(back)
            else:
                backward.add(back)
    forward.add(_loss(sizes, sizes.choices["head"]))
    return forward, backward


def embedding(sizes: Sizes) -> tuple[Load, Load]:
    """Returns the loads of looking up the tokens of a micro-batch."""
    choices, h, wide = sizes.choices, sizes.run.model.hidden_size, sizes.wide
    table = choices["head"]
    rows = sizes.tokens(table.product) if not table.common else sizes.between(table.product, 1)
    width, between = rows * h, sizes.between(table.product, h)
    column = sizes.run.model.vocab_size * h / (1 if table.common else choices.cols)
    forward, backward = Load(launches=5), Load(launches=6)
    # Looks up, adds positions, casts; backward adds up rows, and the gradient of the tied head.
    forward_bytes = 2 * wide * width + 2 * wide * between + sizes.cast * between
    backward_bytes = (4 * wide + wide) * column / (1 if table.common else choices.rows)
    backward_bytes += wide * width + sizes.cast * between
    if not table.common:
        forward_bytes += 2 * wide * width
        backward_bytes += 2 * wide * width + 2 * wide * column
        size = width * wide
        _enter_or_leave(sizes, forward, "leave", size)
        _enter_or_leave(sizes, backward, "enter", size)
        row = sizes.place("row")
        if row.size > 1:
            forward_bytes += 2 * wide * column
            backward_bytes += 2 * wide * column
            forward.message("row", sizes.costs.message_s("all_gather", column * wide, row))
            backward.message("row", sizes.costs.message_s("reduce_scatter", column * wide, row))
    forward.memory += sizes.costs.memory_s(forward_bytes)
    backward.memory += sizes.costs.memory_s(backward_bytes)
    return forward, backward


# --------------------------------------------------------------------------- products


def _product(sizes: Sizes, choice: Choice) -> tuple[Load, Load]:
    """Returns the forward and backward load of one product with its messages."""
    product, choices, costs = choice.product, sizes.choices, sizes.costs
    r, c, item, dtype = choices.rows, choices.cols, sizes.itemsize, sizes.dtype
    forward, backward = Load(), Load()
    tokens = sizes.tokens(product)
    n_in, n_out = product.n_in, choice.n_out
    if choice.common:
        tokens = max(1, round(sizes.between(product, 1)))
    elif choice.stays == "output":
        n_out = max(1, n_out // c)
    else:
        n_in = max(1, n_in // c)
    chunks = max(choice.n_chunks, _chunks(sizes, choice))
    panels = 1 if choice.schedule == "gather" else r + c - math.gcd(r, c)
    m, k = max(1, tokens // chunks), max(1, n_in // panels)
    steps = chunks * panels
    one = costs.product_s(1, m, n_out, k, dtype, item) * steps
    grad_x = costs.product_s(1, m, k, n_out, dtype, item) * steps
    grad_w = costs.product_s(1, k, n_out, m, dtype, item) * steps
    blocks = 1 if choice.common or chunks > choice.n_chunks or panels > 1 else r
    if blocks > 1:  # the gradient of a gathered weight is multiplied block by block, and summed
        shape = (k // r, n_out) if choice.stays == "output" else (n_out // r, k)
        grad_w = blocks * chunks * costs.product_s(1, max(1, shape[0]), shape[1], m, dtype, item)
    forward.products, forward.launches = one, steps
    backward.products, backward.launches = grad_x + grad_w, (1 + blocks) * steps
    weight = n_in * n_out
    _weights(sizes, choice, weight, chunks, backward)
    if choice.common:
        return forward, backward
    width = product.n_in if choice.stays == "output" else choice.n_out
    size = tokens * width * item / chunks
    if choice.schedule != "gather":
        return _panels(sizes, choice, forward, backward, steps)
    # Chunks of an activation travel while those before them multiply.
    ahead = 1 - 1 / choice.n_chunks
    if choice.stays == "output":
        _enter_or_leave(sizes, forward, "enter", size, one * ahead, chunks)
        if not choice.keep_input and choices.between != "replicated":
            _enter_or_leave(sizes, backward, "enter", size, grad_x, chunks)
        _enter_or_leave(sizes, backward, "leave", size, grad_w, chunks)
    else:
        _enter_or_leave(sizes, forward, "leave", size, one * ahead, chunks)
        _enter_or_leave(sizes, backward, "enter", size, (grad_x + grad_w) * ahead, chunks)
    row = sizes.place("row")
    if row.size > 1:
        gather = costs.message_s("all_gather", weight * item, row)
        scatter = costs.message_s("reduce_scatter", weight * item, row)
        # A weight is gathered while the previous product multiplies and its messages travel; the
        # table of a loss in chunks before the first of them.
        alone = product.name == "head" and chunks > choice.n_chunks
        m_all = choices.work.micro_batches
        behind = 0.0 if alone else forward.device_s
        forward.message("row", gather / (m_all if choice.keep_weight else 1), behind)
        if not choice.keep_weight and not alone:
            backward.message("row", gather, backward.device_s / 2)
        backward.message("row", scatter, 0.0 if alone else grad_x)
    return forward, backward


def _panels(
    sizes: Sizes, choice: Choice, forward: Load, backward: Load, steps: int
) -> tuple[Load, Load]:
    """Adds the messages of schedules that send operands panel by panel."""
    choices, item = sizes.choices, sizes.itemsize
    hides = choice.schedule == "pipelined"
    for load, traffic in (
        (forward, choices.forward(choice)),
        (backward, choices.backward(choice)),
    ):
        times = 1 if load is forward else 2
        for axis, elements, share in (
            (sizes.activation_axis, traffic.col, choices.cols),
            ("row", traffic.row, choices.rows),
        ):
            if share == 1:
                continue
            # `Traffic` counts what one device receives, which is this share of what is sent.
            panel = elements * item * share / (share - 1) / (steps * times)
            one = sizes.costs.message_s("broadcast", panel, sizes.place(axis))
            behind = load.products * hides * (1 - 1 / max(2, steps))
            load.message(axis, one * steps * times, behind, steps * times)
    return forward, backward


def _enter_or_leave(
    sizes: Sizes,
    load: Load,
    way: Literal["enter", "leave"],
    n_bytes: float,
    behind: float = 0.0,
    times: int = 1,
) -> None:
    """Adds the messages with which activations enter or leave a section.

    Args:
        sizes: The sizes.
        load: To which it is added.
        way: Whether it gathers activations, or sums them.
        n_bytes: Bytes of the gathered activation.
        behind: Seconds of computation that hide all of them.
        times: How many there are.
    """
    axis = sizes.activation_axis
    place = sizes.place(axis)
    if place.size == 1:
        return
    match sizes.choices.between, way:
        case "replicated", "enter":
            return
        case "replicated", "leave":
            seconds = sizes.costs.message_s("all_reduce", n_bytes, place)
        case "first", "enter":
            seconds = sizes.costs.message_s("broadcast", n_bytes, place)
        case "first", _:
            seconds = sizes.costs.message_s("reduce", n_bytes, place)
        case _, "enter":
            seconds = sizes.costs.message_s("all_gather", n_bytes, place)
        case _:
            seconds = sizes.costs.message_s("reduce_scatter", n_bytes, place)
    load.message(axis, seconds * times, behind, times)
    if sizes.lies in ("s", "h"):
        # Blocks along these dimensions are not contiguous in the message, so they are copied.
        load.memory += sizes.costs.memory_s(2 * n_bytes * times)
        load.launches += times


def _weights(sizes: Sizes, choice: Choice, weight: float, chunks: int, backward: Load) -> None:
    """Adds the memory-bound kernels on a weight's gradient: casts and accumulation.

    Args:
        sizes: The sizes.
        choice: How the product is carried out.
        weight: Elements of the gathered weight.
        chunks: Chunks of the loss, if it is the head.
        backward: To which they are added.
    """
    work, wide = sizes.choices.work, sizes.wide
    rows = 1 if choice.common else sizes.choices.rows
    own = weight / rows
    accumulated = (work.micro_batches - 1) / work.micro_batches
    if choice.product.name == "head" and chunks > choice.n_chunks:
        # Gradients of chunks are added up in float32 and scaled; with rows in the gathered table.
        each = sizes.cast + 3 * wide if rows == 1 else 2 * wide + sizes.itemsize
        n_bytes = weight * (chunks * each + 4 * wide)
        n_bytes += weight * (sizes.cast + 2 * sizes.itemsize) * (rows > 1)
        backward.launches += 3 * chunks + 4
    else:
        n_bytes = own * sizes.cast
        backward.launches += 2 * (sizes.cast > 0)
    if choice.n_chunks > 1:  # in float32, chunk by chunk
        n_bytes += weight * choice.n_chunks * (2 * wide + sizes.itemsize)
        backward.launches += 2 * choice.n_chunks
    if choice.product.name != "head":
        n_bytes += own * 3 * wide * accumulated
        backward.launches += 2 * accumulated
    if rows > 1:  # blocks of the sum are stacked
        n_bytes += weight * 2 * sizes.itemsize
        backward.launches += 1
    backward.memory += sizes.costs.memory_s(n_bytes)


# --------------------------------------------------------------------------- what is around them


def _around(sizes: Sizes, choice: Choice) -> tuple[Load, Load]:
    """Returns the loads of the memory-bound kernels around a product of a layer."""
    product, choices, model = choice.product, sizes.choices, sizes.run.model
    h, item = model.hidden_size, sizes.itemsize
    n_bytes, launches = [0.0, 0.0], [0.0, 0.0]
    sharded = not choice.common and choices.rows * choices.cols > 1

    def kernel(passes: tuple[float, float], elements: float) -> None:
        for i in range(2):
            n_bytes[i] += passes[i] * elements * item
            launches[i] += passes[i] > 0

    out, between = _out_elements(sizes, choice), sizes.between(product, h)
    if product.closes:
        out = between
        kernel(RESIDUAL, between)
        if model.dropout:
            kernel(DROPOUT, between)
    else:
        _norm(sizes, choice, n_bytes, launches)
        if product.section == "feed_forward":
            kernel(GATE if product.parts else ACTIVATION, out)
        elif product.parts:
            kernel((0, GRADIENT_OF_PARTS), out)
            n, m = model.n_heads, model.kv_heads
            kernel(ROTARY, out * (n + m) / (n + 2 * m))
            launches = [number + ROTARY_LAUNCHES - 1 for number in launches]
        elif not choice.common:
            kernel((0, GRADIENT_OF_HEADS), out)
    if model.family not in WITH_RMS or (model.qkv_bias and product.name == "qkv"):
        kernel((BIAS[0] * sharded, BIAS[1]), out)
    found = [Load(memory=sizes.costs.memory_s(n), launches=k) for n, k in zip(n_bytes, launches)]
    return found[0], found[1]


def _norm(sizes: Sizes, choice: Choice, n_bytes: list[float], launches: list[float]) -> None:
    """Adds the norm before a product that opens a section."""
    product, h = choice.product, sizes.run.model.hidden_size
    wide, cast = sizes.wide, sizes.cast
    casts = 2 if cast else 0
    rms = sizes.run.model.family in WITH_RMS
    if choice.norm_inside and sizes.lies == "h":  # whole vectors exist only when gathered
        whole = sizes.tokens(product) * h
        inside = RMS_NORM_INSIDE if rms else (NORM[0], NORM_INSIDE)
        kernels = RMS_INSIDE_LAUNCHES if rms else (1, 2)
        n_bytes[0] += whole * (inside[0] * wide + 2 * cast)
        n_bytes[1] += whole * (inside[1] * wide + 5 * cast)
        launches[0] += kernels[0] + casts
        launches[1] += kernels[1] + 5 * (casts > 0)
        return
    between, passes = sizes.between(product, h), RMS_NORM if rms else NORM
    for i in range(2):
        n_bytes[i] += between * (passes[i] * wide + 2 * cast)
        launches[i] += (RMS_LAUNCHES[i] if rms else 1) + casts


def _out_elements(sizes: Sizes, choice: Choice) -> float:
    product = choice.product
    if choice.common:
        return sizes.between(product, product.n_out)
    return sizes.tokens(product) * choice.n_out / sizes.choices.cols


def _attention(sizes: Sizes) -> list[tuple[Load, Load]]:
    """Returns the loads of the attention of all layers, apart from its products."""
    run, choices = sizes.run, sizes.choices
    model, work = run.model, choices.work
    batch = max(1, work.sequences // choices.rows)
    heads = max(1, model.n_heads // choices.cols)
    s, source, d = run.seq_len, run.source_len, model.head_width
    kinds = [(model.n_layers, s, s, model.family in ("gpt2", "llama"))]
    if model.two_stacks:
        kinds = [
            (model.n_layers, source, source, False),
            (model.n_decoder_layers, s, s, True),
            (model.n_decoder_layers, s, source, False),
        ]
    found = []
    for n, queries, keys, causal in kinds:
        shape = (batch, heads, queries, keys, d, int(causal))
        one = sizes.costs.attention_s(shape, sizes.dtype, sizes.itemsize, 1)
        back = sizes.costs.attention_s(shape, sizes.dtype, sizes.itemsize, 2)
        found.append(
            (Load(attention=n * one, launches=n), Load(attention=n * back, launches=2 * n))
        )
    return found


def _loss(sizes: Sizes, choice: Choice) -> Load:
    """Returns the load of the loss: passes over logits, and messages over the vocabulary's axis."""
    tokens = _loss_tokens(sizes, choice)
    width = sizes.run.model.vocab_size
    chunks = _chunks(sizes, choice)
    h = sizes.run.model.hidden_size
    sharded = not choice.common and sizes.choices.rows * sizes.choices.cols > 1
    each = LOGITS * sizes.wide + 2 * sizes.cast
    load = Load(launches=15 * chunks)
    if sharded:
        each = LOGITS_SHARDED * sizes.wide + 2 * (sizes.cast or sizes.wide)  # copied if not cast
        width = max(1, width // sizes.choices.cols)
        axis = sizes.activation_axis
        one = sizes.costs.message_s("all_reduce", tokens / chunks * sizes.wide, sizes.place(axis))
        load.message(axis, 3 * chunks * one, 0.0, 3 * chunks)
        load.launches += 20 * chunks
    total = tokens * width * each
    # The last norm, forward and backward, and the gradient of the hidden states.
    around, launches = [0.0, 0.0], [0.0, 0.0]
    _norm(sizes, choice, around, launches)
    total += sum(around) + 4 * sizes.between(choice.product, h) * sizes.itemsize
    load.launches += sum(launches) * chunks
    load.memory = sizes.costs.memory_s(total)
    return load


def _loss_tokens(sizes: Sizes, choice: Choice) -> float:
    return sizes.between(choice.product, 1) if choice.common else sizes.tokens(choice.product)


def _chunks(sizes: Sizes, choice: Choice) -> int:
    """Returns in how many chunks the head computes logits; 1 for all other products."""
    at_a_time = sizes.choices.work.loss_chunk_tokens
    if choice.product.name != "head" or not at_a_time:
        return 1
    return max(1, math.ceil(_loss_tokens(sizes, choice) / at_a_time))
