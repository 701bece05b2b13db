"""Formulas of the bytes that the layers of a model keep for their backward pass."""

from __future__ import annotations

from gridformer.config import RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Product
from gridformer.parallel.pipeline.stage_shares import stack_of, stacks_of
from gridformer.parallel.registry import spec_of


def kept_by_layers(run: RunConfig, choices: Choices) -> dict[str, float]:
    """Returns the bytes that all layers of each stack keep of a micro-batch without recomputation.

    A product that opens a section keeps its norm's input and output, and its own output; a product
    that closes a section keeps its input. The input of a LayerNorm is kept in the type of norms,
    that of an RMSNorm in the type of the computation unless devices share its rows. Two products
    differ: the keys and values of a decoder read the encoder's output, which is kept once, and a
    ReLU keeps its output only. Rotated queries and keys are kept beside the values.
    """
    work, h, grid = choices.work, run.model.hidden_size, choices.rows * choices.cols
    # The fraction of an activation between sections that a device holds.
    between = 1 / grid if choices.between == "cut" else 1.0
    lies = spec_of(run.layout).boundary(run.layout).lies
    kept = dict.fromkeys(stacks_of(run), 0.0)
    for choice in choices.products.values():
        product = choice.product
        if product.section == "head":
            continue
        rows = work.rows_of(product)
        inside = rows * (between if choice.common else 1 / grid)
        in_type = rms_norms(run) and lies != "h"
        norm = 1.0 if in_type else max(4, work.itemsize) / work.itemsize
        if lies == "h" and choice.norm_inside:  # is a part of the product, which computes it again
            norm = 0.0
        own_input = not product.closes and not _reads_memory(product)
        around = (1 + norm) * rows * h * between if own_input else 0.0
        width: float = product.n_in if product.closes else choice.n_out
        if product.section == "feed_forward" and not product.closes and _has_relu(run):
            width = 0.0
        elif product.section == "attention" and product.parts:
            n, m = run.model.n_heads, run.model.kv_heads
            width *= 1 + (n + m) / (n + 2 * m)
        kept[stack_of(product)] += (around + inside * width) * product.count * work.itemsize
    return kept


def rms_norms(run: RunConfig) -> bool:
    """Whether norms are RMSNorms, which are made of many kernels."""
    return run.model.family in ("t5", "llama")


def _has_relu(run: RunConfig) -> bool:
    return run.model.family in ("t5", "transformer")


def _reads_memory(product: Product) -> bool:
    """Whether a product of a decoder reads the encoder's output."""
    return product.reads == "source" and stack_of(product) == "decoder"


def scores_of_layers(run: RunConfig, choices: Choices) -> dict[str, float]:
    """Returns how many scores of attention a device computes in all layers of each stack.

    There are none where a kernel is fused. Without gridformer's kernel, dropout of their
    probabilities or a learned bias makes torch keep them.
    """
    model, work = run.model, choices.work
    found = dict.fromkeys(stacks_of(run), 0.0)
    if on_gpu(run) and run.train.kernels != "torch":
        return found
    if not model.attention_dropout and model.family != "t5":
        return found
    keys, heads = run.seq_len, model.n_heads / (choices.rows * choices.cols)
    if not model.two_stacks:
        return {"": model.n_layers * work.tokens * keys * heads}
    found["encoder"] = model.n_layers * work.source * run.source_len * heads
    if model.attention_dropout:  # the bias is that of attention to the same tokens
        keys += run.source_len
    found["decoder"] = model.n_decoder_layers * work.tokens * keys * heads
    return found


def inputs_of_layers(run: RunConfig, choices: Choices) -> tuple[dict[str, float], float]:
    """Returns the bytes of the inputs of each stack's layers, and what is gathered of one of them.

    Recomputed layers keep them. Where all devices have an input, each keeps a part of it.
    """
    work, grid = choices.work, choices.rows * choices.cols
    stacks = stacks_of(run)
    one = {stack: work.source if stack == "encoder" else work.tokens for stack in stacks}
    one = {stack: rows * run.model.hidden_size * work.itemsize for stack, rows in one.items()}
    parts = grid if choices.between != "first" else 1
    inputs = {stack: one[stack] / parts * n for stack, n in stacks.items()}
    return inputs, max(one.values()) if choices.between == "replicated" else 0.0
