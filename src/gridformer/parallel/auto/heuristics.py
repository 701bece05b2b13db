"""Turns the `auto` settings of a layout into choices for each product.

The rules compare numbers: elements that travel and bytes that a device holds, from
gridformer.parallel.auto.cost. Each rule starts from the choices of the rules before it and adds a
sentence to `Choices.reasons`. With a cluster in the layout gridformer.parallel.auto.fastest then
compares seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from gridformer.cluster.file import load_cluster
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.fastest import (
    MEMORY_SHARE,
    MOST_CHUNKS,
    SMALL_BYTES,
    fastest_choices,
    max_chunks,
)
from gridformer.parallel.auto.products import EXPERTS, Work, blocks_of, keys_chunks, products_of
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import expert_axes
from gridformer.utils.units import GIB, format_bytes

# Activations are gathered in chunks of about this share of what a device holds, or of this size if
# that is larger. While one chunk is multiplied, three to six others exist that travel, are
# normalized or are summed.
CHUNK_SHARE = 1 / 256
CHUNK_BYTES = 16 << 20
COPIES_SHARE = 1 / 4  # of what a device holds, for copies of weights in the type of the computation


def decide(
    model: ModelConfig,
    layout: LayoutConfig,
    work: Work | None = None,
    block: NodeBlock | None = None,
) -> Choices:
    """Returns the choices for a model under a layout; `Choices.reasons` explains them.

    With `layout.cluster` it takes the choices that are fastest on that cluster.

    Args:
        work: Tokens and sizes of the run; None assumes one sequence of maximal length per row.
        block: With a cluster, the block of the mesh on each node; None places ranks in order.
    """
    length = layout.rows * model.max_seq_len
    work = work or Work(tokens=length, source=length * model.two_stacks, sequences=layout.rows)
    spec = spec_of(layout)
    rows, cols = spec.grid(layout)
    products = {
        product.name: Choice(
            product.over(cols),
            stationary=spec.stationary(product, layout),
            common=spec.common(product, layout),
        )
        for product in products_of(model)
    }
    products |= {name: _over_experts(x, layout) for name, x in products.items() if EXPERTS in name}
    table = 0 if model.tied_head else model.hidden_size * max(1, model.vocab_size)
    parameters = table + sum(choice.elements for choice in products.values())
    shape = spec.boundary(layout).activation_layout
    between = shape if shape in ("replicated", "first") else "cut"
    read, written = (work.source, work.tokens) if model.two_stacks else (work.tokens, 0)
    layers_read = model.n_layers * read + model.n_decoder_layers * written
    inputs = float(layers_read * model.hidden_size)
    chosen = Choices(
        rows,
        cols,
        work,
        products,
        between,
        parameters,
        table,
        block_inputs=inputs,
        sequence_rows=layout.sequence_rows,
        heads_over_rows=_heads_over_rows(model, layout.sequence_rows, cols),
    )
    axis = "branches" if "branches" in spec.axes else "columns"
    chosen.reasons.extend(_replicated_heads(chosen, model, axis))
    chosen.reasons.extend(spec.reasons(chosen, layout))
    if chosen.sequence_rows > 1:
        chosen.reasons.append(
            "rows_over: each row has two parts of every sequence, and attention "
            + ("redistributes heads" if chosen.heads_over_rows else "gathers keys and values")
            + f" over rows, {format_bytes(chosen.received_keys() * work.itemsize)} per step"
        )
    if layout.experts_over:
        sent = work.tokens * model.experts_per_token / chosen.routed_apart
        sent *= model.hidden_size * work.itemsize
        chosen.reasons.append(
            f"experts: {' x '.join(layout.experts_over)} have different ones; a device sends "
            f"{format_bytes(sent)} of tokens to them in each layer, and gets as much back"
        )
    if "stationary" in spec.keys and layout.stationary == "auto":
        chosen.reasons.append(_why_stationary(chosen))
    if chosen.holds_weights:
        tokens = "a part of each sequence" if shape == "s" else "a part of the batch"
        chosen.reasons.append(
            f"stationary: no weight is sent; between sections a column of devices has {tokens}"
        )
    chosen = replace(chosen, held_bytes=_held_bytes(chosen, model, layout.pp))
    chosen = _schedules(_chunked(chosen, layout), layout)
    chosen = _reshard(_cast(_at_once(_kept(chosen, layout)), layout), layout)
    if not layout.cluster or rows * cols == 1:
        return chosen
    return fastest_choices(chosen, layout, block)


def _over_experts(choice: Choice, layout: LayoutConfig) -> Choice:
    """Returns the choice of a product of experts, of which replicas or the grid have their parts.

    If they lie over the whole grid, a device has whole experts.
    """
    axes, (rows, cols) = expert_axes(layout), spec_of(layout).grid(layout)
    whole = (
        rows * cols > 1 and (rows == 1 or "row" in axes) and (cols == 1 or {"col", "branch"} & axes)
    )
    n = (layout.experts_dp or layout.dp) if "dp" in axes else 1
    n *= rows * cols if whole else 1
    product = replace(choice.product, held=choice.product.held / n)
    return replace(choice, product=product, common=choice.common or bool(whole))


def _heads_over_rows(model: ModelConfig, rows: int, cols: int) -> bool:
    """Whether heads are redistributed over the rows that divide each sequence.

    They are if a device then receives no more than the first chunk of keys and values, for which it
    waits. No device then holds those of all rows.
    """
    n, m, relative = model.n_heads, model.kv_heads, model.family == "t5"
    if rows == 1 or relative or n % (rows * cols) or m % (rows * cols):
        return False
    return (n + m) / rows <= m / keys_chunks(model, cols, relative)


def _replicated_heads(choices: Choices, model: ModelConfig, axis: str) -> list[str]:
    """Returns sentences for --explain about heads of keys and values that several devices hold."""
    heads, columns = model.kv_heads, choices.cols
    n_blocks = blocks_of(heads, columns)
    if n_blocks == columns:
        return []
    each, held = columns // n_blocks, heads // n_blocks
    said = (
        f"heads: the {heads} heads of keys and values do not divide over {columns} {axis}, so each "
        f"{each} {axis} in a row have the same {held}"
    )
    mine = choices.copied_parameters
    if mine:
        said += f": {mine / 1e6:.3g} million parameters of a device, which one of {each} updates"
    return [said]


def _why_stationary(choices: Choices) -> str:
    layers = [c.product for c in choices.products.values() if c.product.section != "head"]
    paper = sum(product.n_in for product in layers)
    layer = sum(min(product.n_in, product.n_out) for product in layers)
    h, where = choices["head"].product.n_in, "per token and layer"
    if any(product.reads == "source" for product in layers):
        where = "per token, in a layer of each stack,"
    return (
        f"stationary: the narrower activation of each product is sent, {layer / h:g} h {where} "
        f"instead of the paper's {paper / h:g} h"
    )


def _schedules(choices: Choices, layout: LayoutConfig) -> Choices:
    """Decides by which schedule operands travel: `gather`, unless what it holds is large.

    A head whose loss is computed in chunks gathers its table once, where panels of it would travel
    again for each chunk.
    """
    if "schedule" not in spec_of(layout).keys_of(layout):
        return choices
    if layout.schedule != "auto":
        asked = layout.schedule
        return _each(choices, lambda choice: replace(choice, schedule=asked))
    limit = max(SMALL_BYTES, choices.held_bytes / 8)

    def by_size(choice: Choice) -> Choice:
        small = choices.gathered_bytes(choice) <= limit or choices.loss_chunks(choice) > 1
        return replace(choice, schedule="gather" if small else "pipelined")

    choices = _each(choices, by_size)
    large = [c.product.name for c in choices.products.values() if c.schedule == "pipelined"]
    sentence = f"schedule: gather if the gathered operands take at most {format_bytes(limit)}"
    choices.reasons.append(
        sentence
        + (f"; larger ones panel by panel: {', '.join(large)}" if large else ", as all of them do")
    )
    return choices


def _chunked(choices: Choices, layout: LayoutConfig) -> Choices:
    """Chooses the number of chunks, which bounds what is gathered however long a micro-batch is."""
    limit = max(CHUNK_BYTES, choices.held_bytes * CHUNK_SHARE)

    def cut(choice: Choice) -> Choice:
        if choice.stationary == "weight":  # travels at once, for micro-batches have few tokens
            return choice
        # What chunks cost: a weight gradient accumulated in float32.
        terms = choice.product.n_in * choice.n_out / choices.cols * 4 * (choices.rows > 1)
        if choices.activation_bytes(choice) <= max(SMALL_BYTES, terms):
            return choice
        n_chunks = math.ceil(choices.activation_bytes(choice) / limit)
        most = min(MOST_CHUNKS, max_chunks(choices, layout, choice.product))
        return replace(choice, n_chunks=max(1, min(n_chunks, most)))

    return _each(choices, cut)


def _at_once(choices: Choices) -> Choices:
    """Removes chunks where panels travel instead, and says how many are left."""
    choices = _each(choices, lambda c: c if c.schedule == "gather" else replace(c, n_chunks=1))
    if several := [c for c in choices.products.values() if c.n_chunks > 1]:
        each = ", ".join(f"{c.product.name} {c.n_chunks}" for c in several)
        largest = max(choices.activation_bytes(c) / c.n_chunks for c in several)
        choices.reasons.append(
            "chunks: activations are gathered and summed in chunks of up to "
            f"{format_bytes(largest)}, so that no more is held at a time; number of chunks: {each}"
        )
    return choices


def _kept(choices: Choices, layout: LayoutConfig) -> Choices:
    """Applies `keep_gathered`; `auto` keeps what saves the most traffic per byte held."""

    def keeping(inputs: bool, weights: bool) -> Choices:
        return _each(choices, lambda choice: choices.keeping(choice, inputs, weights))

    wish, kept = layout.keep_gathered, {"inputs": False, "weights": False}
    if wish != "auto":
        return keeping(wish in ("inputs", "all"), wish in ("weights", "all"))
    share = spec_of(layout).keep_share
    budget = choices.held_bytes * share
    offers, moved = [], _moved_bytes(choices)
    for name in kept:
        changed = keeping(name == "inputs", name == "weights")
        price = sum(changed.kept_bytes(choice) for choice in changed.products.values())
        saved = moved - _moved_bytes(changed)
        if price > 0 and saved > 0:
            offers.append((saved / price, name, price, saved))
    offers.sort(key=lambda offer: -offer[0])  # in a tie inputs, which are freed sooner
    for _, name, price, saved in offers:
        kept[name] = fits = price <= budget
        choices.reasons.append(
            f"keep_gathered: {name} {'are' if fits else 'are not'} kept: it takes "
            f"{format_bytes(price)} more memory and receives {format_bytes(saved)} less per step; "
            f"the budget is {format_bytes(budget)}"
            + (f", {Fraction(share)} of what a device holds" if share < 1 else "")
        )
        budget -= price * fits
    return keeping(**kept)


def _cast(choices: Choices, layout: LayoutConfig) -> Choices:
    """Decides whether weights are cast once a step, or at each use if the copies are too large."""
    wish, held = choices.work.cast, choices.held_bytes
    if choices.work.itemsize != 2:
        return choices  # parameters have the type of the computation
    price = copies_bytes(choices, layout)
    once = price <= COPIES_SHARE * held if wish == "auto" else wish == "step"
    if wish == "auto":
        choices.reasons.append(
            f"cast: each weight is cast {'once a step' if once else 'at each use'}: copies take "
            f"{format_bytes(price)}, and the budget is {format_bytes(COPIES_SHARE * held)}, "
            f"{Fraction(COPIES_SHARE)} of what a device holds"
        )
    return replace(choices, cast_once=once)


def _reshard(choices: Choices, layout: LayoutConfig) -> Choices:
    """Decides whether layers keep the parameters that they gather until the step ends."""
    if layout.dp_mode != "fsdp" or layout.reshard == "layer":
        return choices
    held, price = choices.held_bytes, regathered_bytes(choices, layout)
    if layout.reshard == "step":
        return replace(choices, reshard="step", held_bytes=held + price)
    limit = choices.work.memory_gib
    if layout.cluster and not limit:
        limit = load_cluster(layout.cluster).for_processes(layout.n_processes).limit_gib
    budget, why = COPIES_SHARE * held, f"{Fraction(COPIES_SHARE)} of what a device holds"
    if limit:
        copies = copies_bytes(choices, layout) * (choices.work.itemsize == 2 and choices.cast_once)
        budget = max(0.0, MEMORY_SHARE * limit * GIB - held - copies)
        why = f"what is left of {MEMORY_SHARE:.0%} of {limit:g} GiB"
    keeps, times = price <= budget, 2 * choices.work.micro_batches
    choices.reasons.append(
        f"reshard: layers {'keep' if keeps else 'free'} the parameters that they gather, which "
        f"travel {'once' if keeps else f'{times} times'} a step: to keep them takes "
        f"{format_bytes(price)} more, and the budget is {format_bytes(budget)}, {why}"
    )
    return replace(choices, reshard="step", held_bytes=held + price) if keeps else choices


def regathered_bytes(choices: Choices, layout: LayoutConfig) -> float:
    """Returns the bytes that a device holds besides its part if layers keep what they gather."""
    elements = 0.0
    for choice in choices.products.values():
        if choice.product.section != "head":
            replicas = layout.shard_over or layout.dp * (layout.branches if choice.common else 1)
            devices = 1 if choice.common else choices.rows * choices.cols
            elements += choice.elements / devices * (1 - 1 / replicas)
    return elements * choices.work.itemsize / layout.pp


def copies_bytes(choices: Choices, layout: LayoutConfig) -> float:
    """Returns the bytes of copies if weights are cast once a step; with fsdp those of its parts."""
    replicas = layout.shards if layout.dp_mode == "fsdp" else 1
    grid = choices.rows * choices.cols
    return choices.parameters * choices.work.itemsize / (grid * layout.pp * replicas)


def _each(choices: Choices, change: Callable[[Choice], Choice]) -> Choices:
    return replace(choices, products={k: change(c) for k, c in choices.products.items()})


def _moved_bytes(choices: Choices) -> float:
    steps = [choices.step(choice) for choice in choices.products.values()]
    return sum(step.col + step.row for step in steps) * choices.work.itemsize


def _held_bytes(choices: Choices, model: ModelConfig, pp: int) -> float:
    """Estimates the bytes of states, activations and logits if nothing is kept gathered.

    In a pipeline a device has 1/pp of the states, and as many activations as without: it has 1/pp
    of the layers, but about pp micro-batches in flight.

    A layer saves the inputs of its products and the outputs of those that open a section: x twice,
    q, k, v, the output of attention and both widths of the feed-forward. A recomputed layer saves
    only its input.
    """
    work, p = choices.work, choices.rows * choices.cols
    layers = 0.0
    for choice in choices.products.values():
        product = choice.product
        if product.section != "head":
            width = product.n_in + (0 if product.closes else choice.n_out)
            layers += work.rows_of(product) * product.count * width
    if share := work.recomputed:  # inputs of blocks, and one block
        blocks = (work.tokens + work.source) * model.hidden_size * model.n_layers
        layers = share * blocks + (1 - share) * layers + layers / model.n_layers
    with_logits = min(work.tokens, (work.loss_chunk_tokens or work.tokens) * choices.rows)
    logits = with_logits * model.vocab_size * (work.itemsize + 4)
    activations = layers * work.itemsize
    return (choices.parameters * work.state_bytes / pp + activations + logits) / p
