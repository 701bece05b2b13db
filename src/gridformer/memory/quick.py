"""Approximate memory of a device from the sizes of its products; `estimate` takes seconds.

States are exact but for vectors; activations are the inputs and outputs of products. `gridformer
memory` finds the exact number of bytes by running the code (memory/estimate.py).
"""

from __future__ import annotations

from dataclasses import replace

from gridformer.config import RunConfig
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.cost import Choice, Choices, resolved
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import replica_work, state_bytes
from gridformer.parallel.data.buckets import BUCKET_BYTES
from gridformer.parallel.pipeline.partition import shares_of_ranks, stack_of, stacks_of
from gridformer.parallel.registry import spec_of

_SCORE = 12  # bytes of a score that is not in a fused kernel, in the backward pass of its layer
_NORM_COPIES = 5  # of an activation, in float32, in the backward pass of an RMSNorm
_FREED = 0.6  # the fraction of what a layer has kept that is free by then
_KEYS_COPIES = 4  # of gathered keys and values, with their gradients, in a backward pass
_PANELS = 5  # panels of activations for which a product that goes panel by panel has room
_GATHERED, _RECEIVED = 2, 3  # copies of a gathered activation in a backward pass, more over gloo


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
    copies = _copy_bytes(resolved(run, choices), choices, run.layout.shards)
    return float(choices.parameters) * (state_bytes(run, run.layout.shards) + copies)


def quick_estimate(run: RunConfig) -> float:
    """Returns the approximate peak of the fullest device in bytes."""
    return max(quick_peaks(run, decide(run.model, run.layout, replica_work(run))))


def quick_peaks(run: RunConfig, choices: Choices) -> list[float]:
    """Returns the approximate peak of the fullest device of each place along pp, in bytes."""
    run = resolved(run, choices)
    layout, stacks, m = run.layout, stacks_of(run), run.layout.micro_batches
    n_layers, grid = sum(stacks.values()), choices.rows * choices.cols
    states, outside = _states(run, choices)
    kept, layer = _activations(run, choices)
    # What a late gradient of a weight keeps is about as large, and is never recomputed.
    for_weights, _ = _activations(
        run, replace(choices, work=replace(choices.work, recompute="selective"))
    )
    shards = 1 if layout.dp_mode == "replicate" else layout.shards
    # Otherwise gradients of several micro-batches are whole until the end.
    summed = m == 1 or layout.gradient_sync == "micro_batch"
    sharers = shards if summed else 1
    column, block = _table_bytes(run, choices)
    loss = _loss_bytes(run, choices) - (block / shards if summed else 0.0)
    products = choices.products.values()
    elements = sum(one.elements for one in products if one.product.section != "head")
    gradients = elements / grid / sharers * 4 * (run.train.update != "in_backward")
    # Before the backward pass of the last layer there are none of layers.
    absent = gradients * (m == 1)
    weights = sum(choices.kept_bytes(replace(one, keep_input=False)) for one in products)
    gathered = messages = 0.0
    if shards > 1:
        if layout.dp_mode == "fsdp":  # the tables stay for a step, and two layers are gathered
            gathered = block if run.model.tied_head or layout.pp > 1 else 2 * block
            if choices.reshard == "layer":
                gathered += 2 * elements / grid / n_layers * choices.work.itemsize
        messages = 2 * min(BUCKET_BYTES, (block + elements / grid * 4) / 4)
        layer += block * (1 - 1 / shards) * summed  # a table's gradient waits for the lookups
    found = []
    for rank, share in enumerate(shares_of_ranks(run)):
        mine = sum(part * kept[stack] for stack, part in share.layers)
        n_mine = max(1.0, sum(part * stacks[stack] for stack, part in share.layers))
        held = gathered + sum(part * states[stack] for stack, part in share.layers)
        held += weights * n_mine / n_layers
        late = sum(part * for_weights[stack] for stack, part in share.layers)
        if layout.pipeline == "zb_h1":
            held += min(rank + 1, m) * late - min(mine, late)  # the first takes its place
        elif layout.pipeline == "zbv":  # behind the last forward pass, in place of activations
            held += max(0.0, rank * late - (layout.pp + rank) / 2 * mine)
        if share.lookups or share.head:  # of two tables a rank of a pipeline may have one
            both = run.model.tied_head or (share.lookups and share.head)
            held += outside if both else outside / 2
        held += _position_states(run, choices) * (share.lookups > 0)
        flight = _in_flight(run, rank)
        together = flight == m > 1  # then all begin before the first ends
        gone = absent if layout.pp == 1 else together * gradients * n_mine / n_layers
        backward = flight * mine + layer + messages - min(mine, gone) * (1 - 1 / n_mine)
        forward = mine + loss * share.head - absent
        several = round(share.lookups * len(stacks)) + (share.head and run.model.tied_head) > 1
        table = (3 if several else 1) * block + column * (block < column)
        end = (flight - 1 - together) * mine + messages
        end += (table - block / shards * summed) * (share.lookups > 0)
        found.append(held + max(forward, backward, end))
    return found


