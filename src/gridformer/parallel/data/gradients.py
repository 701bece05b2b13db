"""Sums gradients between the backward pass and the update, and takes their norm.

Each parameter element has one owner per replica (gridformer.parallel.sharding). Gradients are
summed in this order, small tensors together in buckets:

    1. over copies, to the owner, where the gradients are partial sums
    2. over replicas: all-reduce, or reduce-scatter if replicas shard the update
       (gridformer.parallel.data.zero), so that each receives only the sums of its parts, which
       are then all-reduced over other groups of replicas if there are any
    3. over the pipeline stages that share a parameter, each of which owns it

The gradient norm counts every element once: on the owner, on the first replica and on the first of
the stages that share it. gridformer.parallel.data.copies sends the updated parameters.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis, groups
from gridformer.models.blocks import Layer
from gridformer.parallel.data.buckets import buckets, in_buckets, together
from gridformer.parallel.data.zero import FlatBucket, own_part, replica_part
from gridformer.parallel.sharding import ParamShard, info_of, replica_axis, shard_of

_NORMED = 1024  # elements; see `_square_on_cpu`
# Reduce-scatters that may be in flight, if each of them holds memory that no gradient held before.
# Over NCCL more may be, as long as all but the earliest hold no more than a layer's gradients: the
# earliest may be that of a large table, and the pass need not wait for it.
_IN_FLIGHT = 2
LABEL = "gradients"


def owned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters (or this replica's parts) that this rank updates and saves."""
    return [(name, own_part(parameter)) for name, parameter in _owned_parameters(model)]


def _owned_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if shard_of(p).owned]


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sets the gradients of parameters, and of this replica's parts of them, to None."""
    for parameter in parameters:
        parameter.grad = None
        part = replica_part(parameter)
        if part is not None:
            part.grad = None


def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    axes: Axes,
    sums: GradientSums | None = None,
    updated: Collection[nn.Parameter] = (),
) -> None:
    """Sums gradients over copies, replicas and the stages that share a parameter.

    Afterward the gradients of owned parameters are those of the global batch. They are zero, not
    None, for a parameter that backward did not reach, so that every layout updates it in the same
    way. Gradients of other parameters are undefined.

    `sums` over replicas, which the backward pass has started, are finished here. Parameters that it
    has `updated`, and their copies, are left out.
    """
    parameters = [*parameters]
    infos = [info_of(parameter) for parameter in parameters]
    shards = [info.shard for info in infos]
    partly: dict[str, list[Tensor]] = defaultdict(list)
    for parameter, shard in zip(parameters, shards):
        if shard.partial and shard.copies and parameter not in updated:
            partly[shard.copies].append(_grad(parameter))
    for name, grads in partly.items():
        in_buckets(grads, partial(comm.reduce, axis=axes[name], root=0, label=LABEL))
    started = sums.parameters if sums else set()
    rest: dict[str, list[nn.Parameter]] = defaultdict(list)
    for parameter, shard in zip(parameters, shards):
        if shard.owned and parameter not in started and parameter not in updated:
            rest[replica_axis(parameter)].append(parameter)
    for name, left in rest.items():
        axis = axes[name]
        if axis.size == 1:
            for parameter in left:
                _grad(parameter)
            continue
        for members in together(left):
            bucket = _Bucket(axis, members)
            bucket.start()
            bucket.finish()
    if sums:
        sums.finish()
    for stages in sorted({shard.stages for shard in shards if shard.stages}):
        shared = [p for p, shard in zip(parameters, shards) if shard.stages == stages]
        grads = [_grad(own_part(p)) for p in shared if shard_of(p).owned]
        in_buckets(grads, partial(_sum_over_stages, axis=axes.holders(stages)))
    for parameter, info in zip(parameters, infos):
        if info.replica_part is not None:
            parameter.grad = None  # of a copy: the sum is on its owner


def _sum_over_stages(flat: Tensor, axis: Axis) -> Tensor:
    """Sums in place, with bitwise equal results on every stage and in every replica.

    The sum over replicas must come first: it is equal on all replicas of a stage, but the ring of
    another stage may add up in another order. This sum then adds equal terms in the same order
    everywhere, that of the stages. For two stages any order gives the same result.
    """
    if axis.size == 2:
        return comm.all_reduce(flat, axis, label=LABEL)
    first, *others = comm.all_gather(flat.unsqueeze(0), axis, 0, LABEL)
    flat.copy_(first)
    for term in others:
        flat += term
    return flat


