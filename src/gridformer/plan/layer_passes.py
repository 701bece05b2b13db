"""The loads of the layers of one micro-batch, by formulas.

Products, their shapes and what travels for them follow from `Choices` and from the scheme's spec.
"""

from __future__ import annotations

from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.pipeline.stage_shares import stack_of, stacks_of
from gridformer.plan.launches import (
    RMS_INSIDE_LAUNCHES,
    RMS_LAUNCHES,
    SHARDED_LAUNCHES,
    WITH_RMS,
    biases_of,
    norms_of,
)
from gridformer.plan.load import Load
from gridformer.plan.products import product_loads
from gridformer.plan.sizes import Sizes

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
ROTARY_LAUNCHES, GATE_LAUNCHES = (6, 10), (2, 5)
NORM = (2, 3)  # in float32: reads and writes; backward it reads one more
RMS_NORM = (7, 17.5)  # the same of an RMSNorm, which is made of many kernels
NORM_INSIDE = 5  # backward of a norm inside a product, which normalizes again
RMS_NORM_INSIDE = (7, 23)


def layers(sizes: Sizes) -> dict[str, tuple[Load, Load]]:
    """Returns the forward and the backward load of all layers of each stack of the model."""
    found = {stack: (Load(), Load()) for stack in stacks_of(sizes.run)}
    recompute = sizes.run.train.recompute
    for choice in sizes.choices.products.values():
        product = choice.product
        if product.section == "head":
            continue
        forward, backward = found[stack_of(product)]
        there, back = product_loads(sizes, choice)
        around, back_around = _around(sizes, choice)
        for load, parts in ((forward, (there, around)), (backward, (back, back_around))):
            for part in parts:
                load.add(part, product.count)
        if recompute == "full":
            if not product.ends_block:
                backward.add(there, product.count)
            backward.add(around, product.count)
    for stack, there, back in _attention(sizes):
        forward, backward = found[stack]
        forward.add(there)
        backward.add(back)
        if recompute != "none":
            backward.add(there)
    return found


def _around(sizes: Sizes, choice: Choice) -> tuple[Load, Load]:
    """Returns the loads of the memory-bound kernels around a product of a layer."""
    product, choices, model = choice.product, sizes.choices, sizes.run.model
    h, item = model.hidden_size, sizes.itemsize
    n_bytes, launches = [0.0, 0.0], [0.0, 0.0]
    sharded = not choice.common and choices.rows * choices.cols > 1
    norms = norms_of(sizes, product)

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
        if norms:
            add_norm(sizes, choice, n_bytes, launches)
            launches[1] += norms * sizes.accumulated
        if product.section == "feed_forward":
            kernel(GATE if product.parts else ACTIVATION, out)
            if product.parts:
                launches = [n + more - 1 for n, more in zip(launches, GATE_LAUNCHES)]
        elif product.parts:
            kernel((0, GRADIENT_OF_PARTS), out)
            n, m = model.n_heads, model.kv_heads
            heads = out * (n + m) / (n + 2 * m)  # of queries and keys
            kernel(ROTARY, heads)
            launches = [n + more - 1 for n, more in zip(launches, ROTARY_LAUNCHES)]
            if model.qk_norm:
                for i in range(2):
                    n_bytes[i] += heads * (RMS_NORM[i] * sizes.wide + 2 * sizes.cast)
                    launches[i] += 2 * (RMS_LAUNCHES[i] + 2 * (sizes.cast > 0))
                launches[1] += 2 * sizes.accumulated
        elif not choice.common:
            kernel((0, GRADIENT_OF_HEADS), out)
            if model.family == "t5":  # gradients of the bias of scores, and of what kv reads
                launches[1] += product.name != "decoder.q"
    if biases_of(sizes, product):
        kernel((BIAS[0] * sharded, BIAS[1]), out)
    found = [Load(memory=sizes.costs.memory_s(n), launches=k) for n, k in zip(n_bytes, launches)]
    return found[0], found[1]


def add_norm(sizes: Sizes, choice: Choice, n_bytes: list[float], launches: list[float]) -> None:
    """Adds the norm before a product that opens a section.

    Args:
        sizes: Sizes of a micro-batch on one device.
        choice: The product.
        n_bytes: Bytes that kernels move in the forward and in the backward pass, to which those of
            the norm are added.
        launches: Launches of both passes, to which those of the norm are added.
    """
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
    kernels = RMS_LAUNCHES if rms else SHARDED_LAUNCHES if sizes.lies == "h" else (1, 1)
    for i in range(2):
        n_bytes[i] += between * (passes[i] * wide + 2 * cast)
        launches[i] += kernels[i] + casts


def _out_elements(sizes: Sizes, choice: Choice) -> float:
    product = choice.product
    if choice.common:
        return sizes.between(product, product.n_out)
    return sizes.tokens(product) * choice.n_out / sizes.choices.cols


def _attention(sizes: Sizes) -> list[tuple[str, Load, Load]]:
    """Returns the stack and the loads of each kind of attention, apart from its products."""
    run, choices = sizes.run, sizes.choices
    model, work = run.model, choices.work
    batch = max(1, work.sequences // choices.rows)
    heads = max(1, model.n_heads // choices.cols)
    s, source, d = run.seq_len, run.source_len, model.head_width
    # The kernel is gridformer's where it drops out, or adds a bias or a mask that is not causal.
    window = model.window if model.window < s else 0
    masked, causal = run.data.document_mask or window > 0, model.family in ("gpt2", "llama")
    own, t5 = model.attention_dropout > 0 or masked, model.family == "t5"
    if window and sizes.costs.cluster.device.kind == "cpu":  # there the mask of a window is added
        causal = False
    kinds = [("", model.n_layers, s, s, max(1, window) if causal else 0, own)]
    if model.two_stacks:
        kinds = [
            ("encoder", model.n_layers, source, source, 0, True),
            ("decoder", model.n_decoder_layers, s, s, 1, own or t5),
            ("decoder", model.n_decoder_layers, s, source, 0, own or not t5),
        ]
    found = []
    for stack, n, queries, keys, hides, is_own in kinds:
        shape = (batch, heads, queries, keys, d, hides)
        one, back = (
            sizes.costs.attention_s(shape, sizes.dtype, sizes.itemsize, passes, is_own)
            for passes in (1, 2)
        )
        there = Load(attention=n * one, launches=n)
        found.append((stack, there, Load(attention=n * back, launches=2 * n)))
    return found
