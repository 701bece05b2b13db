"""The cost of how each matrix product is carried out.

A `Choice` says which operand of a product stays in place, by which schedule the other operands
travel, and which of them are kept gathered. `Choices` computes the elements that travel and the
bytes that a device holds, which gridformer.parallel.auto.heuristics compares. Volumes are elements
received by one device with ring algorithms. T is the number of tokens of a micro-batch over all
rows of the grid.
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
    """The amount of work of one model replica.

    Attributes:
        tokens: T, tokens of one replica's micro-batch over all rows of the grid.
        micro_batches: Micro-batches per step.
        itemsize: Bytes per element of activations and gathered weights.
        state_bytes: Bytes per parameter for its value, gradient and optimizer state.
        source: Source tokens of the micro-batch, for models with an encoder and a decoder.
        sequences: Sequences of the micro-batch.
        recompute: `train.recompute` of the run.
        loss_chunk_tokens: Tokens whose logits exist at a time on a row of the grid; 0 for all.
        cast: `train.cast` of the run.
        dtype: The type of products, which may be tf32; empty for float32.
        memory_gib: `train.memory_gib` of the run.
    """

    tokens: int
    micro_batches: int = 1
    itemsize: int = 4
    state_bytes: int = 16
    source: int = 0
    sequences: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int = 0
    cast: Literal["auto", "step", "use"] = "auto"
    dtype: str = ""
    memory_gib: float = 0.0

    def rows_of(self, product: Product) -> int:
        """Returns the number of rows of a product's input, over all devices of the grid."""
        if product.reads == "source":
            return self.source
        return self.sequences if product.reads == "sequences" else self.tokens