class GradientSums:
    """Sums of gradients over replicas that start during the backward pass, bucket by bucket.

    Buckets are filled from the end of the model, where backward begins, and are sent in this order
    on every rank, each as soon as all its gradients are complete.

    Args:
        order: All parameters in the model's order, which is the same on every rank of an axis.
        units: Sets of parameters that share no bucket with others. Without them, a bucket holds at
            most a quarter of the gradients, so that most of them travel early.
        layer_bytes: The bytes of the gradients of the largest layer; see `backward`.

    Attributes:
        every_pass: Whether every backward pass sums its gradients, of which each replica then adds
            up its part (`layout.gradient_sync: micro_batch`), or only the last one does.
        around_last: Returns a context manager that is entered around each last backward pass.
    """

    def __init__(
        self,
        summed: Iterable[tuple[Axis, Sequence[nn.Parameter]]],
        order: Sequence[nn.Parameter],
        units: Sequence[Sequence[nn.Parameter]] = (),
        layer_bytes: int = 0,
    ) -> None:
        self._layer_bytes = layer_bytes
        self.every_pass = False
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._armed: Collection[nn.Parameter] = ()
        self._complete: set[nn.Parameter] = set()
        self._waits = True
        self._room = 0
        self._held: deque[_Bucket] = deque()
        self.around_last: Callable[[], AbstractContextManager[None]] = nullcontext
        unit_of = {parameter: i for i, unit in enumerate(units) for parameter in unit}
        place = {parameter: i for i, parameter in enumerate(reversed(order))}
        for axis, parameters in summed:
            if axis.size == 1:
                continue
            by_unit: dict[int, list[nn.Parameter]] = defaultdict(list)
            for parameter in sorted(parameters, key=lambda p: place[p]):
                by_unit[unit_of.get(parameter, -1)].append(parameter)
            limit = None if units else sum(p.nbytes for p in parameters) // 4
            for unit in by_unit.values():
                self._buckets += [_Bucket(axis, list(part)) for part in buckets(unit, limit)]
        self._buckets.sort(key=lambda bucket: max(place[p] for p in bucket.parameters))
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._ready)
        self._queue = deque(self._buckets)  # those to be sent, in order

    @staticmethod
    def of(
        model: nn.Module, axes: Axes, units: Sequence[Sequence[nn.Parameter]] | None = None
    ) -> GradientSums:
        """Returns the sums over replicas for the parameters that this rank owns, layer by layer.

        Parameters whose gradients are partial on copies, or which several stages share, are left to
        `reduce_gradients`: the former must be summed over copies first, and the latter need another
        sum after that over replicas.
        """
        held: dict[str, list[nn.Parameter]] = defaultdict(list)
        for _, parameter in _owned_parameters(model):
            shard = shard_of(parameter)
            if parameter.requires_grad and not shard.partial and not shard.stages:
                held[replica_axis(parameter)].append(parameter)
        summed = [(axes[name], parameters) for name, parameters in held.items()]
        layers = [[*one.parameters()] for one in model.modules() if isinstance(one, Layer)]
        largest = max((sum(p.nbytes for p in layer) for layer in layers), default=0)
        return GradientSums(summed, [*model.parameters()], units or layers, largest)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters whose gradients are summed here."""
        return set(self._bucket_of)

    @contextmanager
    def backward(
        self, last: bool = True, parameters: Collection[nn.Parameter] | None = None
    ) -> Iterator[None]:
        """Wraps a backward pass, and lets the sums of the gradients that it completes start in it.

        Every parameter must be completed in one last pass before `finish`.

        Reduce-scatters wait for earlier ones if this pass makes the first gradients, so that few
        full gradients exist at a time: over NCCL those of a layer, because with fewer the pass
        would wait at the matrices whose gradients take less time than their messages. After other
        micro-batches all gradients exist already, and over NCCL the pass waits for no message: in a
        pipeline each stage would wait before it sends its last gradient to the stage before it, one
        stage after the other. Over gloo a message takes more memory than the gradients in it, so
        two at a time are in flight there.

        Args:
            last: Whether no later pass adds to these gradients. Without `every_pass` another pass
                sends nothing.
            parameters: Those whose gradients it completes; None for all.
        """
        if not last and not self.every_pass:
            yield
            return
        self._armed = self._bucket_of if parameters is None else parameters
        if self.every_pass:
            self._complete |= {*self._armed} if last else set()
            mine = {self._bucket_of[p] for p in self._armed if p in self._bucket_of}
            self._queue = deque(bucket for bucket in self._buckets if bucket in mine)
        first = self.every_pass or all(parameter.grad is None for parameter in self._armed)
        over_nccl = all(groups.over_nccl(bucket.axis.group) for bucket in self._buckets[:1])
        self._waits = first or not over_nccl
        self._room = self._layer_bytes if over_nccl and first else 0
        try:
            with self.around_last() if last else nullcontext():
                yield
        finally:
            self._armed = ()
        if self.every_pass:
            while self._queue:  # the pass did not reach all their parameters
                self._send()
            while self._held:  # so that no pass of another stage waits for them
                self._held.popleft().scattered()

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Lets gradients travel that passes before this one have completed; see `backward`."""
        for parameter in parameters:
            if parameter in self._bucket_of:
                self._ready(parameter)

    def finish_of(self, parameters: Collection[nn.Parameter]) -> None:
        """Waits for the sums of a unit's gradients; those nearer to the model's end are sent first.

        All gradients of the unit, and of parameters nearer to the end, must be complete.
        """
        mine = {self._bucket_of[p] for p in parameters if p in self._bucket_of}
        while not mine.isdisjoint(self._queue):
            self._start_next()
        for bucket in self._buckets:
            if bucket in mine:
                bucket.finish()

    def finish(self) -> None:
        """Waits for all sums. Call it once per step, after the backward passes."""
        while self._queue:  # backward did not reach all their parameters
            self._queue.popleft().start()
        self._queue, self._complete = deque(self._buckets), set()
        for bucket in self._buckets:
            bucket.finish()

    def _ready(self, parameter: nn.Parameter) -> None:
        """Hook: sends all buckets whose turn it is and whose gradients are complete."""
        if parameter not in self._armed:
            return
        self._bucket_of[parameter].missing.discard(parameter)
        while self._queue and not self._queue[0].missing:
            self._send()

    def _start_next(self) -> _Bucket:
        """Starts the next bucket, to which no later pass adds if all its gradients are complete."""
        bucket = self._queue.popleft()
        bucket.start(not self.every_pass or self._complete.issuperset(bucket.parameters))
        return bucket

    def _send(self) -> None:
        bucket = self._start_next()
        if bucket.sharded and (self._waits or bucket.axis.across):
            held = self._held = deque(one for one in (*self._held, bucket) if one.in_flight)
            # Those in flight must not hold too much memory.
            while len(held) > _IN_FLIGHT and self._room < sum(b.n_bytes for b in [*held][1:]):
                held.popleft().scattered()


