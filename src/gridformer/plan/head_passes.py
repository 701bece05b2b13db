"""The loads of the embedding, the head and the loss of one micro-batch, by formulas."""

from __future__ import annotations

from gridformer.parallel.auto.cost import Choice
from gridformer.plan.layer_passes import add_norm
from gridformer.plan.load import Load
from gridformer.plan.products import enter_or_leave, product_loads
from gridformer.plan.sizes import Sizes, chunks_of, loss_tokens

# Passes over logits; see `gridformer.plan.layer_passes`.
LOGITS = 8  # in float32: log-softmax and the targets' logits, forward and backward
LOGITS_SHARDED = 13  # the same with the vocabulary over an axis


def head(sizes: Sizes) -> tuple[Load, Load]:
    """Returns the loads of the products outside layers, with the loss, and of the embedding.

    A loss in chunks computes its gradients in the forward pass. Without a head of tokens there is
    only their table.
    """
    forward, backward = Load(), Load()
    of_tokens = sizes.run.model.token_head
    for choice in sizes.choices.products.values():
        if choice.product.section == "head" and (of_tokens or choice.product.name != "head"):
            there, back = product_loads(sizes, choice)
            forward.add(there)
            if choice.product.name == "head" and chunks_of(sizes, choice) > 1:
                forward.add(back)
            else:
                backward.add(back)
    if of_tokens:
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
        enter_or_leave(sizes, forward, "leave", size)
        enter_or_leave(sizes, backward, "enter", size)
        row = sizes.place("row")
        if row.size > 1:
            forward_bytes += 2 * wide * column
            backward_bytes += 2 * wide * column
            forward.message("row", sizes.costs.message_s("all_gather", column * wide, row))
            backward.message("row", sizes.costs.message_s("reduce_scatter", column * wide, row))
    forward.memory += sizes.costs.memory_s(forward_bytes)
    backward.memory += sizes.costs.memory_s(backward_bytes)
    return forward, backward


def _loss(sizes: Sizes, choice: Choice) -> Load:
    """Returns the load of the loss: passes over logits, and messages over the vocabulary's axis."""
    tokens = loss_tokens(sizes, choice)
    width = sizes.run.model.vocab_size
    chunks = chunks_of(sizes, choice)
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
    add_norm(sizes, choice, around, launches)
    total += sum(around) + 4 * sizes.between(choice.product, h) * sizes.itemsize
    load.launches += sum(launches) * chunks
    load.memory = sizes.costs.memory_s(total)
    return load
