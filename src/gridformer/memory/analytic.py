"""Approximate memory of a device by formulas, instantly where `estimate` takes seconds.

The formulas cover the matrices among parameters, and the activations that every layer keeps.
`gridformer memory` finds the exact number of bytes by running the code (memory/estimate.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from gridformer.config import LayoutConfig, RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.work import replica_work, resolved, state_bytes
from gridformer.parallel.pipeline.stage_shares import shares_of_ranks, stacks_of
from gridformer.parallel.registry import spec_of

_NORM_COPIES = 5  # of an activation, in float32, in the backward pass of an RMSNorm
_NORM_OF_WHOLE = 5.5  # the same where the norm is computed of gathered rows
_FREED = 0.6  # the fraction of what a layer has kept that is free by then
# Where a feed-forward network gathers its input, these are held at the end of its backward pass:
_WHOLE = 2  # gathered activations, the input and the sum for its gradient
_BLOCKS = 3  # over gloo, the blocks of such activations that other devices send
_PANELS = 8  # panels of activations for which a product that goes panel by panel has room
_SCORE = 12  # bytes of a score that is not in a fused kernel, in the backward pass of its layer
_GRADIENTS = 5.5  # gradients of a layer's widest product with FSDP: made, joined and in messages


def states_of(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer per device, averaged over the stages.

    This is a lower bound of what the fullest device holds with any batch.
    """
    choices = decide(run.model, run.layout, replica_work(run))
    return sum(_states(resolved(run, choices), choices)) / run.layout.pp


def total_states(run: RunConfig) -> float:
    """Returns bytes of parameters, gradients and optimizer of all devices of one replica."""
    choices = decide(run.model, run.layout, replica_work(run))
    copies = _copy_bytes(run, choices, run.layout.dp)
    states = state_bytes(resolved(run, choices), run.layout.dp)
    return float(choices.parameters) * (states + copies)


def quick_estimate(run: RunConfig) -> float:
    """Returns the approximate peak of the fullest device in bytes."""
    return quick_peak(run, decide(run.model, run.layout, replica_work(run)))


def quick_peak(run: RunConfig, choices: Choices) -> float:
    """Returns `quick_estimate`, in bytes, for a caller that has the run's choices."""
    run = resolved(run, choices)
    layout, pp = run.layout, run.layout.pp
    in_layers, head = _states(run, choices)
    stacks = stacks_of(run)
    n_layers = sum(stacks.values())
    each = _kept(run, choices)  # by all layers if none is recomputed
    kept_score = 2 * choices.work.itemsize + 1  # a probability, before and after dropout, its mask
    scores = _scores(run, choices)
    stays = each + scores * kept_score
    again = scores / n_layers * _SCORE
    if choices.work.recompute == "selective":
        stays, again = each, again + scores / n_layers * kept_score
    if choices.work.recompute == "full":
        again += stays / n_layers
        stays, one = _inputs(run, choices, n_layers)
        again += one
    activations = stays + choices.all_kept_bytes
    replicas = _Replicas.of(run, choices)
    logits = _logits(run, choices) + replicas.table
    backward = max(_backward(run, choices, each / n_layers), replicas.gradients)
    backward = again + max(0.0, backward + replicas.messages)
    end = _table_gradient(run, choices)
    if pp == 1:
        states = in_layers + head + replicas.gathered
        # Before the backward pass of the last layer there are no gradients of layers.
        absent = _layer_gradients(run, choices) if layout.micro_batches == 1 else 0.0
        last = activations + max(logits - absent, backward - absent * (1 - 1 / n_layers))
        return states + max(last, activations / n_layers + backward, end)
    if not run.model.tied_head:
        head /= 2  # a rank has the table of the embedding or that of the head
    peaks = []
    for rank, part in enumerate(shares_of_ranks(run)):
        share = sum(of_stack * stacks[stack] for stack, of_stack in part.layers) / n_layers
        mine, last = activations * share, rank == pp - 1
        states = in_layers * share + replicas.gathered + (head if last or not rank else 0.0)
        most = max(_under_way(layout, rank) * mine + backward, mine + logits * last)
        peaks.append(states + max(most, end if last or not rank else 0.0))
    return max(peaks)


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
    sharers = 1 if run.layout.dp_mode == "replicate" else run.layout.dp
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
    of_parts = run.model.family in ("t5", "llama") and work.itemsize < 4  # its norms are
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
    if of_parts:
        between = 1 / grid if choices.between == "cut" else 1.0
        rows = max(work.tokens, work.source)
        found = max(found, _NORM_COPIES * rows * h * between * 4 - _FREED * kept)
    return found


