"""Formulas of the bytes that the token table, its gradient and the logits of a loss take."""

from __future__ import annotations

from gridformer.config import RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.cost import Choices


def table_bytes(run: RunConfig, choices: Choices) -> tuple[float, float]:
    """Returns the bytes of a table's parts that a column of devices and that a device has."""
    table = run.model.vocab_size * run.model.hidden_size * 4.0
    if "head" in choices.products and choices["head"].common:
        return table, table
    return table / choices.cols, table / choices.cols / choices.rows


def table_gradient(run: RunConfig, choices: Choices, uses: int) -> float:
    """Returns the bytes of a table's gradient, beyond its state, at the end of a backward pass.

    Several lookups, or a lookup and a tied head, each make a gradient, and then their sum. Where
    rows of devices share a table, the gradient of a lookup covers the whole column until the
    devices have summed it, and the result of that sum is one more block.

    Args:
        run: The run.
        choices: Its choices.
        uses: How many lookups, and heads, the rank has of the table.
    """
    layout = run.layout
    if not uses:
        return 0.0
    column, block = table_bytes(run, choices)
    made = 3 * block if uses > 1 else block
    if block < column:
        made += column if uses > 1 else column + block
    if layout.micro_batches > 1:
        return made
    return made - block / (1 if layout.dp_mode == "replicate" else layout.dp)


def moved_moments(run: RunConfig, choices: Choices) -> float:
    """Returns the bytes of offloaded moments that are on a device while tables are updated."""
    if run.train.offload != "optimizer" or not on_gpu(run):
        return 0.0
    _, block = table_bytes(run, choices)
    tables = 1 if run.model.tied_head else 2
    return 2 * block * tables / (1 if run.layout.dp_mode == "replicate" else run.layout.dp)


def loss_bytes(run: RunConfig, choices: Choices) -> float:
    """Returns the most bytes that the head and its loss have besides the states.

    These are the logits, in the type of the computation and of the loss, and the gradient of the
    table, which chunks of the loss add up. Rows of devices that share a table gather it first.
    """
    if not run.model.token_head:
        return 0.0
    work, head = choices.work, choices["head"]
    n, itemsize = _logits(run, choices), work.itemsize
    wide = max(4, itemsize)
    column, block = table_bytes(run, choices)
    if head.schedule != "gather":
        column = block
    # Gathered, or cast for this use only.
    copied = block < column or (itemsize < 4 and not choices.cast_once)
    gathered = column * itemsize / 4 if copied else 0.0
    summed = column if choices.loss_chunks(head) > 1 else 0.0
    in_parts = not head.common and choices.cols > 1
    if in_parts:
        forward = (wide + itemsize) * n
    else:  # logarithms beside what they are of
        forward = (2 * wide + itemsize * (itemsize < wide)) * n
    product = column  # of the table's gradient
    if block < column:
        product *= itemsize / 4
    elif in_parts:
        product *= 1 + itemsize / 4 * (itemsize < 4)
    elif summed and itemsize < 4:  # is added in place
        product = 0.0
    most = max(forward, itemsize * n + product) + summed + gathered
    between = choices.rows * choices.cols if choices.between == "cut" else 1
    # What the last layer returns and, of a loss in chunks, its gradient.
    hidden = work.tokens * run.model.hidden_size * itemsize / between
    most += hidden * (2 if summed else 1)
    if run.layout.micro_batches > 1:
        return most
    return most - block / (1 if run.layout.dp_mode == "replicate" else run.layout.dp)


def _logits(run: RunConfig, choices: Choices) -> float:
    """Returns how many logits exist at a time."""
    work = choices.work
    replicated = choices.between != "cut"
    rows = work.tokens if replicated else work.tokens / choices.rows
    width: float = run.model.vocab_size
    if choices["head"].common:
        rows = work.tokens if replicated else work.tokens / choices.cols
    else:
        width /= choices.cols
    return min(rows, work.loss_chunk_tokens or rows) * width
