"""What happens to gradients between backward and update, and to parameters after it.

Each parameter element has one owner per replica (gridformer.parallel.sharding). Gradients of
copies are added on the owner, then over replicas; the norm counts every element once; after the
update the owner's values travel back to the copies. Small tensors travel together, in buckets.

What several stages of a pipeline share is owned on each of them: gradients are added up over them,
after the copies and the replicas, and the first one's count.

Where replicas share out the update (gridformer.parallel.data.zero), each receives the sums of its
parts alone, a reduce-scatter in the place of the all-reduce, and what it has updated travels back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.parallel.data.zero import FlatBucket, replica_part, stored
from gridformer.parallel.sharding import ParamShard, shard_of

_BUCKET_BYTES = 25 << 20
_IN_FLIGHT = 2  # messages of parts: whole gradients are held until theirs has arrived
LABEL = "gradients"
Piece = TypeVar("Piece", bound=Tensor)


def owned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that this rank updates, counts and saves: of cut ones, its part."""
    return [(name, _updated(parameter)) for name, parameter in _owned_whole(model)]


def _owned_whole(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if shard_of(p).owned]


def clear_gradients(model: nn.Module) -> None:
    """Of all that a model computes with and of what is updated."""
    for parameter in model.parameters():
        parameter.grad = None
        part = replica_part(parameter)
        if part is not None:
            part.grad = None


def reduce_gradients(
    model: nn.Module,
    axes: Axes,
    begun: GradientSums | None = None,
    without: Collection[nn.Parameter] = (),
) -> None:
    """Add up gradients where they are partial: copies on their owner, then over replicas, then over
    the stages that share a parameter.

    Afterwards the gradients of owned parameters are those of the whole batch (zero where one took
    no part, so that every layout updates it alike); the others' are undefined. begun: sums that
    were started during the backward pass; they are finished here. without: have been updated.
    """
    partial: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        shard = shard_of(parameter)
        if shard.partial and shard.copies:
            partial[shard.copies].append(_grad(parameter))
    for name, grads in partial.items():
        axis = axes[name]
        _in_buckets(grads, lambda flat, axis=axis: comm.reduce(flat, axis, 0, LABEL))  # type: ignore[misc]
    started = begun.parameters if begun else set()
    rest: dict[str, list[nn.Parameter]] = defaultdict(list)
    for _, parameter in _owned_whole(model):
        if parameter not in started and parameter not in without:
            rest[_replicas(parameter)].append(parameter)
    for name, parameters in rest.items():
        axis = axes[name]
        if axis.size == 1:
            for parameter in parameters:
                _grad(parameter)
            continue
        for members in _buckets(parameters, _BUCKET_BYTES):
            bucket = _Bucket(axis, members)
            bucket.start()
            bucket.finish()
    if begun:
        begun.finish()
    for stages, shared in _shared(model).items():
        axis = axes.holders(stages)
        grads = [_grad(_updated(p)) for _, p in shared if shard_of(p).owned]
        _in_buckets(grads, lambda flat, axis=axis: _sum_over_stages(flat, axis))  # type: ignore[misc]
    for parameter in model.parameters():
        if replica_part(parameter) is not None:
            parameter.grad = None  # a copy's, whose owner has the sum


def _sum_over_stages(flat: Tensor, axis: Axis) -> Tensor:
    """In place, to the same bits on every stage and in every replica.

    All replicas of a stage have one sum over replicas, but another stage's ring may have added it
    up in another order. So that sum is made before, and this one in an order that is the same
    everywhere: two terms have but one, more are added in the order of the stages.
    """
    if axis.size == 2:
        return comm.all_reduce(flat, axis, label=LABEL)
    first, *others = comm.all_gather(flat.unsqueeze(0), axis, 0, LABEL)
    flat.copy_(first)
    for term in others:
        flat += term
    return flat


