"""The loads of products with their messages, and of the kernels on gradients of weights."""

from __future__ import annotations

from typing import Literal

from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.auto.formulas import boundary_op, cut_widths, traveling_width
from gridformer.plan.launches import biases_of
from gridformer.plan.load import Load
from gridformer.plan.sizes import Sizes


def product_loads(sizes: Sizes, choice: Choice) -> tuple[Load, Load]:
    """Returns the forward and backward load of one product with its messages."""
    product, choices, costs = choice.product, sizes.choices, sizes.costs
    r, item, dtype = choices.rows, sizes.itemsize, sizes.dtype
    forward, backward = Load(), Load()
    tokens = sizes.tokens(product)
    n_in, n_out = cut_widths(choice, 1 if choice.common else choices.cols)
    if choice.common:
        tokens = max(1, round(sizes.between(product, 1)))
    chunks = max(choice.n_chunks, sizes.choices.loss_chunks(choice))
    panels = 1 if choice.schedule == "gather" else choices.panels
    m, k = max(1, tokens // chunks), max(1, n_in // panels)
    steps = chunks * panels
    one = costs.product_s(1, m, n_out, k, dtype, item) * steps
    grad_x = costs.product_s(1, m, k, n_out, dtype, item) * steps
    more = round(_wide_bytes(sizes, choice, k * n_out, chunks))
    grad_w = costs.product_s(1, k, n_out, m, dtype, item, more) * steps
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
    size = tokens * traveling_width(choice) * item / chunks
    if choice.schedule != "gather":
        return _panels(sizes, choice, forward, backward, steps)
    # Chunks of an activation travel while those before them multiply.
    ahead = 1 - 1 / choice.n_chunks
    if choice.stays == "output":
        enter_or_leave(sizes, forward, "enter", size, one * ahead, chunks)
        if not choice.keep_input and choices.between != "replicated":
            enter_or_leave(sizes, backward, "enter", size, grad_x, chunks)
        enter_or_leave(sizes, backward, "leave", size, grad_w, chunks)
    else:
        enter_or_leave(sizes, forward, "leave", size, one * ahead, chunks)
        enter_or_leave(sizes, backward, "enter", size, (grad_x + grad_w) * ahead, chunks)
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


def enter_or_leave(
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
    op = boundary_op(sizes.choices.between, way)
    if op is None:
        return
    seconds = sizes.costs.message_s(op, n_bytes, place)
    load.message(axis, seconds * times, behind, times)
    sequences = sizes.choices.work.sequences // max(1, sizes.choices.rows)
    if sizes.lies == "h" or (sizes.lies == "s" and sequences > 1):
        # Blocks along these dimensions are not contiguous in the message, so they are copied; but
        # for those of a single sequence along s.
        load.memory += sizes.costs.memory_s(2 * n_bytes * times)
        load.launches += times
    if times > 1 and sizes.choices.between != "replicated":
        # What leaves in chunks is copied to where it lies, and so are chunks of rows that enter.
        copies = times * ((way == "leave") + 2 * (way == "enter" and sizes.lies == "b"))
        load.memory += sizes.costs.memory_s(2 * n_bytes * copies)
        load.launches += copies


def _how_added(sizes: Sizes, choice: Choice) -> Literal["product", "sum", "autograd"]:
    """Returns what adds a weight's gradient to that of earlier micro-batches.

    See `gridformer.models.blocks.gradient_sum`: the product itself, or the sum that its result goes
    to, which casts it on the way. Autograd adds what comes out of a loss, and gradients of products
    in the type of the weight on one device.
    """
    product = choice.product
    if product.section == "head" and product.reads != "sequences":
        return "autograd"
    if choice.common or sizes.choices.rows * sizes.choices.cols == 1:
        if not sizes.cast:
            return "autograd"
        return "sum" if len(product.parts) > 1 else "product"
    whole = choice.schedule == "gather" and sizes.choices.rows == 1
    return "product" if whole and len(product.parts) <= 1 else "sum"


def _writes_wide(sizes: Sizes, choice: Choice) -> bool:
    """Whether a product writes a weight's gradient in float32, from operands of another type."""
    product = choice.product
    if product.section == "head" and product.reads != "sequences":  # chunks of the loss add to it
        alone = choice.common or sizes.choices.rows * sizes.choices.cols == 1
        return alone and sizes.cast > 0
    return _how_added(sizes, choice) == "product" and sizes.cast > 0


def _wide_bytes(sizes: Sizes, choice: Choice, elements: int, chunks: int) -> float:
    """Returns the bytes that such a product reads and writes more than others.

    Args:
        sizes: The sizes.
        choice: How the product is carried out.
        elements: Elements of the gradient.
        chunks: In how many chunks the product is carried out.
    """
    found = 0.0
    if _writes_wide(sizes, choice):
        found += elements * (sizes.wide - sizes.itemsize)
    if _how_added(sizes, choice) == "product":
        found += elements * sizes.wide * (chunks - 1 + sizes.accumulated) / chunks
    elif _writes_wide(sizes, choice) and chunks > 1:
        found += elements * sizes.wide
    return found


def added_bytes(sizes: Sizes, choice: Choice, weight: float) -> float:
    """Returns the bytes of adding a weight's gradient, besides its product, if there is one to add.

    Args:
        sizes: The sizes.
        choice: How the product is carried out.
        weight: Elements of the weight on this device.
    """
    match _how_added(sizes, choice):
        case "product":
            return 0.0
        case "sum" if sizes.cast:  # cast where it is added
            return weight * sizes.wide
    return weight * 3 * sizes.wide


def _weights(sizes: Sizes, choice: Choice, weight: float, chunks: int, backward: Load) -> None:
    """Adds the memory-bound kernels on a weight's gradient: casts and accumulation.

    Args:
        sizes: The sizes.
        choice: How the product is carried out.
        weight: Elements of the gathered weight.
        chunks: Chunks of the loss, if it is the head.
        backward: To which they are added.
    """
    wide, product = sizes.wide, choice.product
    rows = 1 if choice.common else sizes.choices.rows
    own, biases = weight / rows, biases_of(sizes, product)
    how, n_bytes = _how_added(sizes, choice), 0.0
    if product.name == "head" and chunks > choice.n_chunks:
        # Gradients of chunks are added up in float32 and scaled; with rows in the gathered table.
        each = sizes.cast + 3 * wide if rows == 1 else 2 * wide + sizes.itemsize
        alone = _writes_wide(sizes, choice)
        n_bytes += weight * (chunks * each * (not alone) + 2 * wide)
        n_bytes += weight * (sizes.cast + 2 * sizes.itemsize) * (rows > 1)
        backward.launches += (0 if alone else 1 if rows > 1 else 2) * chunks + 4
    elif not _writes_wide(sizes, choice):
        n_bytes += own * sizes.cast
        backward.launches += max(1, len(product.parts)) * (sizes.cast > 0)
    backward.launches += biases * (sizes.cast > 0)
    if choice.n_chunks > 1 and how != "product":  # in float32, chunk by chunk
        n_bytes += weight * choice.n_chunks * (2 * wide + sizes.itemsize)
        backward.launches += 2 * (choice.n_chunks - 1)
    if product.name != "head" or not sizes.joins_head:
        n_bytes += added_bytes(sizes, choice, own) * sizes.accumulated
    if product.name != "head":
        own_kernel = how == "autograd" or (how == "sum" and not sizes.cast)
        adds = max(1, len(product.parts)) * own_kernel + biases
        backward.launches += adds * sizes.accumulated
    if rows > 1:  # blocks of the sum are stacked
        n_bytes += weight * 2 * sizes.itemsize
        backward.launches += 1
    backward.memory += sizes.costs.memory_s(n_bytes)