@dataclass(frozen=True)
class Product:
    """A matrix product y = x W of a model, W [n_in, n_out].

    Attributes:
        name: Name of the product, shared by the layers of a stack.
        n_in: Rows of W.
        n_out: Columns of W.
        count: Number of such products in the model.
        normed: Whether x is the output of a norm that nothing else reads.
        closes: Whether the product closes its section, see `gridformer.models.blocks.Role`.
        section: The section that it belongs to.
        reads: Which tokens its input has.
        ends_block: Whether nothing in its block reads y. Recomputing the block then skips it.
        parts: The columns of each weight that W consists of, and the pieces of it that are never
            split (`gridformer.models.blocks.Part`); empty if W is one weight.
        copied: Columns of W that devices hold in addition to `n_out`, because heads of keys and
            values do not divide over columns of devices, or over branches.
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
    parts: tuple[tuple[int, int], ...] = ()
    copied: int = 0

    def over(self, columns: int) -> Product:
        """Returns the product with what `columns` devices hold of its parts."""
        extra = (n * (columns // blocks_of(pieces, columns) - 1) for n, pieces in self.parts)
        return replace(self, copied=sum(extra))


@dataclass(frozen=True)
class Choice:
    """How one product is carried out.

    Attributes:
        product: The product.
        stays: Which activation is not sent, the output or the input.
        schedule: How the other operands travel (gridformer.parallel.tensor.summa).
        n_chunks: Number of chunks in which activations are gathered or summed.
        keep_input: Whether the gathered input is kept for the backward pass.
        keep_weight: Whether the gathered weight is kept for the whole step.
        common: Whether every process computes the full product for its own samples.
    """

    product: Product
    stays: Stays = "output"
    schedule: ScheduleName = "gather"
    n_chunks: int = 1
    keep_input: bool = False
    keep_weight: bool = False
    common: bool = False

    @property
    def n_out(self) -> int:
        """Columns of W on all columns of devices together, with those that several of them hold."""
        return self.product.n_out + (0 if self.common else self.product.copied)

    @property
    def elements(self) -> int:
        """Elements of W on all devices of a grid together, for all such products of the model."""
        return self.product.n_in * self.n_out * self.product.count

    @property
    def norm_inside(self) -> bool:
        """Whether the product gathers rows and then normalizes them, so the norm sends nothing."""
        return self.product.normed and self.schedule == "gather" and self.stays == "output"


@dataclass(frozen=True)
class Timed:
    """Seconds of all products of a name in a step on the cluster of a layout.

    Attributes:
        seconds: As chosen by seconds.
        by_rules: What volumes and thresholds would have chosen.
        by_rules_s: Its seconds.
    """

    seconds: float
    by_rules: Choice
    by_rules_s: float


@dataclass(frozen=True)
class Traffic:
    """What one device receives for a product.

    Attributes:
        col: Elements over the axis `col`: activations, along the rows of the grid.
        row: Elements over the axis `row`: weights, down the columns of the grid.
        messages: Number of messages.
    """

    col: float
    row: float
    messages: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.col + other.col, self.row + other.row, self.messages + other.messages)


@dataclass(frozen=True)
class Choices:
    """The choices for all products of a model on a grid, and the reasons for them.

    Attributes:
        rows: Rows of the grid.
        cols: Columns of the grid.
        work: Tokens, micro-batches and sizes.
        products: The choice of each product, by name.
        between: How activations lie between sections: sharded (`cut`), `replicated` on every device
            as in plain Megatron, or only on the `first` device of a row as in D&SP-cSub.
        parameters: Elements of the model's matrices, with heads that several devices hold.
        table: Elements of an embedding's table that the head does not share.
        held_bytes: Approximate bytes that a device holds if nothing is kept gathered.
        block_inputs: Elements of the inputs of all blocks in one micro-batch.
        cast_once: Whether a weight is cast to the type of the computation once a step and the copy
            is kept for all products of the step, or cast for each product.
        reasons: Sentences that explain the choices.
        timed: The seconds of each product, by name, if the layout has a cluster.
    """

    rows: int
    cols: int
    work: Work
    products: dict[str, Choice]
    between: Literal["cut", "replicated", "first"] = "cut"
    parameters: int = 0
    table: int = 0
    held_bytes: float = 0.0
    block_inputs: float = 0.0
    cast_once: bool = True
    reasons: list[str] = field(default_factory=list)
    timed: dict[str, Timed] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Choice:
        return self.products[name]

    @property
    def replicated(self) -> bool:
        return self.between == "replicated"

    @property
    def branched_parameters(self) -> int:
        """Elements of the matrices that are divided among sub-grids (D&SP)."""
        return sum(c.elements for c in self.products.values() if not c.common)

    @property
    def head_parameters(self) -> int:
        """Elements of the matrices outside layers."""
        head = [c for c in self.products.values() if c.product.section == "head"]
        return self.table + sum(choice.elements for choice in head)

    @property
    def copied_parameters(self) -> float:
        """Elements of matrices on a device that other columns of devices hold as well."""
        mine = 0.0
        for choice in self.products.values():
            if choice.product.copied and not choice.common:
                several = (n for n, pieces in choice.product.parts if pieces % self.cols)
                mine += (
                    choice.product.n_in
                    * choice.product.count
                    * (choice.product.copied + sum(several))
                )
        return mine / (self.rows * self.cols)

    def forward(self, choice: Choice, first: bool = True) -> Traffic:
        """Returns the traffic of one such product in the forward pass of a micro-batch.

        Args:
            choice: How the product is carried out.
            first: Whether it is the first micro-batch of a step, which gathers kept weights.
        """
        activation, weight = self._unit(choice)
        steps = self._steps(choice)
        if choice.keep_weight and not first:
            weight = 0.0
        if self.replicated:  # all-reduced at the end of a section
            left = choice.stays == "input"
            return self._traffic(2 * activation * left, weight, 1, 1)
        return self._traffic(activation, weight, steps * choice.n_chunks, steps)

    def backward(self, choice: Choice) -> Traffic:
        """Returns the traffic of one such product in the backward pass of a micro-batch."""
        activation, weight = self._unit(choice)
        steps = self._steps(choice)
        if self.replicated:  # all-reduced at the start of the section
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
        """Returns the traffic of the recomputed forward pass, in addition to `backward`."""
        product = choice.product
        if self.work.recompute != "full" or product.section == "head" or product.ends_block:
            return Traffic(0.0, 0.0, 0)
        return self.forward(choice, first=False)

    def inputs_again(self) -> float:
        """Returns the elements of saved block inputs that a device receives per micro-batch.

        Blocks that are recomputed save their inputs. If all devices have an input, each keeps a
        part of it and gathers the others. If only the first device of a row has it, it scatters
        parts to the others in the forward pass and gathers them in the backward pass.
        """
        if self.work.recompute != "full" or self.between == "cut":
            return 0.0
        share = (self.cols - 1) / self.cols if self.replicated else 2 / self.cols
        return self.block_inputs * share * (self.cols > 1)

    def step(self, choice: Choice) -> Traffic:
        """Returns the traffic of all products of this name in one optimizer step."""
        m, count = self.work.micro_batches, choice.product.count
        first, later = self.forward(choice), self.forward(choice, first=False)
        back = self.backward(choice) + self.again(choice)
        return Traffic(
            count * (first.col + (m - 1) * later.col + m * back.col),
            count * (first.row + (m - 1) * later.row + m * back.row),
            count * (first.messages + (m - 1) * later.messages + m * back.messages),
        )

    def gathered_bytes(self, choice: Choice) -> float:
        """Returns the bytes of gathered operands that the `gather` schedule holds for one product.

        The device's own block of the weight does not count.
        """
        product, rows = choice.product, 1 - 1 / self.rows
        weight = product.n_in * choice.n_out / self.cols * rows * self.work.itemsize
        return self.activation_bytes(choice) / choice.n_chunks + weight

    def activation_bytes(self, choice: Choice) -> float:
        """Returns the bytes of the full activation that is gathered or summed for one product."""
        product = choice.product
        if self.cols == 1 or self.replicated or choice.common:
            return 0.0
        width = product.n_in if choice.stays == "output" else choice.n_out
        return self.work.rows_of(product) / self.rows * width * self.work.itemsize

    def kept_bytes(self, choice: Choice) -> float:
        """Returns the bytes that a device holds longer for what all such products keep."""
        product, work, total = choice.product, self.work, 0.0
        if choice.keep_input and choice.stays == "output":
            total += work.rows_of(product) * product.n_in / self.rows * (1 - 1 / self.cols)
        if choice.keep_weight:
            # In addition to the device's own block of the weight.
            total += product.n_in * choice.n_out / self.cols
        return total * product.count * work.itemsize

    def _unit(self, choice: Choice) -> tuple[float, float]:
        """Returns the elements received to gather the activation, and the weight, once."""
        product, r, c = choice.product, self.rows, self.cols
        if choice.common:
            return 0.0, 0.0
        width = product.n_in if choice.stays == "output" else choice.n_out
        share = (c - 1) / c if self.between != "first" else float(c > 1)
        activation = share / r * self.work.rows_of(product) * width
        return activation, (r - 1) / (r * c) * product.n_in * choice.n_out

    @property
    def panels(self) -> int:
        """Into how many panels the operands of a product are cut that go panel by panel."""
        return self.rows + self.cols - math.gcd(self.rows, self.cols)

    def _steps(self, choice: Choice) -> int:
        return 1 if choice.schedule == "gather" else self.panels

    def _traffic(self, col: float, row: float, col_messages: int, row_messages: int) -> Traffic:
        messages = (col_messages if col else 0) + (row_messages if row else 0)
        return Traffic(col, row, messages)


def blocks_of(pieces: int, columns: int) -> int:
    """Returns over how many blocks of columns a part of a product is sharded.

    The columns of a block hold the same pieces.

    Args:
        pieces: Pieces of the part that are never split, such as heads of keys; 0 if it must divide
            over columns.
        columns: Number of columns of devices, or branches.
    """
    return math.gcd(pieces, columns) if pieces else columns


@lru_cache(maxsize=64)
def products_of(model: ModelConfig) -> list[Product]:
    """Returns the distinct products of a model in forward order, with their counts."""
    import torch

    from gridformer.models import blocks, build_model

    sized = model.model_copy(update={"vocab_size": max(model.vocab_size, 1)})
    with torch.device("meta"):
        modules = [*build_model(sized).modules()]
    norms = (blocks.LayerNorm, blocks.RMSNorm)
    read = {module.reader for module in modules if isinstance(module, norms)}
    found: dict[str, Product] = {}
    for module in modules:
        if isinstance(module, blocks.Linear | blocks.JoinedLinear):
            role = module.role
            parts: tuple[tuple[int, int], ...] = ()
            if isinstance(module, blocks.JoinedLinear):
                n_in, n_out = module.n_in, module.n_out
                parts = tuple((part.weight.shape[1], part.pieces) for part in module.parts())
            else:
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
                parts=parts,
            )
        elif isinstance(module, blocks.TiedHead):
            h, v = sized.hidden_size, sized.vocab_size
            product = Product("head", h, v, 1, normed="head" in read)
        else:
            continue
        before = found.get(product.name)
        found[product.name] = replace(product, count=before.count + 1) if before else product
    return [*found.values()]
