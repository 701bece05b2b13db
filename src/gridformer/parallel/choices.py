"""Which operand of each product stays, by which schedule the rest travels, and what is kept.

`decide` turns a layout's `auto` into choices, by rules with numbers: elements that travel, and
bytes that a device holds. Volumes are elements received by one device with ring algorithms
(specification, section 3); T is the tokens of a micro-batch over all rows of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.nodes import split_messages

ScheduleName = Literal["broadcast", "pipelined", "gather"]
Section = Literal["attention", "feed_forward", "head"]
Reads = Literal["tokens", "source", "sequences"]
Stays = Literal["output", "input"]

# `auto` keeps gathered operands as long as they add no more than this share to what a device holds:
# a grid is chosen for memory, and gathering again was found to cost no time that can be measured on
# one machine (benchmarks/schemes.py), and a fifth of a step's traffic.
KEEP_SHARE = 1 / 32
# Gathered operands below this are always taken all at once: so few bytes do not matter.
SMALL_BYTES = 64 << 20
# Activations are gathered in parts of about this share of what a device holds, or this size: while
# one part is multiplied there are three to six others, on their way, normalised or summed.
PART_SHARE = 1 / 256
PART_BYTES = 16 << 20
MOST_PARTS = 32  # products stay large, and messages few


@dataclass(frozen=True)
class Work:
    """What one device group computes at a time.

    tokens: T, of one replica's micro-batch, all rows; source: the same of sources; sequences: of
    both; micro_batches: of one step; itemsize: bytes of an element of the computation;
    state_bytes: of one parameter with gradient and optimizer. recompute: as in the run;
    loss_tokens: of which there are logits at a time, on a row of the grid; 0 for all.
    """

    tokens: int
    micro_batches: int = 1
    itemsize: int = 4
    state_bytes: int = 16
    source: int = 0
    sequences: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    loss_tokens: int = 0

    def rows_of(self, product: Product) -> int:
        """Rows of a product's input, all devices of the grid together."""
        if product.reads == "source":
            return self.source
        return self.sequences if product.reads == "sequences" else self.tokens


@dataclass(frozen=True)
class Product:
    """One matrix product of a model: y = x W, W [n_in, n_out], `count` of them in the model.

    normed: x is a norm's result that nothing else reads. section, closes, reads: see
    `gridformer.models.blocks.Role`.
    """

    name: str
    n_in: int
    n_out: int
    count: int
    normed: bool = False
    closes: bool = False
    section: Section = "head"
    reads: Reads = "tokens"


@dataclass(frozen=True)
class Choice:
    """How one product is carried out.

    parts: activations are made whole and cut in so many parts of their lines, one after the other.
    common: by every process for its own samples, whole.
    """

    product: Product
    stays: Stays = "output"
    schedule: ScheduleName = "gather"
    parts: int = 1
    keep_input: bool = False
    keep_weight: bool = False
    common: bool = False

    @property
    def norm_inside(self) -> bool:
        """Rows are gathered before they are normalised, so the norm itself sends nothing."""
        return self.product.normed and self.schedule == "gather" and self.stays == "output"


@dataclass(frozen=True)
class Traffic:
    """Of one product on one device and micro-batch: elements over each axis, and messages.

    col: activations, along the rows of the grid; row: weights, down its columns.
    """

    col: float
    row: float
    messages: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.col + other.col, self.row + other.row, self.messages + other.messages)


