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
from typing import Literal

from gridformer.config import RunConfig
from gridformer.parallel.auto.products import Product, Work, blocks_over

ScheduleName = Literal["broadcast", "pipelined", "gather"]
Stationary = Literal["output", "input", "weight"]


@dataclass(frozen=True)
class Choice:
    """How one product is carried out.

    Attributes:
        stationary: Which of output, input and weight is not sent.
        schedule: How the other operands travel (gridformer.parallel.tensor.summa).
        n_chunks: Number of chunks in which activations are gathered or summed.
        whole_backward: Whether chunks only hide messages, and save no memory: the backward pass
            holds whole activations, and has chunks only where both products wait for a message.
        keep_input: Whether the gathered input is kept for the backward pass.
        keep_weight: Whether the gathered weight is kept for the whole step.
        common: Whether every process computes the full product for its own samples.
    """

    product: Product
    stationary: Stationary = "output"
    schedule: ScheduleName = "gather"
    n_chunks: int = 1
    whole_backward: bool = False
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
        return round(self.product.n_in * self.n_out * self.product.count * self.product.held)

    @property
    def kept(self) -> str:
        """Which gathered operands are kept, in a word, or nothing."""
        kept = ["input"] * self.keep_input + ["weight"] * self.keep_weight
        return "both" if len(kept) > 1 else "".join(kept)


@dataclass(frozen=True)
class Timed:
    """Seconds of all products of a name in a step, and what volumes would have chosen."""

    seconds: float
    by_rules: Choice
    by_rules_s: float


@dataclass(frozen=True)
class Traffic:
    """The elements and messages that one device receives for a product.

    Attributes:
        col: Elements over the axis `col`: activations, along the rows of the grid.
        row: Elements over the axis `row`, down the columns of the grid: weights, or activations
            where weights are stationary.
        messages: Number of messages.
    """

    col: float
    row: float
    messages: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.col + other.col, self.row + other.row, self.messages + other.messages)


def _traffic(col: float, row: float, col_messages: int, row_messages: int) -> Traffic:
    """Returns traffic without the messages that would be empty."""
    return Traffic(col, row, bool(col) * col_messages + bool(row) * row_messages)


