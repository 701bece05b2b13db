"""Approximate memory of a device by formulas, instantly where `estimate` takes seconds.

The formulas cover the matrices among parameters, and the activations that every layer keeps.
`gridformer memory` finds the exact number of bytes by running the code (memory/estimate.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gridformer.config import RunConfig
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.decisions import state_bytes, work_of
from gridformer.parallel.auto.heuristics import decide

_NORM_COPIES = 5  # of an activation, in float32, in the backward pass of an RMSNorm
_FREED = 0.6  # the fraction of what a layer has kept that is free by then


def states_of(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer per device, averaged over the stages.

    This is a lower bound of what the fullest device holds with any batch.
    """
    choices = decide(run.model, run.layout, work_of(run))
    return sum(_states(run, choices)) / run.layout.pp


def total_states(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer of all devices of one replica."""
    choices = decide(run.model, run.layout, work_of(run))
    copies = _copy_bytes(run, choices, run.layout.dp)
    return float(choices.parameters) * (choices.work.state_bytes + copies)


def quick_estimate(run: RunConfig) -> float:
    """Returns the approximate peak of the fullest device in bytes."""
    return quick_peak(run, decide(run.model, run.layout, work_of(run)))


def quick_peak(run: RunConfig, choices: Choices) -> float:
    """Like `quick_estimate`, for a caller that has the run's choices."""
    pp = run.layout.pp
    in_layers, head = _states(run, choices)
    n_layers = run.model.n_layers + (run.model.n_decoder_layers if run.model.two_stacks else 0)
    # The fraction of the layers in the fullest stage; the partition counts the head's work as that
    # of some layers.
    head_layers = run.model.vocab_size * run.model.hidden_size / run.model.layer_elements
    share = min(1.0, math.ceil((n_layers + head_layers) / pp) / n_layers)
    states = in_layers * share + head
    activations = (_kept(run, choices) + _kept_inputs(choices)) * share
    logits = _logits(run, choices)
    backward = _backward(run, choices, n_layers)
    if pp == 1:
        if run.layout.micro_batches == 1 and run.layout.dp_mode == "replicate":
            # When the backward pass of the last layer runs, the others have no gradients yet.
            grid = choices.rows * choices.cols
            backward -= _layer_elements(choices) / grid * 4 * (1 - 1 / n_layers)
        return states + activations + max(logits, backward)
    # The first stage has the most micro-batches in flight, the last stage has the logits.
    under_way = run.layout.micro_batches
    if run.layout.pipeline_order != "gpipe":
        under_way = min(pp, under_way)
    return states + max(under_way * activations + max(0.0, backward), activations + logits)


def _backward(run: RunConfig, choices: Choices, n_layers: int) -> float:
    """Returns the most bytes that a layer's backward pass has besides what is kept for it.

    In the middle of the feed-forward network these are its gradients, of a gated one for both of
    its parts and their product. At an RMSNorm, which is made of many kernels, they are copies in
    float32, when a part of what the layer has kept is free.
    """
    work, grid, h = choices.work, choices.rows * choices.cols, run.model.hidden_size
    wide = 0.0
    for choice in choices.products.values():
        product = choice.product
        if product.section == "feed_forward" and not product.closes:
            copies = 2 if product.parts else 1
            wide = max(wide, copies * work.rows_of(product) * choice.n_out / grid * work.itemsize)
    found = wide
    if run.model.family in ("t5", "llama") and work.itemsize < 4:
        between = 1 / grid if choices.between == "cut" else 1.0
        rows = max(work.tokens, work.source)
        plain = replace(work, recompute="none")
        kept = _kept(run, replace(choices, work=plain)) / n_layers
        found = max(found, _NORM_COPIES * rows * h * between * 4 - _FREED * kept)
    return found


def _layer_elements(choices: Choices) -> float:
    """Returns the elements of the matrices of all layers."""
    each = choices.products.values()
    return float(sum(one.elements for one in each if one.product.section != "head"))


def _states(run: RunConfig, choices: Choices) -> tuple[float, float]:
    """Returns bytes of matrices with gradients and moments: those of all layers, and the others.

    Both are for a device that holds its shards of all stages.
    """
    layout, grid, layers, head = run.layout, choices.rows * choices.cols, 0.0, 0.0
    each: float
    of_common: float
    everywhere = layout.branches if choices.between == "cut" else 1  # replicas of common layers
    each, of_common = choices.work.state_bytes, state_bytes(run, layout.dp * everywhere)
    each += _copy_bytes(run, choices, layout.dp)
    of_common += _copy_bytes(run, choices, layout.dp * everywhere)
    for choice in choices.products.values():
        held = choice.elements + (choices.table if choice.product.name == "head" else 0)
        held_bytes = held * of_common if choice.common else held * each / grid
        if choice.product.section == "head":
            head += held_bytes
        else:
            layers += held_bytes
    return layers, head


def _copy_bytes(run: RunConfig, choices: Choices, replicas: int) -> float:
    """Returns the bytes per parameter of copies in the type of the computation.

    Args:
        run: The run.
        choices: Its choices.
        replicas: Number of replicas that share sharded state.
    """
    if choices.work.itemsize > 2 or not choices.cast_once:
        return 0.0
    return choices.work.itemsize / (replicas if run.layout.dp_mode == "fsdp" else 1)


def _kept(run: RunConfig, choices: Choices) -> float:
    """Returns the bytes that all layers keep of one micro-batch for its backward pass.

    A product that opens a section keeps its norm's input and output, and its own output; a product
    that closes a section keeps its input.
    """
    work, h, grid = choices.work, run.model.hidden_size, choices.rows * choices.cols
    # The fraction of an activation between sections that a device holds.
    between = 1 / grid if choices.between == "cut" else 1.0
    kept = 0.0
    for choice in choices.products.values():
        product = choice.product
        if product.section == "head":
            continue
        rows = work.rows_of(product)
        inside = rows * (between if choice.common else 1 / grid)
        around = 0.0 if product.closes else 2 * rows * h * between
        width = product.n_in if product.closes else choice.n_out
        kept += (around + inside * width) * product.count
    n_layers = run.model.n_layers + (run.model.n_decoder_layers if run.model.two_stacks else 0)
    if work.recompute == "full":  # the inputs of all layers, and everything of one layer
        rows = max(work.tokens, work.source)
        kept = rows * h * between * n_layers + kept / n_layers
    return kept * work.itemsize


def _kept_inputs(choices: Choices) -> float:
    return sum(choices.kept_bytes(choice) for choice in choices.products.values())


def _logits(run: RunConfig, choices: Choices) -> float:
    """Returns bytes of logits, probabilities and their gradients that exist at a time."""
    work = choices.work
    if not run.model.token_head:
        return 0.0
    replicated = choices.between != "cut"
    rows = work.tokens if replicated else work.tokens / choices.rows
    width: float = run.model.vocab_size
    if choices["head"].common:
        rows = work.tokens if replicated else work.tokens / choices.cols
    else:
        width /= choices.cols
    return 3 * min(rows, work.loss_chunk_tokens or rows) * width * 4