class _Bucket:
    """Gradients that are summed over an axis in one message.

    If the axis shards the parameters, the message is a reduce-scatter: each rank receives the sums
    of its parts, and the full gradients are freed. Otherwise it is an all-reduce. What a block of
    replicas has summed in all passes of a step is all-reduced across blocks.
    """

    def __init__(self, axis: Axis, parameters: Sequence[nn.Parameter]) -> None:
        self.axis, self.parameters = axis, list(parameters)
        self.missing = set(parameters)
        self.in_flight = False  # whether a reduce-scatter was sent, and nobody has waited for it
        self._final = True
        self._pending: comm.Pending | None = None
        self._sum: Tensor | None = None  # of several passes, in which gradients of parts are views
        self.sharded = replica_part(self.parameters[0]) is not None
        self.n_bytes = sum(p.nbytes for p in parameters)
        self._flat_bucket = FlatBucket(self.parameters, axis) if self.sharded else None

    def start(self, final: bool = True) -> None:
        """Sends the gradients; `final` says whether no later pass of the step does so again."""
        self.scattered()  # those of a pass of another stage
        self.missing, self._final = set(self.parameters), final
        grads = [_grad(parameter) for parameter in self.parameters]
        if self._flat_bucket is None:
            flat = self._as_message(grads)
            del grads
            self._pending = comm.start_all_reduce(flat, self.axis, label=LABEL)
            return
        flat = self._flat_bucket.join(grads)
        for parameter in self.parameters:
            parameter.grad = None
        del grads
        self._pending = comm.start_reduce_scatter(flat, self.axis, 0, LABEL)
        self.in_flight = True

    def scattered(self) -> None:
        """Waits for a reduce-scatter and adds its sums to gradients, which may then travel on."""
        if not self.in_flight or self._pending is None or self._flat_bucket is None:
            return
        total, self._pending = self._pending.wait().view(-1), None
        self.in_flight = False
        parts = [part for p in self.parameters if (part := replica_part(p)) is not None]
        if self._sum is not None and parts[0].grad is not None:
            self._sum += total
        else:
            self._sum = total
            for part, sums in zip(parts, self._flat_bucket.parts(total)):
                part.grad = sums
        if self._final:
            total, self._sum = self._sum, None
            if self.axis.across is not None:
                self._pending = comm.start_all_reduce(total, self.axis.across, label=LABEL)

    def finish(self) -> None:
        """Waits for the sums, which become gradients. Further calls do nothing."""
        self.scattered()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _as_message(self, grads: list[Tensor]) -> Tensor:
        """Returns the gradients as one message, and makes them views of it, where sums arrive.

        A gradient that travels alone is not copied. Each keeps the memory order of its parameter.
        """
        flats = [_rows_of(grad, p).reshape(-1) for grad, p in zip(grads, self.parameters)]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            rows = part.view(_rows_of(parameter, parameter).shape)
            parameter.grad = rows.t() if shard_of(parameter).transposed else rows
        return flat