@dataclass(frozen=True)
class Choices:
    """The choices for all products of a model on a grid, and the reasons for them.

    Attributes:
        between: How activations lie between sections: sharded (`cut`), `replicated` on every device
            as in plain Megatron, or only on the `first` device of a row as in D&SP-cSub.
        parameters: Elements of the model's matrices, with heads that several devices hold.
        table: Elements of an embedding's table that the head does not share.
        held_bytes: Approximate bytes that a device holds if nothing is kept gathered.
        block_inputs: Elements of the inputs of all blocks in one micro-batch.
        sequence_rows: Rows that divide each sequence, over which attention gathers keys and values.
        heads_over_rows: Whether heads are redistributed over these rows instead.
        cast_once: Whether a weight is cast to the type of the computation once a step and the copy
            is kept for all products of the step, or cast for each product.
        reshard: When layers free the parameters that they gather, with fsdp.
        late_gradients: Whether a weight's gradient is multiplied in the backward pass of the
            product before, while that waits for an activation.
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
    sequence_rows: int = 1
    heads_over_rows: bool = False
    cast_once: bool = True
    reshard: Literal["layer", "step"] = "layer"
    late_gradients: bool = False
    reasons: list[str] = field(default_factory=list)
    timed: dict[str, Timed] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Choice:
        return self.products[name]

    @property
    def holds_weights(self) -> bool:
        """Whether weights are stationary, so that a device multiplies all tokens of a replica."""
        return any(choice.stationary == "weight" for choice in self.products.values())

    @property
    def within(self) -> int:
        """Over how many devices heads, columns of a feed-forward and logits are divided."""
        return self.rows * self.cols if self.holds_weights else self.cols

    @property
    def replicated(self) -> bool:
        """Whether every device holds all of the activations between sections."""
        return self.between == "replicated"

    @property
    def routed_apart(self) -> int:
        """Over how many devices the tokens that travel to experts are divided.

        In D&SP-cSub each of them travels from the first device of a row, or from all.
        """
        return self.rows * (1 if self.between == "first" else self.cols)

    # ------------------------------------------------------------------ parameters

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
        for product in (c.product for c in self.products.values() if not c.common):
            if product.copied:
                several = sum(n for n, pieces in product.parts if pieces % self.cols)
                mine += product.n_in * product.count * (product.copied + several)
        return mine / (self.rows * self.cols)

    # ------------------------------------------------------------------ traffic

    def forward(self, choice: Choice, first: bool = True) -> Traffic:
        """Returns the traffic of one such product in the forward pass of a micro-batch.

        Only the first micro-batch of a step gathers kept weights.
        """
        if choice.stationary == "weight":
            return sum(self.ends(choice), Traffic(0.0, 0.0, 0))
        activation, weight = self._unit(choice)
        if choice.keep_weight and not first:
            weight = 0.0
        if self.replicated:  # all-reduced at the end of a section
            closes = choice.stationary == "input"
            return _traffic(2 * activation * closes, weight, choice.n_chunks, 1)
        if choice.schedule != "gather":  # the panels of the table travel for each chunk of tokens
            chunks = self.loss_chunks(choice)
            steps = self.panels * chunks
            return _traffic(activation, weight * chunks, steps, steps)
        return _traffic(activation, weight, choice.n_chunks, 1)

    def backward(self, choice: Choice) -> Traffic:
        """Returns the traffic of one such product in the backward pass of a micro-batch."""
        if choice.stationary == "weight":
            enter, leave = self.ends(choice)
            return leave + enter if choice.keep_input else leave + enter + enter
        activation, weight = self._unit(choice)
        chunks = choice.n_chunks
        if choice.whole_backward and choice.stationary == "output":
            chunks = 1
        if self.replicated:  # all-reduced at the start of the section
            return _traffic(2 * activation * (choice.stationary == "output"), weight, chunks, 1)
        if choice.schedule != "gather":
            chunks = self.loss_chunks(choice)
            steps = 2 * self.panels * chunks
            return _traffic(2 * activation, 2 * weight * chunks, steps, steps)
        inputs = 1 + (choice.stationary == "output" and not choice.keep_input)  # gathered again
        weights = 1 + (not choice.keep_weight)
        return _traffic(inputs * activation, weights * weight, inputs * chunks, weights)

    def again(self, choice: Choice) -> Traffic:
        """Returns the traffic of the recomputed forward pass, in addition to `backward`."""
        product = choice.product
        if not self.work.recomputed or product.section == "head" or product.ends_block:
            return Traffic(0.0, 0.0, 0)
        return self.forward(choice, first=False)

    def step(self, choice: Choice) -> Traffic:
        """Returns the traffic of all products of this name in one optimizer step."""
        m, count = self.work.micro_batches, choice.product.count
        first = self.forward(choice)
        later = self.forward(choice, first=False) if choice.keep_weight else first
        again, share = self.again(choice), self.work.recomputed
        again = Traffic(again.col * share, again.row * share, round(again.messages * share))
        back = self.backward(choice) + again
        return Traffic(
            count * (first.col + (m - 1) * later.col + m * back.col),
            count * (first.row + (m - 1) * later.row + m * back.row),
            count * (first.messages + (m - 1) * later.messages + m * back.messages),
        )

    def inputs_again(self) -> float:
        """Returns the elements of saved block inputs that a device receives per micro-batch.

        Blocks that are recomputed save their inputs. If all devices have an input, each keeps a
        part of it and gathers the others. If only the first device of a row has it, it scatters
        parts to the others in the forward pass and gathers them in the backward pass.
        """
        if not self.work.recomputed or self.between == "cut":
            return 0.0
        share = (self.cols - 1) / self.cols if self.replicated else 2 / self.cols
        return self.block_inputs * share * (self.cols > 1) * self.work.recomputed

    def ends(self, choice: Choice) -> tuple[Traffic, Traffic]:
        """Returns the traffic to gather the input and to sum the output of a stationary weight."""
        if choice.common:
            return Traffic(0.0, 0.0, 0), Traffic(0.0, 0.0, 0)
        product, r, c, n_out = choice.product, self.rows, self.cols, choice.product.n_out
        if product.parts:
            # Rows of devices that need the same heads of keys get a copy each.
            n_out = sum(
                n * r * c // math.prod(blocks_over(pieces, c, r)) for n, pieces in product.parts
            )
        tokens = self.work.rows_of(product) / (r * c)
        if product.closes:
            enter = _traffic(0.0, tokens * (r - 1) * product.n_in, 1, 1)
            return enter, _traffic(tokens * (c - 1) * n_out, 0.0, 1, 1)
        enter = _traffic(tokens * (c - 1) * product.n_in, 0.0, 1, 1)
        return enter, _traffic(0.0, tokens * (r - 1) * n_out, 1, 1)

    def gathered_keys(self, choice: Choice) -> float:
        """Returns the elements of keys and values that attention gathers over rows in a layer."""
        product = choice.product
        if self.sequence_rows == 1 or self.heads_over_rows or not product.keys:
            return 0.0
        return self.work.rows_of(product) * (product.keys + product.copied) / self.cols

    def redistributed(self, choice: Choice) -> float:
        """Returns the elements of queries, keys, values or results that are sent to have heads."""
        product = choice.product
        if not self.heads_over_rows or product.section != "attention":
            return 0.0
        width = product.n_in if product.closes else choice.n_out
        return self.work.rows_of(product) * width / (self.rows * self.cols)

    def received_keys(self) -> float:
        """Returns the elements that attention receives over rows in a step, with gradients."""
        total, selective = 0.0, self.work.recompute == "selective"
        for choice in self.products.values():
            each = (self.gathered_keys(choice) + self.redistributed(choice)) * choice.product.count
            # Attention that is recomputed alone ends before its result is sent.
            again = not choice.product.closes if selective else self.work.recomputed
            total += each * (2 + again)
        return total * (1 - 1 / self.sequence_rows) * self.work.micro_batches

    def _unit(self, choice: Choice) -> tuple[float, float]:
        """Returns the elements received to gather the activation, and the weight, once."""
        product, r, c = choice.product, self.rows, self.cols
        if choice.common:
            return 0.0, 0.0
        width = product.n_in if choice.stationary == "output" else choice.n_out
        share = (c - 1) / c if self.between != "first" else float(c > 1)
        activation = share / r * self.work.rows_of(product) * width
        weight = product.n_in * choice.n_out * product.held
        return activation, (r - 1) / (r * c) * weight

    # ------------------------------------------------------------------ memory

    def gathered_bytes(self, choice: Choice) -> float:
        """Returns the bytes that the `gather` schedule adds to a device's own blocks."""
        if choice.stationary == "weight":
            return self.activation_bytes(choice)
        product, rows = choice.product, 1 - 1 / self.rows
        weight = product.n_in * choice.n_out / self.cols * rows * self.work.itemsize
        return self.held_at_a_time(choice) + weight

    def held_at_a_time(self, choice: Choice) -> float:
        """Returns the most bytes that are gathered of an activation at a time for one product."""
        chunks = 1 if choice.whole_backward else choice.n_chunks
        return self.activation_bytes(choice) / chunks

    def activation_bytes(self, choice: Choice) -> float:
        """Returns the bytes of the full activation that is gathered or summed for one product."""
        product = choice.product
        if choice.stationary == "weight" and not choice.common:
            over = self._gathers_over(choice)
            width = product.n_in * (over > 1) * over / (self.rows * self.cols)
            return self.work.rows_of(product) * width * self.work.itemsize
        if self.cols == 1 or self.replicated or choice.common:
            return 0.0
        width = product.n_in if choice.stationary == "output" else choice.n_out
        return self.work.rows_of(product) / self.rows * width * self.work.itemsize

    def keeping(self, choice: Choice, inputs: bool, weights: bool) -> Choice:
        """Returns a choice that keeps these operands, where it gathers them."""
        gathers = choice.schedule == "gather"
        if choice.stationary == "weight":
            inputs = inputs and self._gathers_over(choice) > 1 and not choice.common
            return replace(choice, keep_input=inputs)
        over_cols = self.cols > 1 and not self.replicated and not choice.common
        inputs = inputs and gathers and over_cols and choice.stationary == "output"
        weights = weights and gathers and self.rows > 1
        if (inputs, weights) == (choice.keep_input, choice.keep_weight):
            return choice
        chunks = (1, False) if inputs else (choice.n_chunks, choice.whole_backward)
        option = replace(choice, keep_input=inputs, keep_weight=weights)
        return replace(option, n_chunks=chunks[0], whole_backward=chunks[1])

    def kept_bytes(self, choice: Choice) -> float:
        """Returns the bytes that a device holds longer for what all such products keep."""
        product, work, total = choice.product, self.work, 0.0
        if choice.keep_input and choice.stationary == "weight":
            over = self._gathers_over(choice)
            total += work.rows_of(product) * product.n_in * (over - 1) / (self.rows * self.cols)
        if choice.keep_input and choice.stationary == "output":
            total += work.rows_of(product) * product.n_in / self.rows * (1 - 1 / self.cols)
        if choice.keep_weight:
            # In addition to the device's own block of the weight.
            total += product.n_in * choice.n_out / self.cols
        return total * product.count * work.itemsize

    def _gathers_over(self, choice: Choice) -> int:
        """Returns over how many devices the input of a stationary weight is gathered."""
        return self.rows if choice.product.closes else self.cols

    # ------------------------------------------------------------------ tokens and panels

    @property
    def row_sequences(self) -> int:
        """The sequences of a micro-batch of which a row of devices has tokens."""
        rows = 1 if self.holds_weights else self.rows
        return max(1, self.work.sequences * self.sequence_rows // rows)

    def tokens(self, product: Product) -> int:
        """Returns the rows of a product's input on one device, which has some of its columns."""
        return max(1, self.work.rows_of(product) // (1 if self.holds_weights else self.rows))

    def head_tokens(self, choice: Choice) -> float:
        """Returns for how many tokens a device computes a product of the head."""
        cut = choice.common and self.between == "cut"
        return self.tokens(choice.product) / (self.cols if cut else 1)

    def loss_chunks(self, choice: Choice) -> int:
        """Returns in how many chunks of tokens the product is computed: the head, for its loss."""
        at_a_time = self.work.loss_chunk_tokens
        if choice.product.name != "head" or not at_a_time:
            return 1
        return max(1, math.ceil(self.head_tokens(choice) / at_a_time))

    @property
    def panels(self) -> int:
        """Into how many panels the operands of a product are cut that go panel by panel."""
        return self.rows + self.cols - math.gcd(self.rows, self.cols)


def resolved(run: RunConfig, choices: Choices) -> RunConfig:
    """Returns the run with what was decided in place of `layout.reshard: auto`."""
    if run.layout.reshard != "auto":
        return run
    layout = run.layout.model_copy(update={"reshard": choices.reshard})
    return run.model_copy(update={"layout": layout})
