"""Which operand of each product stays, by which schedule the rest travels, and what is kept.

`Choices` says what that costs: elements that travel, and bytes that a device holds;
gridformer.parallel.auto.heuristics takes them. Volumes are elements received by one device with
ring algorithms (specification, section 3); T is the tokens of a micro-batch over all rows of the
grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from gridformer.config import ModelConfig

ScheduleName = Literal["broadcast", "pipelined", "gather"]
Section = Literal["attention", "feed_forward", "head"]
Reads = Literal["tokens", "source", "sequences"]
Stays = Literal["output", "input"]


@dataclass(frozen=True)
class Work:
    """What one device group computes at a time.

    tokens: T, of one replica's micro-batch, all rows; source: the same of sources; sequences: of
    both; micro_batches: of one step; itemsize: bytes of an element of the computation;
    state_bytes: of one parameter with gradient and optimizer. recompute: as in the run;
    loss_chunk_tokens: of which there are logits at a time, on a row of the grid; 0 for all.
    """

    tokens: int
    micro_batches: int = 1
    itemsize: int = 4
    state_bytes: int = 16
    source: int = 0
    sequences: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int = 0

    def rows_of(self, product: Product) -> int:
        """Rows of a product's input, all devices of the grid together."""
        if product.reads == "source":
            return self.source
        return self.sequences if product.reads == "sequences" else self.tokens


@dataclass(frozen=True)
class Product:
    """One matrix product of a model: y = x W, W [n_in, n_out], `count` of them in the model.

    normed: x is a norm's result that nothing else reads. ends_block: nothing inside its block reads
    y, so where the block is computed again this product is not. section, closes, reads: see
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
    ends_block: bool = False


@dataclass(frozen=True)
class Choice:
    """How one product is carried out.

    n_chunks: activations are gathered and summed in so many chunks of lines, one after the other.
    common: by every process for its own samples, whole.
    """

    product: Product
    stays: Stays = "output"
    schedule: ScheduleName = "gather"
    n_chunks: int = 1
    keep_input: bool = False
    keep_weight: bool = False
    common: bool = False

    @property
    def norm_inside(self) -> bool:
        """Rows are gathered before they are normalized, so the norm itself sends nothing."""
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
    or on the first device of a row alone, as in D&SP-cSub. block_inputs: elements of the inputs of
    all blocks, in one micro-batch.
    """

    rows: int
    cols: int
    work: Work
    products: dict[str, Choice]
    between: Literal["cut", "replicated", "first"] = "cut"
    parameters: int = 0  # elements of the model's matrices
    held_bytes: float = 0.0
    block_inputs: float = 0.0
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

    @property
    def head_parameters(self) -> int:
        """Elements of the matrices outside layers."""
        head = [c.product for c in self.products.values() if c.product.section == "head"]
        return sum(product.n_in * product.n_out * product.count for product in head)

    def forward(self, choice: Choice, first: bool = True) -> Traffic:
        """Of one product's forward pass; `first`: in the first micro-batch of a step."""
        activation, weight = self._unit(choice)
        steps = self._steps(choice)
        if choice.keep_weight and not first:
            weight = 0.0
        if self.replicated:  # all-reduced where a section is left
            left = choice.stays == "input"
            return self._traffic(2 * activation * left, weight, 1, 1)
        return self._traffic(activation, weight, steps * choice.n_chunks, steps)

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
            (1 + again_input) * choice.n_chunks,
            1 + again_weight,
        )

    def again(self, choice: Choice) -> Traffic:
        """Of the forward pass that a backward pass computes again, beside what `backward` says."""
        product = choice.product
        if self.work.recompute != "full" or product.section == "head" or product.ends_block:
            return Traffic(0.0, 0.0, 0)
        return self.forward(choice, first=False)

    def inputs_again(self) -> float:
        """Elements that one micro-batch's backward pass receives of the inputs of blocks that are
        computed again: where all devices have them, each keeps a part of them; where the first of
        a row does, the others keep parts for it, and receive those before."""
        if self.work.recompute != "full" or self.between == "cut":
            return 0.0
        share = (self.cols - 1) / self.cols if self.replicated else 2 / self.cols
        return self.block_inputs * share * (self.cols > 1)

    def step(self, choice: Choice) -> Traffic:
        """Of all of a model's products of this name over one optimizer step, one device."""
        m, count = self.work.micro_batches, choice.product.count
        first, later = self.forward(choice), self.forward(choice, first=False)
        back = self.backward(choice) + self.again(choice)
        return Traffic(
            count * (first.col + (m - 1) * later.col + m * back.col),
            count * (first.row + (m - 1) * later.row + m * back.row),
            count * (first.messages + (m - 1) * later.messages + m * back.messages),
        )

    def gathered_bytes(self, choice: Choice) -> float:
        """What `gather` holds for one such product while it multiplies, its own blocks aside."""
        product, rows = choice.product, 1 - 1 / self.rows
        weight = product.n_in * product.n_out / self.cols * rows * self.work.itemsize
        return self.activation_bytes(choice) / choice.n_chunks + weight

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
        """Elements received to make this product's traveling activation, or its weight, whole."""
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
                ends_block=role.product.endswith("down") and sized.norm_position == "pre",
            )
        elif isinstance(module, blocks.TiedHead):
            h, v = sized.hidden_size, sized.vocab_size
            product = Product("head", h, v, 1, normed="head" in read)
        else:
            continue
        before = found.get(product.name)
        found[product.name] = replace(product, count=before.count + 1) if before else product
    return [*found.values()]