class GradientSums:
    """Sums over replicas that are started while the backward pass goes on, bucket by bucket.

    Buckets are filled from the model's end, where backward begins, and are sent in that order on
    every rank, each as soon as all its gradients are there. Parameters whose gradients are partial
    on copies or on stages are left to `reduce_gradients`, which adds up these first.

    Args:
        groups: axes, and the parameters whose gradients are added up over each.
        order: all parameters, in the model's order; the same on every rank of an axis.
        apart: sets of parameters that share no message; see `finish_of`.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Axis, Sequence[nn.Parameter]]],
        order: Sequence[nn.Parameter],
        apart: Sequence[Sequence[nn.Parameter]] = (),
    ) -> None:
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._armed: Collection[nn.Parameter] = ()
        self._sent = 0
        self.around_last: Callable[[], AbstractContextManager[None]] = nullcontext
        unit_of = {parameter: i for i, unit in enumerate(apart) for parameter in unit}
        place = {parameter: i for i, parameter in enumerate(reversed(order))}
        for axis, parameters in groups:
            if axis.size == 1:
                continue
            total = sum(p.numel() * p.element_size() for p in parameters)
            # At least four, so that all but the last can travel while backward goes on.
            limit = min(_BUCKET_BYTES, total // 4)
            units: dict[int, list[nn.Parameter]] = defaultdict(list)
            for parameter in sorted(parameters, key=lambda p: place[p]):
                units[unit_of.get(parameter, -1)].append(parameter)
            for unit in units.values():
                self._buckets += [_Bucket(axis, list(part)) for part in _buckets(unit, limit)]
        self._buckets.sort(key=lambda bucket: max(place[p] for p in bucket.parameters))
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._ready)

    @staticmethod
    def of(
        model: nn.Module, axes: Axes, apart: Sequence[Sequence[nn.Parameter]] | None = None
    ) -> GradientSums:
        """Over replicas of what a rank owns, but for what is partial on copies or on stages."""
        held: dict[str, list[nn.Parameter]] = defaultdict(list)
        for _, parameter in _owned_whole(model):
            shard = shard_of(parameter)
            if not shard.partial and not shard.stages:
                held[_replicas(parameter)].append(parameter)
        groups = [(axes[name], parameters) for name, parameters in held.items()]
        return GradientSums(groups, [*model.parameters()], apart or ())

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those whose gradients are added up here."""
        return set(self._bucket_of)

    @contextmanager
    def last_backward(self, of: Collection[nn.Parameter] | None = None) -> Iterator[None]:
        """Around the backward pass after which gradients are complete: their sums start in it.

        of: the parameters whose gradients are; all, unless told. Each parameter's last backward
        pass is announced once before `finish`.
        """
        self._armed = self._bucket_of if of is None else of
        try:
            with self.around_last():
                yield
        finally:
            self._armed = ()

    def finish_of(self, parameters: Collection[nn.Parameter]) -> None:
        """Wait until these parameters' gradients are added up. They share no message with others,
        and what is nearer to the model's end has its gradients, too."""
        mine = {self._bucket_of[p] for p in parameters if p in self._bucket_of}
        numbers = [i for i, bucket in enumerate(self._buckets) if bucket in mine]
        while numbers and self._sent <= numbers[-1]:
            self._buckets[self._sent].start()
            self._sent += 1
        for number in numbers:
            self._buckets[number].finish()

    def finish(self) -> None:
        """Wait until all gradients are added up. Call once a step, after the backward passes."""
        for bucket in self._buckets[self._sent :]:  # some of its parameters had no gradient
            bucket.start()
        self._sent = 0
        for bucket in self._buckets:
            bucket.finish()
            bucket.missing = set(bucket.parameters)

    def _ready(self, parameter: nn.Parameter) -> None:
        if parameter not in self._armed:
            return
        self._bucket_of[parameter].missing.discard(parameter)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].start()
            self._sent += 1
            if self._sent > _IN_FLIGHT and self._buckets[self._sent - 1 - _IN_FLIGHT].cut:
                self._buckets[self._sent - 1 - _IN_FLIGHT].finish()


class _Bucket:
    """Gradients that are added up over an axis in one message.

    Of parameters that are cut over the axis each rank receives its parts, and the whole gradients
    are let go of when they have been sent.
    """

    def __init__(self, axis: Axis, parameters: Sequence[nn.Parameter]) -> None:
        self.axis, self.parameters = axis, list(parameters)
        self.missing = set(parameters)
        self._pending: comm.Pending | None = None
        self.cut = replica_part(self.parameters[0]) is not None
        self._flat_bucket = FlatBucket(self.parameters, axis) if self.cut else None

    def start(self) -> None:
        grads = [_grad(parameter) for parameter in self.parameters]
        if self._flat_bucket is None:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._pending = comm.start_all_reduce(flat, self.axis, label=LABEL)
            return
        flat = self._flat_bucket.join(grads)
        for parameter in self.parameters:
            parameter.grad = None
        del grads
        self._pending = comm.start_reduce_scatter(flat, self.axis, 0, LABEL)

    def finish(self) -> None:
        """Wait for the sums; nothing is done a second time."""
        if self._pending is None:
            return
        total, self._pending = self._pending.wait(), None
        if self._flat_bucket is not None:
            for parameter, sums in zip(self.parameters, self._flat_bucket.parts(total.view(-1))):
                part = replica_part(parameter)
                assert part is not None
                part.grad = sums
            return
        parts = total.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            grad = _grad(parameter)
            grad.copy_(part.view_as(grad))


def counted_square(parameters: Iterable[nn.Parameter], axes: Axes) -> Tensor:
    """This rank's share of the squared norm of some gradients (float64): sum it over all ranks.

    parameters: that this rank updates. Every element counts once: on the first replica only or
    where its part is, and on the first of the stages that share it.
    """
    mine = [p for p in parameters if _counts(shard_of(p), axes)]
    grads = [p.grad for p in mine if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=axes.device_type)
    # torch._foreach_norm adds up one by one on CPU: 4e-4 off at 1600 x 6400, and so by the layout.
    return torch.stack([grad.square().sum() for grad in grads]).double().sum()


