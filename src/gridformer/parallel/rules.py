"""`decide` turns a layout's `auto` into choices, by rules with numbers.

Those are elements that travel and bytes that a device holds, see gridformer.parallel.choices. Each
rule takes the choices as the ones before left them, and adds a sentence to `Choices.reasons`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.nodes import split_messages
from gridformer.parallel.choices import Choice, Choices, Product, Work, products_of

# `auto` keeps gathered operands as long as they add no more than this share to what a device holds:
# a grid is chosen for memory, and gathering again was found to cost no time that can be measured on
# one machine (benchmarks/schemes.py), and a fifth of a step's traffic.
KEEP_SHARE = 1 / 32
# Gathered operands below this are always taken all at once: so few bytes do not matter.
SMALL_BYTES = 64 << 20
# Activations are gathered in chunks of about this share of what a device holds, or this size: while
# one chunk is multiplied there are three to six others, on their way, normalized or summed.
CHUNK_SHARE = 1 / 256
CHUNK_BYTES = 16 << 20
MOST_CHUNKS = 32  # products stay large, and messages few


def decide(model: ModelConfig, layout: LayoutConfig, work: Work | None = None) -> Choices:
    """The choices for a model under a layout; see `Choices.reasons` for why.

    Without `work` one sequence a row is assumed.
    """
    length = layout.rows * model.max_seq_len
    work = work or Work(tokens=length, source=length * model.two_stacks, sequences=layout.rows)
    rows = layout.rows if layout.scheme == "optimus" else 1
    cols = {"single": 1, "subgraph": layout.branches}.get(layout.scheme, layout.cols)
    products = {product.name: Choice(product) for product in products_of(model)}
    between: Literal["cut", "replicated", "first"] = "cut"
    if layout.scheme == "megatron" and not layout.sequence_parallel:
        between = "replicated"
    if layout.scheme == "subgraph" and layout.common == "first":
        between = "first"
    matrices = [choice.product for choice in products.values()]
    parameters = sum(product.n_in * product.n_out * product.count for product in matrices)
    chosen = Choices(rows, cols, work, products, between, parameters)
    if layout.scheme == "subgraph":
        chosen = _sub_graph(chosen, layout)
    if layout.scheme == "megatron":  # every device has what such a product reads, or its part of it
        chosen = _each(chosen, lambda c: replace(c, common=c.product.name == "transform"))
    chosen = _stationary(chosen, layout)
    chosen = replace(chosen, held_bytes=_held_bytes(chosen, model, layout.pp))
    chosen = _schedules(_chunked(chosen, layout), layout)
    return _at_once(_kept(chosen, layout))


def _stationary(choices: Choices, layout: LayoutConfig) -> Choices:
    """The narrower activation travels; alike, or in Megatron, sections are entered and left."""
    if layout.scheme == "optimus" and layout.stationary != "auto":
        return _each(choices, lambda choice: replace(choice, stays=layout.stationary))  # type: ignore[arg-type]

    def narrower(choice: Choice) -> Choice:
        product = choice.product
        input_stays = product.closes
        if layout.scheme == "optimus" and product.n_in != product.n_out:
            input_stays = product.n_in > product.n_out
        return replace(choice, stays="input" if input_stays else "output")

    choices = _each(choices, narrower)
    if layout.scheme == "optimus":
        layers = [c.product for c in choices.products.values() if c.product.section != "head"]
        paper = sum(product.n_in for product in layers)
        layer = sum(min(product.n_in, product.n_out) for product in layers)
        h = choices["head"].product.n_in
        where = "a token and layer"
        if any(product.reads == "source" for product in layers):
            where = "a token, in a layer of each stack,"
        choices.reasons.append(
            f"stationary: the narrower activation of each product travels, {layer / h:g} h {where} "
            f"instead of the paper's {paper / h:g} h"
        )
    return choices


def _sub_graph(choices: Choices, layout: LayoutConfig) -> Choices:
    """Products outside the branches are common; see gridformer.parallel.subgraph."""
    inside, whole = layout.attention == "inside", layout.feed_forward == "common"
    sections = [*["attention"] * inside, *["feed_forward"] * (not whole)]
    choices = _each(choices, lambda c: replace(c, common=c.product.section not in sections))
    branched = [name for name, choice in choices.products.items() if not choice.common]
    share = choices.branched_parameters / choices.parameters
    choices.reasons.append(
        f"branches: {', '.join(branched) or 'no product'} in {layout.branches} branches, "
        f"{share:.0%} of the parameters, whose gradients are summed over dp={layout.dp} processes"
    )
    if not inside:
        choices.reasons.append(
            "attention: slices of q, k and v enter the branches, 3 h a token, and the heads' "
            "results leave them, h a token"
        )
    if layout.devices_per_node:
        n, k = layout.dp * layout.branches, layout.devices_per_node
        within, between = split_messages(n, layout.branches, k, layout.order)
        choices.reasons.append(
            f"order: {layout.order}, so that of the messages of one split {within} stay within "
            f"nodes of {k} and {between} go between them"
        )
    return choices


def _schedules(choices: Choices, layout: LayoutConfig) -> Choices:
    if layout.scheme != "optimus":
        return choices
    if layout.schedule != "auto":
        return _each(choices, lambda choice: replace(choice, schedule=layout.schedule))  # type: ignore[arg-type]
    limit = max(SMALL_BYTES, choices.held_bytes / 8)

    def by_size(choice: Choice) -> Choice:
        small = choices.gathered_bytes(choice) <= limit
        return replace(choice, schedule="gather" if small else "pipelined")

    choices = _each(choices, by_size)
    large = [c.product.name for c in choices.products.values() if c.schedule == "pipelined"]
    sentence = f"schedule: gather where the gathered operands stay below {_size(limit)}"
    choices.reasons.append(
        sentence
        + (f"; above it, panel by panel: {', '.join(large)}" if large else ", which all do")
    )
    return choices


def _chunked(choices: Choices, layout: LayoutConfig) -> Choices:
    """No more of an activation lies gathered than a chunk of it, however long the micro-batch."""
    limit = max(CHUNK_BYTES, choices.held_bytes * CHUNK_SHARE)
    work = choices.work

    def lines(product: Product) -> int:
        if layout.scheme == "megatron":  # s is cut: chunks of whole sequences
            return work.sequences
        if layout.scheme == "subgraph" and choices.between == "cut":  # b is: chunks of all
            return work.rows_of(product) // max(1, work.sequences)
        return work.rows_of(product) // choices.rows

    def cut(choice: Choice) -> Choice:
        if not _saves_memory(choices, choice):
            return choice
        n_chunks = math.ceil(choices.activation_bytes(choice) / limit)
        return replace(choice, n_chunks=max(1, min(n_chunks, MOST_CHUNKS, lines(choice.product))))

    return _each(choices, cut)


def _saves_memory(choices: Choices, choice: Choice) -> bool:
    """Of chunks, terms of the weight's gradient are added up, in float32, before they travel."""
    product = choice.product
    terms = product.n_in * product.n_out / choices.cols * 4 * (choices.rows > 1)
    return choices.activation_bytes(choice) > max(SMALL_BYTES, terms)