def _in_flight(run: RunConfig, rank: int) -> float:
    """Returns for how many micro-batches a rank of a pipeline keeps activations at a time.

    With k stages a rank, those are the passes of 1/k of its layers that it runs ahead; see
    `gridformer.parallel.pipeline.schedules`.
    """
    layout = run.layout
    most, k = float(layout.micro_batches), layout.stages_per_rank
    if layout.pp == 1 or layout.pipeline_order == "gpipe":
        return 1.0 if layout.pp == 1 else most
    if layout.pipeline == "zbv":
        return min(most, layout.pp)
    ahead = layout.pp - 1 - rank
    return min(most, ahead + 1 if k == 1 else ((k - 1) * layout.pp + 2 * ahead + 1) / k)


def _activations(run: RunConfig, choices: Choices) -> tuple[dict[str, float], float]:
    """Returns the bytes that the layers of each stack keep of a micro-batch, and more of a layer.

    A product that opens a section keeps its norm's input and output, and its own output; one that
    closes a section keeps its input. What a layer takes besides in its backward pass is the largest
    of the gradients of its wide product with what that gathers, and of the copies of an RMSNorm.
    """
    work, item, grid = choices.work, choices.work.itemsize, choices.rows * choices.cols
    h, stacks = run.model.hidden_size, stacks_of(run)
    kept, layer = dict.fromkeys(stacks, 0.0), 0.0
    between = 1 / grid if choices.between == "cut" else 1.0
    for choice in choices.products.values():
        product, rows = choice.product, work.rows_of(choice.product)
        if product.section == "head":
            continue
        whole = rows * (between if choice.common else 1 / grid) * item
        if product.closes:
            one = whole * product.n_in
            # The results of attention before they are redistributed.
            one += choices.redistributed(choice) * item * (work.recompute != "selective")
        else:
            norm = 2
            if product.reads == "source" and stack_of(product) == "decoder":  # is kept once for all
                norm = 0
            relu = product.section == "feed_forward" and run.model.family in ("t5", "transformer")
            one = norm * rows * h * between * item + whole * choice.n_out * (not relu)
            if product.section == "attention" and product.parts:  # kept again when they are rotated
                heads, groups = run.model.n_heads, run.model.kv_heads
                one += whole * choice.n_out * (heads + groups) / (heads + 2 * groups)
            layer = max(layer, _wide(run, choices, choice, whole * choice.n_out))
            gathered = choices.gathered_keys(choice) * item
            one += gathered * (1 - 1 / choices.sequence_rows) * (work.recompute != "selective")
            layer = max(layer, _KEYS_COPIES * gathered)
        kept[stack_of(product)] += one * product.count
        kept[stack_of(product)] += choices.kept_bytes(replace(choice, keep_weight=False))
    if choices.rows > 1:  # the sum of a weight's gradient travels during the backward pass before
        summed = [c for c in choices.products.values() if c.schedule == "gather"]
        sent = [c.elements / c.product.count for c in summed if c.product.section != "head"]
        layer += max(sent, default=0.0) / choices.cols * (1 + 1 / choices.rows) * item
    residual = max(work.tokens, work.source) * h * between
    of_a_layer = sum(kept.values()) / sum(stacks.values())
    layer += 2 * residual * item  # a gradient, and the next one computed from it
    if item < 4 and any(choice.product.rms for choice in choices.products.values()):
        layer = max(layer, _NORM_COPIES * residual * 4 - _FREED * of_a_layer)
    scores = _scores(run, choices)
    if scores:
        each = item + (item + 1) * (run.model.attention_dropout > 0)  # before and after, and a mask
        most = max(scores[stack] / n for stack, n in stacks.items())
        layer += most * (_SCORE + each * (work.recompute == "selective"))
        if work.recompute != "selective":
            kept = {stack: kept[stack] + scores[stack] * each for stack in stacks}
    if part := work.recomputed:
        layer += max(kept[stack] / n for stack, n in stacks.items())
        tokens = {stack: work.source if stack == "encoder" else work.tokens for stack in stacks}
        share = grid if choices.between != "first" else 1
        of_a_token = dict.fromkeys(stacks, h * item / share)
        if work.recompute == "except_attention" and not scores:  # its result and log-sum-exp
            result = run.model.n_heads * (run.model.head_width * item + max(4, item)) / grid
            of_a_token = {s: n + result * (1 + (s == "decoder")) for s, n in of_a_token.items()}
        kept = {
            stack: (1 - part) * kept[stack] + part * n * tokens[stack] * of_a_token[stack]
            for stack, n in stacks.items()
        }
        layer += max(tokens.values()) * h * item * (choices.between == "replicated")
    return kept, layer