def _counts(shard: ParamShard, axes: Axes) -> bool:
    first_stage = not shard.stages or axes.pp.index == shard.stages[0]
    return first_stage and (shard.replicas is None or axes[shard.replicas].index == 0)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """In place."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clipping(norm: float, max_norm: float) -> float:
    """The factor that makes a norm above `max_norm` that; 0 turns clipping off."""
    return max_norm / (norm + 1e-6) if max_norm and norm > max_norm else 1.0


@torch.no_grad()
def share_parts(model: nn.Module, axes: Axes) -> None:
    """After an update of parts, give every replica that holds whole parameters (zero1) the others'
    parts, in buckets that are all on their way together."""
    whole: dict[str, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if replica_part(parameter) is not None and stored(parameter) is parameter:
            whole[_replicas(parameter)].append(parameter)
    coming = []
    for name, parameters in whole.items():
        for members in _buckets(parameters, _BUCKET_BYTES):
            flat_bucket = FlatBucket(members, axes[name])
            mine = flat_bucket.join_parts().unsqueeze(0)
            coming.append(
                (flat_bucket, comm.start_all_gather(mine, flat_bucket.axis, 0, "parameters"))
            )
    for flat_bucket, pending in coming:
        flat_bucket.part(pending.wait(), [parameter.data for parameter in flat_bucket.parameters])


@torch.no_grad()
def share_copies(model: nn.Module, axes: Axes) -> None:
    """Give every copy of a parameter its owner's value: one message an axis."""
    copies: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        name = shard_of(parameter).copies
        if name:
            copies[name].append(stored(parameter).data)
    for name, tensors in copies.items():
        axis = axes[name]
        _in_buckets(tensors, lambda flat, axis=axis: comm.broadcast(flat, axis, 0, "copies"))  # type: ignore[misc]


def assert_copies_equal(model: nn.Module, axes: Axes) -> None:
    """Compare, bit by bit, what must be equal on several ranks: replicas, copies of vectors, and
    what stages share.

    Under fsdp replicas hold nothing alike, and copies are compared part by part. Raises
    RuntimeError with the names that differ, on every rank of the axis concerned.
    """
    found = []
    for key in ("dp", "dp_branch", "row", "col", "grid"):
        held = [
            (name, stored(p))
            for name, p in model.named_parameters()
            if key in (shard_of(stored(p)).replicas, shard_of(p).copies)
        ]
        found += _unequal(held, axes[key])
    for stages, shared in _shared(model).items():
        found += _unequal([(name, stored(p)) for name, p in shared], axes.holders(stages))
    if found:  # not before: another axis' ranks may wait for this one
        raise RuntimeError("; ".join(found))


def _unequal(held: Sequence[tuple[str, nn.Parameter]], axis: Axis) -> list[str]:
    if axis.size == 1 or not held:
        return []
    sums = torch.stack([_checksum(p) for _, p in held])
    low = comm.all_reduce(sums.clone(), axis, "min", "sanity")
    high = comm.all_reduce(sums, axis, "max", "sanity")
    names = [name for (name, _), differs in zip(held, (low != high).tolist()) if differs]
    return [f"copies over axis {axis.name} differ: {', '.join(names)}"] if names else []


def _shared(model: nn.Module) -> dict[tuple[int, ...], list[tuple[str, nn.Parameter]]]:
    """By the stages that share them, parameters; in one order on all ranks, whatever they hold."""
    found: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if shard_of(parameter).stages:
            found[shard_of(parameter).stages].append((name, parameter))
    return {stages: found[stages] for stages in sorted(found)}


def _checksum(parameter: Tensor) -> Tensor:
    # Flat before its bytes are read: of a matrix [n, 1] that is stored transposed the last
    # dimension has a stride, though torch calls it contiguous.
    flat = parameter.detach().contiguous().view(-1)
    words = flat.view(torch.uint8).to(torch.int64)
    return (words * (torch.arange(len(words), device=words.device) % 8191 + 1)).sum()


def _replicas(parameter: nn.Parameter) -> str:
    name = shard_of(parameter).replicas
    assert name is not None, "of whole parameters, which have replicas"
    return name


def _updated(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank updates of a parameter that it owns: its part, or all of it."""
    part = replica_part(parameter)
    return parameter if part is None else part


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _in_buckets(tensors: Iterable[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    """Run an in-place collective on flat buckets of tensors of one type, and copy back."""
    for bucket in _buckets(tensors, _BUCKET_BYTES):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        flat = collective(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Piece], limit: int) -> Iterator[Sequence[Piece]]:
    by_type: dict[torch.dtype, list[Piece]] = defaultdict(list)
    size: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if by_type[tensor.dtype] and size[tensor.dtype] + n_bytes > limit:
            yield by_type.pop(tensor.dtype)
            size[tensor.dtype] = 0
        by_type[tensor.dtype].append(tensor)
        size[tensor.dtype] += n_bytes
    yield from by_type.values()