def _norm_of_whole(run: RunConfig, choice: Choice) -> bool:
    """Whether a product gathers rows that are cut, and then normalizes them."""
    return choice.norm_inside and spec_of(run.layout).boundary(run.layout).lies == "h"


@dataclass(frozen=True)
class _Replicas:
    """What replicas that share parameters or gradients hold besides their shards, in bytes.

    Attributes:
        gathered: With FSDP the tables, which stay for a step, and two layers.
        table: The gradient of a table.
        messages: What travels while a layer's backward pass runs: the gradient of the head, and the
            parameters of two layers.
        gradients: The gradients of a layer's widest product, with the messages that sum them.
    """

    gathered: float = 0.0
    table: float = 0.0
    messages: float = 0.0
    gradients: float = 0.0

    @staticmethod
    def of(run: RunConfig, choices: Choices) -> _Replicas:
        """Returns it for a run, which may share nothing over its replicas."""
        layout, itemsize = run.layout, choices.work.itemsize
        if layout.dp_mode == "replicate" or layout.dp == 1:
            return _Replicas()
        others, grid = 1 - 1 / layout.dp, choices.rows * choices.cols
        table = run.model.vocab_size * run.model.hidden_size / grid * 4
        tables = 1 if run.model.tied_head or layout.pp > 1 else 2
        n_layers = run.model.n_layers + run.model.n_decoder_layers * run.model.two_stacks
        layer = _layer_elements(choices) / grid / n_layers * itemsize
        if layout.dp_mode != "fsdp":
            layer, tables = 0.0, 0
        elif choices.reshard == "step":
            layer = 0.0
        widest = max(
            one.product.n_in * one.n_out
            for one in choices.products.values()
            if one.product.section != "head"
        )
        return _Replicas(
            gathered=(tables * table + 2 * layer) * others,
            table=table,
            messages=(1 + 2 * others) * table + 2 * layer * others,
            gradients=_GRADIENTS * widest / grid * itemsize,
        )


def _table_gradient(run: RunConfig, choices: Choices) -> float:
    """Returns the bytes of the sum for the gradient of a table, when nothing else is left."""
    if choices.rows == 1 or not run.model.token_head:
        return 0.0
    column = run.model.vocab_size * run.model.hidden_size / choices.cols * 4
    return 2 * (1 - 1 / choices.rows) * column


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
    each, of_common = (state_bytes(run, layout.dp * n) for n in (1, everywhere))
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
    """Returns the bytes that all layers keep of one micro-batch if none is recomputed.

    A product that opens a section keeps its norm's input, in the type of norms, and output, and its
    own output; a product that closes a section keeps its input.
    """
    work, h, grid = choices.work, run.model.hidden_size, choices.rows * choices.cols
    # The fraction of an activation between sections that a device holds.
    between = 1 / grid if choices.between == "cut" else 1.0
    lies, kept = spec_of(run.layout).boundary(run.layout).lies, 0.0
    for choice in choices.products.values():
        product = choice.product
        if product.section == "head":
            continue
        rows = work.rows_of(product)
        inside = rows * (between if choice.common else 1 / grid)
        # In a grid that cuts h, the norm is a part of the product, which computes it again.
        inside_product = lies == "h" and choice.norm_inside
        norm = 0.0 if inside_product else max(4, work.itemsize) / work.itemsize
        around = 0.0 if product.closes else (1 + norm) * rows * h * between
        width = product.n_in if product.closes else choice.n_out
        kept += (around + inside * width) * product.count
    return kept * work.itemsize


def _scores(run: RunConfig, choices: Choices) -> float:
    """Returns how many scores of attention a device computes in all layers, if no kernel is fused.

    Dropout of their probabilities without gridformer's kernel lets torch keep them.
    """
    model, work = run.model, choices.work
    if not model.attention_dropout or (on_gpu(run) and run.train.kernels != "torch"):
        return 0.0
    keys = run.seq_len
    found = model.n_layers * work.tokens * keys
    if model.two_stacks:
        found = model.n_layers * work.source * run.source_len
        found += model.n_decoder_layers * work.tokens * (keys + run.source_len)
    return found * model.n_heads / (choices.rows * choices.cols)


def _inputs(run: RunConfig, choices: Choices, n_layers: int) -> tuple[float, float]:
    """Returns the bytes of the inputs of all layers, and of what is gathered of one of them.

    Recomputed layers keep them. Where all devices have an input, each keeps a part of it.
    """
    work, grid = choices.work, choices.rows * choices.cols
    n_bytes = max(work.tokens, work.source) * run.model.hidden_size * work.itemsize
    if choices.between == "replicated":
        return n_bytes / grid * n_layers, n_bytes
    return n_bytes / (grid if choices.between == "cut" else 1) * n_layers, 0.0


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
