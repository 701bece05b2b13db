"""The loads that a step has once: casts, sums over replicas and the update, by formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gridformer.cluster.messages import Op
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.pipeline.schedules import rounds
from gridformer.parallel.pipeline.stage_shares import StageShares, stacks_of
from gridformer.plan import launches
from gridformer.plan.load import AxisPlace, Load
from gridformer.plan.products import added_bytes
from gridformer.plan.replica_messages import in_buckets
from gridformer.plan.sizes import Sizes

ADAM_BYTES = 28  # reads a parameter, its gradient and two moments, and writes all but the gradient
MOMENTS_BYTES = 8  # of a parameter, which `train.offload: optimizer` copies in each direction
NORM_BYTES = 4  # the norm of gradients reads them
COPY_BYTES = 8  # reads and writes an element of float32
VECTORS_BYTES = 1e5  # of the gradients of norms and biases, roughly


def casts(sizes: Sizes, shares: StageShares) -> Load:
    """Returns the load of casting weights to the type of the computation once a step."""
    choices, layout = sizes.choices, sizes.run.layout
    if choices.work.itemsize != 2:
        return Load(launches=launches.BATCH)
    m, again = layout.micro_batches, sizes.run.train.recompute == "full"
    # Otherwise the forward pass, the backward pass and recomputation each cast the weights.
    times = 1 if choices.cast_once else (2 + again) * m
    elements = _elements(sizes, replace(shares, lookups=0.0))  # lookups read float32
    if layout.dp_mode == "fsdp":
        elements /= max(1, sizes.spec.replicas(layout))
    elif not choices.cast_once and again:  # all but what is outside layers, which runs once
        elements -= _elements(sizes, replace(shares.outside_layers, lookups=0.0)) / 3
    load = Load(memory=sizes.costs.memory_s(elements * 6 * times), launches=launches.BATCH)
    if layout.dp_mode != "fsdp":
        load.launches += launches.n_casts(sizes, shares) * times
    else:  # what is outside layers is gathered when a step begins, and layers have been cast
        load.launches += launches.n_casts(sizes, shares.outside_layers) * times
        outside = _elements(sizes, shares.outside_layers)
        n_bytes = outside * sizes.wide
        load.message("dp", sizes.costs.message_s("all_gather", n_bytes, sizes.place("replicas")))
        load.memory += sizes.costs.memory_s(_returned_bytes(sizes, outside))
    return load


def _elements(sizes: Sizes, shares: StageShares) -> float:
    """Returns the elements of matrices that a device holds."""
    choices, found = sizes.choices, 0.0
    for choice in choices.products.values():
        grid = 1 if choice.common else choices.rows * choices.cols
        found += _of_product(sizes, choice, shares) / grid
    return found


def _of_product(sizes: Sizes, choice: Choice, shares: StageShares) -> float:
    """Returns the elements that a rank of a pipeline holds of a product, on all devices of a grid.

    The table of the tokens counts with the head. It is the head's, if it is tied.
    """
    if choice.product.name != "head":
        return choice.elements * shares.share_of(choice.product)
    found = choice.elements * (shares.head and sizes.run.model.token_head)
    if not shares.lookups:
        return found
    if sizes.choices.table:
        return found + sizes.choices.table
    return found or choice.elements


def gather_replicas(sizes: Sizes, passes: Mapping[str, tuple[Load, Load]]) -> None:
    """Adds the gathers of parameters layer by layer, each during the layer before it.

    Args:
        sizes: Sizes of a micro-batch on one device.
        passes: The forward and the backward load of each stack of layers, to which it adds.
    """
    layout = sizes.run.layout
    if layout.dp_mode != "fsdp":
        return
    place, memory_s = sizes.place("replicas"), sizes.costs.memory_s
    times = 1.0 if sizes.choices.reshard == "layer" else 1 / layout.micro_batches
    for stack, n in stacks_of(sizes.run).items():
        forward, backward = passes[stack]
        only = StageShares(tuple((one, float(one == stack)) for one in passes), 0.0, False)
        a_layer = _elements(sizes, only) / n
        one = sizes.costs.message_s("all_gather", a_layer * sizes.itemsize, place)
        # A gathered layer is copied from the message into its parameters.
        copied = launches.parameters(sizes, only)
        backward.launches += launches.FSDP_JOINED * copied / layout.micro_batches
        forward.launches += launches.FSDP_GATHERED * copied * times
        forward.memory += memory_s(2 * sizes.itemsize * a_layer) * n * times
        backward.memory += memory_s(2 * sizes.itemsize * a_layer) * n * times
        if sizes.choices.reshard == "step":  # see gathered_s
            forward.launches += n * times
        else:
            # That of the first layer travels with what is gathered when a step begins.
            first = one * (1 - 1 / layout.micro_batches)
            forward.message("dp", n * one - first, forward.device_s, n)
            forward.message("dp", first, launches=0)
        if sizes.choices.reshard == "layer":
            backward.launches += launches.FSDP_GATHERED * copied
            backward.message("dp", (n - 1) * one, backward.device_s, n)
            backward.message("dp", one, launches=0)  # nothing else goes on meanwhile


def gathered_s(sizes: Sizes, shares: StageShares) -> float:
    """Returns how long parameters travel that are gathered for a whole step; 0 if none are."""
    if sizes.run.layout.dp_mode != "fsdp" or sizes.choices.reshard != "step":
        return 0.0
    found, place = 0.0, sizes.place("replicas")
    for stack, n in stacks_of(sizes.run).items():
        share = dict(shares.layers)[stack]
        only = StageShares(
            tuple((one, float(one == stack)) for one, _ in shares.layers), 0.0, False
        )
        n_bytes = _elements(sizes, only) / n * sizes.itemsize
        found += share * n * sizes.costs.message_s("all_gather", n_bytes, place)
    return found


def adds_s(sizes: Sizes, shares: StageShares) -> float:
    """Returns how long it takes to add gradients of layers to those of earlier micro-batches."""
    only, choices, n_bytes = StageShares(shares.layers, 0.0, False), sizes.choices, 0.0
    for choice in choices.products.values():
        grid = 1 if choice.common else choices.rows * choices.cols
        n_bytes += added_bytes(sizes, choice, _of_product(sizes, choice, only) / grid)
    return sizes.costs.memory_s(n_bytes)


def reductions(sizes: Sizes, shares: StageShares, backward: Load) -> Load:
    """Returns the load of summing gradients over replicas after the last backward pass.

    Args:
        sizes: Sizes of a micro-batch on one device.
        shares: What the rank has of the model.
        backward: The backward pass of a micro-batch, which hides messages.
    """
    layout, load, costs = sizes.run.layout, Load(launches=10), sizes.costs
    for axis in (sizes.activation_axis, "row"):  # vectors
        load.message(axis, costs.message_s("reduce", VECTORS_BYTES, sizes.place(axis)))
    load.message("world", 2 * costs.message_s("all_reduce", 64, sizes.place("world")), 0.0, 2)
    rows, cols = sizes.choices.rows, sizes.choices.cols
    ends = shares.lookups > 0 or shares.head
    outside = launches.OUTSIDE[sizes.run.model.family] * ends
    if rows * cols > 1 and sizes.lies in ("replicated", "s", "h"):
        # Vectors are copied to a message of each axis, and to another that makes them equal.
        copies = 1 if sizes.lies == "replicated" else 1 + (rows > 1) + (cols > 1)
        load.launches += (launches.vectors(sizes, shares) + outside * (rows > 1)) * copies
    load.launches += launches.of_mode(sizes) * (launches.parameters(sizes, shares) + outside)
    tied = sizes.run.model.tied_head and sizes.run.model.token_head
    if layout.pp > 1 and tied and ends:  # they share the table
        parts = 1 if layout.dp_mode == "replicate" else max(1, sizes.spec.replicas(layout))
        n_bytes = _table(sizes) * sizes.wide / parts
        load.message("pp", costs.message_s("all_reduce", n_bytes, sizes.place("pp")))
        load.memory += costs.memory_s(4 * n_bytes)
    # Gradients travel behind the parameters that are gathered meanwhile, in the same group.
    behind = max(0.0, backward.device_s - backward.hidden.get("dp", 0.0))
    for elements, last, where, common in _summed(sizes, shares):
        op: Op = "all_reduce" if layout.dp_mode == "replicate" else "reduce_scatter"
        n_bytes, last_bytes = elements * sizes.wide, last * sizes.wide
        k, rest = layout.stages_per_rank, n_bytes - last_bytes
        own_table = common == sizes.choices["head"].common
        early_s = _before_layers_s(sizes, shares, op, where) if own_table else 0.0
        seconds, buckets, joined = in_buckets(sizes, shares, common, op, rest, where)
        seconds -= early_s
        load.message("dp", early_s, launches=0)
        load.message("dp", seconds / k, behind / k, buckets * launches.BUCKET)
        if k > 1:  # gradients of the later stages travel during the passes of the earlier ones
            size = layout.micro_batches // rounds(layout.pp, layout.micro_batches)
            load.message("dp", seconds * (k - 1) / k, behind * size * (k - 1) / k, 0)
        load.message("dp", costs.message_s(op, last_bytes, where))
        load.memory += costs.memory_s(joined / sizes.wide * COPY_BYTES)
        if layout.dp_mode == "zero1":
            copied_s = costs.memory_s(_returned_bytes(sizes, elements))
            load.memory += copied_s
            # The update is over; a message travels while the one before it is copied.
            seconds, *_ = in_buckets(sizes, shares, common, "all_gather", rest, where)
            seconds += costs.message_s("all_gather", last_bytes, where)
            load.message("dp", seconds, copied_s)
    return load


def _before_layers_s(sizes: Sizes, shares: StageShares, op: Op, place: AxisPlace) -> float:
    """Returns how long the gradient of the head's own table travels before the layers go on.

    With `reshard: layer` the parameters of the last layer are gathered after it, and its backward
    pass waits for them.
    """
    layout, choice = sizes.run.layout, sizes.choices["head"]
    waits = layout.dp_mode == "fsdp" and sizes.choices.reshard == "layer"
    own = sizes.run.model.token_head and not sizes.run.model.tied_head
    if not (waits and own and shares.head) or layout.micro_batches > 1:
        return 0.0
    grid = 1 if choice.common else sizes.choices.rows * sizes.choices.cols
    return sizes.costs.message_s(op, choice.elements / grid * sizes.wide, place)


def _returned_bytes(sizes: Sizes, elements: float) -> float:
    """Returns the bytes of copying parts of parameters to a message, and all of them from it."""
    return elements * COPY_BYTES * (1 + 1 / max(1, sizes.spec.replicas(sizes.run.layout)))


def _table(sizes: Sizes) -> float:
    """Returns the elements of the table of the tokens on a device."""
    choice = sizes.choices["head"]
    grid = 1 if choice.common else sizes.choices.rows * sizes.choices.cols
    return choice.product.n_in * choice.product.n_out / grid


def _summed(sizes: Sizes, shares: StageShares) -> list[tuple[float, float, AxisPlace, bool]]:
    """Returns the gradients that are summed over replicas.

    Returns:
        For each set of replicas the elements, those of them that are complete only when the
        backward pass ends, the replicas, and whether every device of a grid holds them. The table
        of the tokens is the last to be complete.
    """
    choices, layout = sizes.choices, sizes.run.layout
    common = 0.0
    for choice in choices.products.values():
        if choice.common:
            common += _of_product(sizes, choice, shares)
    replicas, found = sizes.place("replicas"), []
    table = _table(sizes) if shares.lookups else 0.0
    head_is_common = choices["head"].common
    if layout.dp > 1:
        last = 0.0 if head_is_common else table
        found.append((_elements(sizes, shares) - common, last, sizes.place("dp"), False))
    if replicas.size > 1 and common:
        found.append((common, table if head_is_common else 0.0, replicas, True))
    return found


def update(sizes: Sizes, shares: StageShares) -> Load:
    """Returns the load of clipping and of the optimizer, with the copies of offloaded moments."""
    layout, train, costs = sizes.run.layout, sizes.run.train, sizes.costs
    replicas = 1 if layout.dp_mode == "replicate" else sizes.spec.replicas(layout)
    elements = _elements(sizes, shares) / max(1, replicas)
    wide = 2 if train.dtype == "float64" else 1
    load = Load(
        memory=costs.memory_s(elements * (ADAM_BYTES + NORM_BYTES) * wide), launches=launches.STEP
    )
    if train.offload == "optimizer":
        n_bytes = 2 * elements * MOMENTS_BYTES * wide
        # On a CPU both are in the same memory, where a copy reads and writes.
        on_cpu = costs.cluster.device.kind == "cpu"
        load.memory += costs.memory_s(2 * n_bytes) if on_cpu else costs.copy_s(n_bytes)
        load.launches += launches.offloaded(sizes, shares)
    return load