def _at_once(choices: Choices) -> Choices:
    """Only `gather` has chunks; what is kept whole for the backward pass is gathered at once."""

    def mend(choice: Choice) -> Choice:
        gathered = choice.schedule == "gather" and not choice.keep_input
        return choice if gathered else replace(choice, n_chunks=1)

    choices = _each(choices, mend)
    if several := [c for c in choices.products.values() if c.n_chunks > 1]:
        each = ", ".join(f"{c.product.name} {c.n_chunks}" for c in several)
        largest = max(choices.activation_bytes(c) / c.n_chunks for c in several)
        choices.reasons.append(
            f"chunks: activations are gathered and summed in chunks of up to {_size(largest)}, so "
            f"that no more lies whole at a time: {each}"
        )
    return choices


def _kept(choices: Choices, layout: LayoutConfig) -> Choices:
    """Explicit wishes as they are; `auto` keeps what saves most bytes for each byte held."""
    wish = layout.keep_gathered
    inputs, weights = _with_inputs(choices), _with_weights(choices)
    if wish != "auto":
        if wish in ("inputs", "all"):
            choices = inputs
        return _with_weights(choices) if wish in ("weights", "all") else choices
    budget = choices.held_bytes * KEEP_SHARE
    if layout.scheme == "subgraph":
        budget = choices.held_bytes  # a branch that has its input costs no more than the paper's
    offers = []
    for name, changed in (("inputs", inputs), ("weights", weights)):
        price = _kept_bytes(changed)
        saved = _moved_bytes(choices) - _moved_bytes(changed)
        if price > 0 and saved > 0:
            offers.append((saved / price, name, price, saved))
    offers.sort(key=lambda offer: -offer[0])  # alike: inputs, which are let go of sooner
    for _, name, price, saved in offers:
        fits = price <= budget
        choices.reasons.append(
            f"keep_gathered: {name} {'are' if fits else 'are not'} kept: that holds "
            f"{_size(price)} more and receives {_size(saved)} less a step; "
            f"{_size(budget)} of room"
            + (", 1/32 of what a device holds" if layout.scheme != "subgraph" else "")
        )
        if fits:
            choices = _with_inputs(choices) if name == "inputs" else _with_weights(choices)
            budget -= price
    return choices


