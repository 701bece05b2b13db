"""Approximate memory of a device by formulas, instantly where `estimate` takes seconds.

The formulas cover the matrices among parameters, and the activations that every layer keeps.
`gridformer memory` finds the exact number of bytes by running the code (memory/estimate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gridformer.config import LayoutConfig, RunConfig
from gridformer.memory.analytic_layers import (
    inputs_of_layers,
    kept_by_layers,
    rms_norms,
    scores_of_layers,
)
from gridformer.memory.analytic_table import (
    loss_bytes,
    moved_moments,
    table_bytes,
    table_gradient,
)
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.work import replica_work, resolved, state_bytes
from gridformer.parallel.data.buckets import BUCKET_BYTES
from gridformer.parallel.pipeline.stage_shares import (
    StageShares,
    shares_of_ranks,
    stack_of,
    stacks_of,
)
from gridformer.parallel.registry import spec_of

_RESIDUAL = 2  # of an activation between sections: a gradient, and the next one computed from it
_NORM_COPIES = 5  # of an activation, in float32, in the backward pass of an RMSNorm
_NORM_OF_WHOLE = 5.5  # the same where the norm is computed of gathered rows
_FREED = 0.6  # the fraction of what a layer has kept that is free by then
# Where a feed-forward network gathers its input, these are held at the end of its backward pass:
_WHOLE = 2  # gathered activations, the input and the sum for its gradient
_BLOCKS = 3  # over gloo, the blocks of such activations that other devices send
_PANELS = 8  # panels of activations for which a product that goes panel by panel has room
_SCORE = 12  # bytes of a score that is not in a fused kernel, in the backward pass of its layer
_UNDER_WAY = 2  # messages of gradients that a backward pass does not wait for
_GRADIENTS = 5.5  # gradients of a layer's widest product with FSDP: made, joined and in messages


def states_of(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer per device, averaged over the stages.

    This is a lower bound of what the fullest device holds with any batch.
    """
    choices = decide(run.model, run.layout, replica_work(run))
    layers, head = _states(resolved(run, choices), choices)
    return (sum(layers.values()) + head) / run.layout.pp