@dataclass(frozen=True)
class Choices:
    """The choices for every product of a model on a grid, and why they were taken.

    between: how activations lie between sections: cut; whole on every device, as in plain Megatron;
    or on the first device of a row alone, as in D&SP-cSub.
    """

    rows: int
    cols: int
    work: Work
    products: dict[str, Choice]
    between: Literal["cut", "replicated", "first"] = "cut"
    parameters: int = 0  # elements of the model's matrices
    held_bytes: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Choice:
        return self.products[name]

    @property
    def replicated(self) -> bool:
        return self.between == "replicated"

    @property
    def branched_parameters(self) -> int:
        """Elements of the matrices that sub-grids share (D&SP)."""
        inside = [c.product for c in self.products.values() if not c.common]
        return sum(product.n_in * product.n_out * product.count for product in inside)

    def forward(self, choice: Choice, first: bool = True) -> Traffic:
        """Of one product's forward pass; `first`: in the first micro-batch of a step."""
        activation, weight = self._unit(choice)
        steps = self._steps(choice)
        if choice.keep_weight and not first:
            weight = 0.0
        if self.replicated:  # all-reduced where a section is left
            left = choice.stays == "input"
            return self._traffic(2 * activation * left, weight, 1, 1)
        return self._traffic(activation, weight, steps * choice.parts, steps)

    def backward(self, choice: Choice) -> Traffic:
        activation, weight = self._unit(choice)
        steps = self._steps(choice)
        if self.replicated:  # all-reduced where it was entered
            entered = choice.stays == "output"
            return self._traffic(2 * activation * entered, weight, 1, 1)
        if choice.schedule != "gather":
            return self._traffic(2 * activation, 2 * weight, 2 * steps, 2 * steps)
        again_input = choice.stays == "output" and not choice.keep_input
        again_weight = not choice.keep_weight
        return self._traffic(
            (1 + again_input) * activation,
            (1 + again_weight) * weight,
            (1 + again_input) * choice.parts,
            1 + again_weight,
        )

    def step(self, choice: Choice) -> Traffic:
        """Of all of a model's products of this name over one optimizer step, one device."""
        m, count = self.work.micro_batches, choice.product.count
        first = self.forward(choice)
        later, back = self.forward(choice, first=False), self.backward(choice)
        return Traffic(
            count * (first.col + (m - 1) * later.col + m * back.col),
            count * (first.row + (m - 1) * later.row + m * back.row),
            count * (first.messages + (m - 1) * later.messages + m * back.messages),
        )

    def gathered_bytes(self, choice: Choice) -> float:
        """What `gather` holds for one such product while it multiplies, its own blocks aside."""
        product, rows = choice.product, 1 - 1 / self.rows
        weight = product.n_in * product.n_out / self.cols * rows * self.work.itemsize
        return self.activation_bytes(choice) / choice.parts + weight

    def activation_bytes(self, choice: Choice) -> float:
        """Of the activation that travels, or is summed, for one such product, whole."""
        product = choice.product
        if self.cols == 1 or self.replicated or choice.common:
            return 0.0
        width = product.n_in if choice.stays == "output" else product.n_out
        return self.work.rows_of(product) / self.rows * width * self.work.itemsize

    def kept_bytes(self, choice: Choice) -> float:
        """What keeping costs: bytes a device holds longer, all products of this name."""
        product, work, total = choice.product, self.work, 0.0
        if choice.keep_input and choice.stays == "output":
            total += work.rows_of(product) * product.n_in / self.rows * (1 - 1 / self.cols)
        if choice.keep_weight:
            total += product.n_in * product.n_out / self.cols  # beside this device's block of it
        return total * product.count * work.itemsize

    def _unit(self, choice: Choice) -> tuple[float, float]:
        """Elements received to make this product's travelling activation, or its weight, whole."""
        product, r, c = choice.product, self.rows, self.cols
        if choice.common:
            return 0.0, 0.0
        width = product.n_in if choice.stays == "output" else product.n_out
        share = (c - 1) / c if self.between != "first" else float(c > 1)
        activation = share / r * self.work.rows_of(product) * width
        return activation, (r - 1) / (r * c) * product.n_in * product.n_out

    def _steps(self, choice: Choice) -> int:
        if choice.schedule == "gather":
            return 1
        return self.rows + self.cols - math.gcd(self.rows, self.cols)

    def _traffic(self, col: float, row: float, col_messages: int, row_messages: int) -> Traffic:
        messages = (col_messages if col else 0) + (row_messages if row else 0)
        return Traffic(col, row, messages)


@lru_cache(maxsize=64)
def products_of(model: ModelConfig) -> list[Product]:
    """The products of a model, by the name that its modules give them, in forward order."""
    import torch

    from gridformer.models import blocks, build_model

    sized = model.model_copy(update={"vocab_size": max(model.vocab_size, 1)})
    with torch.device("meta"):
        modules = [*build_model(sized).modules()]
    norms = (blocks.LayerNorm, blocks.RMSNorm)
    read = {module.reader for module in modules if isinstance(module, norms)}
    found: dict[str, Product] = {}
    for module in modules:
        if isinstance(module, blocks.Linear):
            role = module.role
            n_in, n_out = module.weight.shape
            product = Product(
                role.product,
                n_in,
                n_out,
                count=1,
                normed=role.product in read,
                closes=not role.opens,
                section=role.section,
                reads=role.reads,
            )
        elif isinstance(module, blocks.TiedHead):
            h, v = sized.hidden_size, sized.vocab_size
            product = Product("head", h, v, 1, normed="head" in read)
        else:
            continue
        before = found.get(product.name)
        found[product.name] = replace(product, count=before.count + 1) if before else product
    return [*found.values()]


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
    chosen = _schedules(_in_parts(chosen, layout), layout)
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


def _in_parts(choices: Choices, layout: LayoutConfig) -> Choices:
    """No more of an activation lies gathered than a part of it, however long the micro-batch."""
    limit = max(PART_BYTES, choices.held_bytes * PART_SHARE)
    work = choices.work

    def lines(product: Product) -> int:
        if layout.scheme == "megatron":  # s is cut: parts of whole sequences
            return work.sequences
        if layout.scheme == "subgraph" and choices.between == "cut":  # b is: parts of all sequences
            return work.rows_of(product) // max(1, work.sequences)
        return work.rows_of(product) // choices.rows

    def cut(choice: Choice) -> Choice:
        if not _saves_memory(choices, choice):
            return choice
        parts = math.ceil(choices.activation_bytes(choice) / limit)
        return replace(choice, parts=max(1, min(parts, MOST_PARTS, lines(choice.product))))

    return _each(choices, cut)


def _saves_memory(choices: Choices, choice: Choice) -> bool:
    """Of parts, terms of the weight's gradient are added up, in float32, before they travel."""
    product = choice.product
    terms = product.n_in * product.n_out / choices.cols * 4 * (choices.rows > 1)
    return choices.activation_bytes(choice) > max(SMALL_BYTES, terms)


def _at_once(choices: Choices) -> Choices:
    """Only `gather` has parts; and what is kept whole for the backward pass is gathered at once."""

    def mend(choice: Choice) -> Choice:
        gathered = choice.schedule == "gather" and not choice.keep_input
        return choice if gathered else replace(choice, parts=1)

    choices = _each(choices, mend)
    if several := [c for c in choices.products.values() if c.parts > 1]:
        each = ", ".join(f"{c.product.name} {c.parts}" for c in several)
        largest = max(choices.activation_bytes(c) / c.parts for c in several)
        choices.reasons.append(
            f"parts: activations are gathered and summed in parts of up to {_size(largest)}, so "
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