def counted_square(parameters: Iterable[nn.Parameter], axes: Axes) -> Tensor:
    """Returns this rank's contribution to the squared norm of some gradients, a float64 scalar.

    Every element counts once: on the first replica, or on the one that has it in its part, and on
    the first of the stages that share it.
    """

    def counts(shard: ParamShard) -> bool:
        first_stage = not shard.stages or axes.pp.index == shard.stages[0]
        return first_stage and (shard.replicas is None or axes[shard.replicas].index == 0)

    mine = [p for p in parameters if counts(shard_of(p))]
    grads = [p.grad for p in mine if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=axes.device_type)
    if grads[0].device.type != "cpu":  # few kernels
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()
    return torch.stack([_square_on_cpu(grad) for grad in grads]).double().sum()


def _square_on_cpu(grad: Tensor) -> Tensor:
    """Returns the squared norm of a gradient in its own type.

    torch adds the squares of a whole tensor one by one. At 1600 x 6400 that is off by 4e-4 in
    float32, and the error depends on the layout. So no norm has more than `_NORMED` elements.
    `square().sum()` would take ten times as long, most of it to get memory for the squares.
    The result is rounded to float32, so that float64 adds up results in any order without an error.
    """
    stored_by_columns = grad.dim() == 2 and not grad.is_contiguous()
    flat = (grad.t() if stored_by_columns else grad).reshape(-1)
    whole = len(flat) // _NORMED * _NORMED
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _NORMED), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return (norms.double().square().sum() + rest.double().square()).to(grad.dtype)


def _rows_of(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns a view of a tensor like `parameter` whose memory is in the order of its elements."""
    return tensor.detach().t() if shard_of(parameter).transposed else tensor.detach()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> Tensor | None:
    """Multiplies gradients by a scalar on their device, in place, or leaves it to the optimizer.

    Returns:
        The `grad_scale` for torch's fused AdamW, which divides the gradients by it while it reads
        them; None if they are scaled already.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return None
    if grads[0].device.type != "cpu" and grads[0].dtype == torch.float32:
        return factor.reciprocal().float()
    # On a CPU nothing waits, and reading and writing all gradients takes time. AdamW's factor is a
    # float32, too coarse for float64.
    if grads[0].device.type != "cpu" or factor.tolist() != 1.0:
        # The kernel wants one dtype, and the factor must not be rounded to half precision.
        torch._foreach_mul_(grads, factor.to(torch.promote_types(grads[0].dtype, torch.float32)))
    return None


def clip(grads: Sequence[Tensor], square: Tensor, world: Axis, max_norm: float) -> float:
    """Scales gradients in place by their norm over all ranks, and returns the norm before.

    Args:
        square: This rank's part of the squared norm, which is used up.
    """
    norm = float(comm.all_reduce(square, world, label="metrics")) ** 0.5
    if grads and norm > max_norm:
        torch._foreach_mul_([*grads], max_norm / (norm + 1e-6))
    return norm


def clippings(norms: Tensor, max_norm: float) -> Tensor:
    """Returns the factors that scale norms above `max_norm` down to it, otherwise 1.

    A `max_norm` of 0 turns clipping off.
    """
    if not max_norm:
        return torch.ones_like(norms)
    # Not max_norm / (...), which torch computes as a product with the reciprocal.
    return torch.where(norms > max_norm, torch.full_like(norms, max_norm) / (norms + 1e-6), 1.0)


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
