"""The loads of the embedding, the head and the loss of one micro-batch, by formulas."""

from __future__ import annotations

from gridformer.parallel.auto.cost import Choice
from gridformer.plan import launches as counts
from gridformer.plan.layer_passes import add_norm
from gridformer.plan.load import Load
from gridformer.plan.products import enter_or_leave, product_loads
from gridformer.plan.sizes import Sizes

# Passes over logits; see `gridformer.plan.layer_passes`.
LOGITS = 6  # in float32: log-softmax and the targets' logits, forward and backward
SMOOTHED = 3  # more of them with label smoothing
LOGITS_SHARDED = 10  # the same with the vocabulary over an axis


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
            _count_around(sizes, choice, there, back)
            forward.add(there)
            if choice.product.name == "head" and sizes.choices.loss_chunks(choice) > 1:
                forward.add(back)
            else:
                backward.add(back)
    if of_tokens:
        forward.add(_loss(sizes, sizes.choices["head"]))
    elif not any(one.product.reads == "sequences" for one in sizes.choices.products.values()):
        forward.launches += counts.LAST_TOKEN[0]
        backward.launches += counts.LAST_TOKEN[1]
    return forward, backward


def _count_around(sizes: Sizes, choice: Choice, there: Load, back: Load) -> None:
    """Counts the launches around a product of a branch, or of the transform before the head."""
    product = choice.product
    if product.name == "head":
        return
    if product.reads == "sequences":
        sharded = not choice.common and sizes.choices.rows * sizes.choices.cols > 1
        there.launches += counts.LABELS[0] + counts.LABELS_SHARDED[0] * sharded
        back.launches += counts.LABELS[1] + counts.LABELS_SHARDED[1] * sharded
        return
    # It is part of each chunk of the loss.
    chunks = sizes.choices.loss_chunks(sizes.choices["head"])
    there.launches = there.launches * chunks + counts.TRANSFORM[0] * chunks
    back.launches = back.launches * chunks + counts.TRANSFORM[1] * chunks


def embedding(sizes: Sizes) -> tuple[Load, Load]:
    """Returns the loads of looking up the tokens of a micro-batch."""
    choices, h, wide = sizes.choices, sizes.run.model.hidden_size, sizes.wide
    table = choices["head"]
    rows = sizes.tokens(table.product) if not table.common else sizes.between(table.product, 1)
    width, between = rows * h, sizes.between(table.product, h)
    column = sizes.run.model.vocab_size * h / (1 if table.common else choices.cols)
    forward, backward = _lookup_launches(sizes, table)
    # Looks up, adds positions, casts; backward adds up rows in a new gradient, and adds that to the
    # tied head's and to those of earlier micro-batches.
    forward_bytes = 2 * wide * width + 2 * wide * between + sizes.cast * between
    passes = 1 + 3 * sizes.joins_head + 3 * sizes.accumulated
    backward_bytes = passes * wide * column / (1 if table.common else choices.rows)
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


def _lookup_launches(sizes: Sizes, table: Choice) -> tuple[Load, Load]:
    """Returns loads with the launches of looking tokens up, without messages."""
    model, rows, cols = sizes.run.model, sizes.choices.rows, sizes.choices.cols
    sharded, by_rows = not table.common and rows * cols > 1, not table.common and rows > 1
    found = []
    for i in range(2):
        one = (
            counts.LOOKUP[i] + counts.LOOKUP_SHARDED[i] * sharded + counts.LOOKUP_ROWS[i] * by_rows
        )
        several = (1 + model.two_stacks) * one
        found.append(Load(launches=several + counts.POSITIONS[model.family][i]))
    return found[0], found[1]


def _loss(sizes: Sizes, choice: Choice) -> Load:
    """Returns the load of the loss: passes over logits, and messages over the vocabulary's axis."""
    tokens = sizes.choices.head_tokens(choice)
    width = sizes.run.model.vocab_size
    chunks = sizes.choices.loss_chunks(choice)
    h = sizes.run.model.hidden_size
    sharded = not choice.common and sizes.choices.rows * sizes.choices.cols > 1
    each = LOGITS * sizes.wide + 2 * sizes.cast
    load = Load(launches=counts.chunk(sizes, choice, sharded) * chunks)
    if sharded:
        each = LOGITS_SHARDED * sizes.wide + 2 * (sizes.cast or sizes.wide)  # copied if not cast
        width = max(1, width // sizes.choices.cols)
        axis = sizes.activation_axis
        for numbers in (1, 2):
            n_bytes = numbers * tokens / chunks * sizes.wide
            one = sizes.costs.message_s("all_reduce", n_bytes, sizes.place(axis))
            load.message(axis, chunks * one, 0.0, chunks)
    each += SMOOTHED * sizes.wide * (sizes.run.model.label_smoothing > 0)
    total = tokens * width * (each + counts.biases_of(sizes, choice.product) * sizes.itemsize)
    # The last norm, forward and backward, and the gradient of the hidden states.
    around, launches = [0.0, 0.0], [0.0, 0.0]
    if counts.head_norm(sizes):
        add_norm(sizes, choice, around, launches)
    total += sum(around) + 4 * sizes.between(choice.product, h) * sizes.itemsize
    load.launches += sum(launches) * chunks
    load.memory = sizes.costs.memory_s(total)
    return load