def total_states(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer of all devices of one replica."""
    choices = decide(run.model, run.layout, replica_work(run))
    copies = _copy_bytes(resolved(run, choices), choices, run.layout.dp)
    states = state_bytes(run, run.layout.dp)
    return float(choices.parameters) * (states + copies)


def quick_estimate(run: RunConfig) -> float:
    """Returns the approximate peak of the fullest device in bytes."""
    return quick_peak(run, decide(run.model, run.layout, replica_work(run)))


def quick_peak(run: RunConfig, choices: Choices) -> float:
    """Returns `quick_estimate`, in bytes, for a caller that has the run's choices."""
    return max(quick_peaks(run, choices))


def quick_peaks(run: RunConfig, choices: Choices) -> list[float]:
    """Returns the approximate peak of the fullest device of each place along pp, in bytes."""
    run = resolved(run, choices)
    made = _Made.of(run, choices)
    ranks = enumerate(shares_of_ranks(run))
    return [_peak_of_rank(run, choices, made, rank, part) for rank, part in ranks]


@dataclass(frozen=True)
class _Made:
    """The memory that a step allocates on a device that has all layers, in bytes.

    Attributes:
        layers: Parameters, gradients and moments of each stack's layers.
        head: Those of everything else.
        stays: The activations that each stack's layers keep of one micro-batch.
        inputs: Gathered inputs that all layers keep of one micro-batch.
        weights: Gathered weights that all layers keep.
        backward: The additional memory of a layer's backward pass.
        loss: The same of the head and its loss.
        gradients: The gradients of all layers when a step ends.
        replicas: The memory that replicas take besides their shards.
    """

    layers: dict[str, float]
    head: float
    stays: dict[str, float]
    inputs: float
    weights: float
    backward: float
    loss: float
    gradients: float
    replicas: _Replicas

    @staticmethod
    def of(run: RunConfig, choices: Choices) -> _Made:
        """Returns these bytes for a run without `reshard: auto`."""
        stacks, itemsize = stacks_of(run), choices.work.itemsize
        kept = kept_by_layers(run, choices)  # if none is recomputed
        scores = scores_of_layers(run, choices)
        kept_score = itemsize  # a probability
        if run.model.attention_dropout:  # before and after it, and its mask
            kept_score += itemsize + 1
        stays = {stack: kept[stack] + scores[stack] * kept_score for stack in stacks}
        inputs = sum(
            choices.kept_bytes(replace(choice, keep_weight=False))
            for choice in choices.products.values()
        )
        weights = choices.all_kept_bytes - inputs
        most_scores = max(scores[stack] / stacks[stack] for stack in stacks)
        again = most_scores * _SCORE
        if choices.work.recompute == "selective":
            again += most_scores * kept_score
            stays = kept
        if choices.work.recompute == "full":
            again += max(stays[stack] / stacks[stack] for stack in stacks)
            again += inputs / sum(stacks.values())
            inputs = 0.0
            stays, one = inputs_of_layers(run, choices)
            again += one
        replicas = _Replicas.of(run, choices)
        backward = _backward(run, choices, sum(kept.values()) / sum(stacks.values()))
        backward = max(backward + replicas.messages, replicas.gradients)
        layers, head = _states(run, choices)
        return _Made(
            layers,
            head,
            stays,
            inputs,
            weights,
            again + max(0.0, backward + replicas.held),
            loss_bytes(run, choices),
            _layer_gradients(run, choices),
            replicas,
        )


def _peak_of_rank(
    run: RunConfig, choices: Choices, made: _Made, rank: int, part: StageShares
) -> float:
    """Returns the approximate peak of the devices of one rank of a pipeline.

    Args:
        run: The run.
        choices: Its choices.
        made: The memory that a step allocates.
        rank: The place in the pipeline.
        part: Which part of the model it has.
    """
    layout, model, stacks = run.layout, run.model, stacks_of(run)
    pp, n_layers = layout.pp, sum(stacks.values())
    states, mine, n_mine = made.replicas.gathered, 0.0, 0.0
    for stack, share in part.layers:
        states += share * made.layers[stack]
        mine += share * made.stays[stack]
        n_mine += share * stacks[stack]
    mine += made.inputs * n_mine / n_layers
    states += made.weights * n_mine / n_layers
    under_way = _under_way(layout, rank) if pp > 1 else 1.0
    together = under_way == layout.micro_batches  # all begin before the first ends
    # Before the backward pass of the last layer there are no gradients of layers.
    absent = made.gradients if layout.micro_batches == 1 else 0.0
    end = 0.0
    if part.lookups or part.head:
        # A rank of a pipeline has the table of the embedding or that of the head.
        half = 1.0 if model.tied_head or pp == 1 else 0.5
        states += made.head * half
        uses = round(part.lookups * len(stacks))
        tied = int(part.head and model.tied_head and model.token_head)
        end = table_gradient(run, choices, uses + tied if uses else 0)
        if model.two_stacks and uses > (rank == 0):
            # The decoder's lookup comes before the encoder's layers.
            encoder = made.stays["encoder"] - absent * stacks["encoder"] / n_layers
            encoder = max(0.0, encoder * dict(part.layers)["encoder"])
            end = max(end, table_gradient(run, choices, 1 + tied) + encoder)
        end += made.replicas.messages + max(0.0, under_way - 1 - together) * mine
        end = max(end, made.replicas.updated, moved_moments(run, choices) * half)
    if pp > 1:
        most = under_way * mine + made.backward
        if together:
            most -= min(mine, made.gradients * max(0.0, n_mine - 1) / n_layers)
        most = max(most, mine + made.loss * part.head)
    else:
        most = mine + max(made.loss - absent, made.backward - absent * (1 - 1 / n_layers))
        most = max(most, mine / n_layers + made.backward)
    return states + max(most, end)


def _under_way(layout: LayoutConfig, rank: int) -> float:
    """Returns for how many micro-batches a rank of a pipeline keeps activations at a time.

    With k stages a rank, those are the passes of 1/k of its layers that it runs ahead; see
    `gridformer.parallel.pipeline.schedules`.
    """
    most, k = float(layout.micro_batches), layout.stages_per_rank
    if layout.pipeline_order == "gpipe":
        return most
    ahead = layout.pp - 1 - rank
    return min(most, ahead + 1 if k == 1 else ((k - 1) * layout.pp + 2 * ahead + 1) / k)


def _layer_gradients(run: RunConfig, choices: Choices) -> float:
    """Returns the bytes of the gradients of all layers that a device has at the end of a step."""
    whole = run.layout.dp_mode == "replicate" or run.layout.micro_batches > 1
    sharers = 1 if whole else run.layout.dp
    if run.train.update == "in_backward":
        return 0.0
    return _layer_elements(choices) / (choices.rows * choices.cols * sharers) * 4


def _backward(run: RunConfig, choices: Choices, kept: float) -> float:
    """Returns the most bytes that a layer's backward pass has besides what is kept for it.

    In the middle of the feed-forward network these are its gradients. Those of a gated one are as
    large as both of its parts and their product, and the input of the next product is free. Where
    its input is gathered, these are that input and the sum for its gradient, with the blocks of
    them that travel over gloo. At an RMSNorm, which is made of many kernels, they are copies in
    float32, when a part of what the layer has kept is free.

    Args:
        run: The run.
        choices: Its choices.
        kept: Bytes that a layer has kept.
    """
    work, grid, h = choices.work, choices.rows * choices.cols, run.model.hidden_size
    of_parts = rms_norms(run) and work.itemsize < 4
    found = panels = 0.0
    for choice in choices.products.values():
        product = choice.product
        if product.section != "feed_forward" or product.closes:
            continue
        gated = bool(product.parts)
        wide = work.rows_of(product) * choice.n_out / grid * work.itemsize
        whole = choices.activation_bytes(choice) / choice.n_chunks
        found = max(found, wide)
        if choice.common or not whole:
            continue
        if choice.schedule != "gather":  # its sums are in float32 until the last panel has come
            found = max(found, wide * (2.5 if gated else 2.0))
            panels = max(panels, _PANELS * whole / choices.panels)
        elif choice.stays == "output" and not choice.keep_input:
            moves = 0.0 if on_gpu(run) else _BLOCKS * (1 - 1 / choices.cols) * whole
            found = max(found, wide * (0.5 if gated else 0.0) + _WHOLE * whole + moves)
            if of_parts and _norm_of_whole(run, choice):
                in_float32 = whole * 4 / work.itemsize
                found = max(found, _NORM_OF_WHOLE * in_float32 - wide * (0.5 if gated else 1.0))
    found += panels
    rows = max(work.tokens, work.source) / (grid if choices.between == "cut" else 1)
    found += _RESIDUAL * rows * h * work.itemsize
    if of_parts:
        found = max(found, _NORM_COPIES * rows * h * 4 - _FREED * kept)
    return found


def _norm_of_whole(run: RunConfig, choice: Choice) -> bool:
    """Whether a product gathers rows that are cut, and then normalizes them."""
    return choice.norm_inside and spec_of(run.layout).boundary(run.layout).lies == "h"


@dataclass(frozen=True)
class _Replicas:
    """The memory of replicas that share parameters or gradients, besides their shards, in bytes.

    Attributes:
        gathered: With FSDP the tables, which stay for a step, and two layers.
        held: The part of the head's gradient that exists while layers run backward. The gradient of
            a tied table waits for that of the embedding; any other gradient is in a message by
            then.
        messages: The messages in flight that sum gradients of layers, if they are small.
        gradients: The gradients of a layer's widest product, with the messages that sum them.
        updated: The message with a table after its update.
    """

    gathered: float = 0.0
    held: float = 0.0
    messages: float = 0.0
    gradients: float = 0.0
    updated: float = 0.0

    @staticmethod
    def of(run: RunConfig, choices: Choices) -> _Replicas:
        """Returns these bytes for a run, whose replicas may share nothing."""
        layout, model, itemsize = run.layout, run.model, choices.work.itemsize
        if layout.dp_mode == "replicate" or layout.dp == 1:
            return _Replicas()
        grid, part = choices.rows * choices.cols, 1 / layout.dp
        _, table = table_bytes(run, choices)
        of_step = choices.reshard == "step"
        tables = 1 if model.tied_head or layout.pp > 1 else 2
        n_layers = model.n_layers + model.n_decoder_layers * model.two_stacks
        layers = _layer_elements(choices) / grid
        layer = layers / n_layers * itemsize
        if layout.dp_mode != "fsdp":
            tables = 0
        if layout.dp_mode != "fsdp" or of_step:  # then states have all layers
            layer = 0.0
        widest = max(
            one.product.n_in * one.n_out
            for one in choices.products.values()
            if one.product.section != "head"
        )
        accumulated = layout.micro_batches > 1  # then states have whole gradients
        return _Replicas(
            gathered=tables * table + 2 * layer,
            held=0.0 if accumulated else table * (1 - part),
            messages=_UNDER_WAY * min(BUCKET_BYTES, (table + layers * 4) / 4),
            gradients=_GRADIENTS * widest / grid * itemsize,
            updated=(1 + part) * table if layout.dp_mode == "zero1" else 0.0,
        )


def _layer_elements(choices: Choices) -> float:
    """Returns the elements of the matrices of all layers."""
    each = choices.products.values()
    return float(sum(one.elements for one in each if one.product.section != "head"))


def _states(run: RunConfig, choices: Choices) -> tuple[dict[str, float], float]:
    """Returns bytes of matrices with gradients and moments: of each stack's layers, and the others.

    All are for a device that holds its shards of all stages.
    """
    layout, grid, head = run.layout, choices.rows * choices.cols, 0.0
    layers = dict.fromkeys(stacks_of(run), 0.0)
    everywhere = layout.branches if choices.between == "cut" else 1  # replicas of common layers
    for choice in choices.products.values():
        copies, of_grid = (everywhere, 1) if choice.common else (1, grid)
        replicas = layout.dp * copies
        in_head = choice.product.section == "head"
        each = state_bytes(run, replicas)
        # Of what is not in layers, FSDP gathers the parameters themselves.
        copy = _copy_bytes(run, choices, 1 if in_head else replicas)
        held_bytes = choice.elements * (each + copy) / of_grid
        if choice.product.name == "head":
            held_bytes += choices.table * each / of_grid
        if in_head:
            head += held_bytes
        else:
            layers[stack_of(choice.product)] += held_bytes
    return layers, head


def _copy_bytes(run: RunConfig, choices: Choices, replicas: int) -> float:
    """Returns the bytes per parameter of copies in the type of the computation.

    With `reshard: step` those of layers are what FSDP gathers, whatever their type.

    Args:
        run: The run, without `reshard: auto`.
        choices: Its choices.
        replicas: Number of replicas that share sharded state.
    """
    layout, itemsize = run.layout, choices.work.itemsize
    sharded = layout.dp_mode == "fsdp" and layout.dp > 1
    if sharded and layout.reshard == "step" and replicas > 1:
        return itemsize
    if itemsize > 2 or not choices.cast_once:
        return 0.0
    return itemsize / (replicas if sharded else 1)