def _wide(run: RunConfig, choices: Choices, choice: Choice, out: float) -> float:
    """Returns the bytes of the gradients of a product's output with what it gathers meanwhile."""
    whole = choices.held_at_a_time(choice)
    if choice.stationary == "weight":  # with what is summed over rows
        return out * (1 + choices.rows) + whole
    if not whole:
        return out
    if choice.schedule != "gather":  # its sums are in float32 until the last panel has come
        return out * 2.0 + _PANELS * whole / choices.panels
    if choice.stationary != "output" or choice.keep_input:
        return out
    copies = float(_GATHERED)
    if not on_gpu(run):
        copies += _RECEIVED * (1 - 1 / choices.cols)
    else:  # over h it is gathered without a copy, and so it is over s in a feed-forward
        sharded = spec_of(run.layout).boundary(run.layout).activation_layout
        copies -= sharded == "h" or (sharded == "s" and choice.product.section == "feed_forward")
    return max(out, 0.5 * out * bool(choice.product.parts) + copies * whole)


def _scores(run: RunConfig, choices: Choices) -> dict[str, float]:
    """Returns the scores of attention on a device, by stack, if no fused kernel hides them.

    Without gridformer's kernel, dropout of probabilities or a learned bias makes torch keep them,
    and so does attention=math without these.
    """
    model, work, keys = run.model, choices.work, run.seq_len
    fused = on_gpu(run) and run.train.kernels != "torch"
    changed = model.attention_dropout or model.family == "t5"
    if fused if changed else run.train.attention != "math":
        return {}
    heads = model.n_heads / (choices.rows * choices.cols)
    if not model.two_stacks:
        return {"": model.n_layers * work.tokens * keys * heads}
    keys += run.source_len * (model.attention_dropout > 0)  # a bias is of attention to itself alone
    return {
        "encoder": model.n_layers * work.source * run.source_len * heads,
        "decoder": model.n_decoder_layers * work.tokens * keys * heads,
    }


# --------------------------------------------------------------------------- table and loss


def fused_loss(run: RunConfig) -> bool:
    """Whether the loss is computed by kernels of gridformer.models.kernels.cross_entropy."""
    return on_gpu(run) and run.train.kernels == "fused" and run.train.dtype != "float64"


def _table_bytes(run: RunConfig, choices: Choices) -> tuple[float, float]:
    """Returns the bytes of the tokens' table on a column of devices, and on a device."""
    table = run.model.vocab_size * run.model.hidden_size * 4.0
    if "head" in choices.products and choices["head"].common:
        return table, table
    if choices.holds_weights:
        return table / choices.within, table / choices.within
    return table / choices.cols, table / choices.cols / choices.rows


def _loss_bytes(run: RunConfig, choices: Choices) -> float:
    """Returns the most bytes that the head and its loss take: logits, and the table's gradient."""
    if not run.model.token_head:
        return 0.0
    head, item = choices["head"], choices.work.itemsize
    column, block = _table_bytes(run, choices)
    sharded = not head.common and choices.within > 1
    rows = choices.head_tokens(head) if choices.between == "cut" else float(choices.work.tokens)
    rows = min(rows, choices.work.loss_chunk_tokens or rows)
    logits = rows * run.model.vocab_size / (choices.within if sharded else 1)
    wide = max(4, item)
    if fused_loss(run):  # their gradient takes their place
        forward = logits * item
    else:
        forward = logits * (item * (item < wide or sharded) + wide * (1 if sharded else 2))
    in_chunks = choices.loss_chunks(head) > 1
    gradient = column * in_chunks  # to which that of a chunk is added, if not in place
    if block < column:
        gradient += column * item / 4
    elif sharded or not (in_chunks and item < 4):
        gradient += column * (1.5 if sharded and item < 4 else 1)
    if item < 4 and (block < column or not choices.cast_once):
        gradient += column * item / 4  # gathered, or cast for this use only
    hidden = float(choices.work.tokens * run.model.hidden_size * item)
    hidden /= choices.rows * choices.cols if choices.between == "cut" else 1
    return max(forward, item * logits + gradient) + hidden * (1 + in_chunks)


# --------------------------------------------------------------------------- states


def _states(run: RunConfig, choices: Choices) -> tuple[dict[str, float], float]:
    """Returns bytes of matrices with gradients and moments: of each stack's layers, and the others.

    All are for a device that holds its shards of all stages.
    """
    layout, grid, head = run.layout, choices.rows * choices.cols, 0.0
    layers = dict.fromkeys(stacks_of(run), 0.0)
    everywhere = layout.branches if choices.between == "cut" else 1  # replicas of common layers
    for choice in choices.products.values():
        copies, of_grid = (everywhere, 1) if choice.common else (1, grid)
        replicas = layout.shard_over or layout.dp * copies
        in_head = choice.product.section == "head"
        each = state_bytes(run, replicas, not in_head)
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


def _position_states(run: RunConfig, choices: Choices) -> float:
    """Returns the bytes of a learned table of positions, with gradients and moments, on a device.

    Devices that have tokens of the full width hold all of the table.
    """
    if run.model.family not in ("gpt2", "bert"):
        return 0.0
    boundary = spec_of(run.layout).boundary(run.layout)
    over_h = choices.cols if boundary.activation_layout == "h" else 1
    over_h *= choices.rows if boundary.h_over else 1
    table = run.model.max_seq_len * run.model.hidden_size / over_h
    return table * state_bytes(run, run.layout.shards, matrices=False)


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