def _with_inputs(choices: Choices) -> Choices:
    if choices.cols == 1 or choices.replicated:
        return choices

    def keep(choice: Choice) -> Choice:
        gathered = choice.schedule == "gather" and choice.stays == "output" and not choice.common
        return replace(choice, keep_input=gathered)

    return _each(choices, keep)


def _with_weights(choices: Choices) -> Choices:
    if choices.rows == 1:
        return choices
    return _each(choices, lambda c: replace(c, keep_weight=c.schedule == "gather"))


def _each(choices: Choices, change: Callable[[Choice], Choice]) -> Choices:
    return replace(choices, products={k: change(c) for k, c in choices.products.items()})


def _kept_bytes(choices: Choices) -> float:
    return sum(choices.kept_bytes(choice) for choice in choices.products.values())


def _moved_bytes(choices: Choices) -> float:
    steps = [choices.step(choice) for choice in choices.products.values()]
    return sum(step.col + step.row for step in steps) * choices.work.itemsize


def _held_bytes(choices: Choices, model: ModelConfig, pp: int) -> float:
    """About what a device holds when nothing gathered is kept: states, activations, logits. Of a
    pipeline's states it has 1/pp, and as many activations, for it has as many micro-batches.

    A layer keeps the inputs of its products and the results of those that open a section: x twice,
    q, k, v, the attention's result and both widths of the feed-forward. Recomputed, its input.
    """
    work, p = choices.work, choices.rows * choices.cols
    layers = 0.0
    for product in (choice.product for choice in choices.products.values()):
        if product.section != "head":
            width = product.n_in + (0 if product.closes else product.n_out)
            layers += work.rows_of(product) * product.count * width
    if work.recompute == "full":  # inputs of all blocks, and one block
        blocks = (work.tokens + work.source) * model.hidden_size * model.n_layers
        layers = blocks + layers / model.n_layers
    with_logits = min(work.tokens, (work.loss_tokens or work.tokens) * choices.rows)
    logits = with_logits * model.vocab_size * (work.itemsize + 4)
    activations = layers * work.itemsize
    return (choices.parameters * work.state_bytes / pp + activations + logits) / p


def _size(n_bytes: float) -> str:
    mib = n_bytes / 2**20
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.3g} MiB"
