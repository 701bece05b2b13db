"""What happens to gradients between backward and update, and to parameters after it.

Each parameter element has one owner per replica (gridformer.parallel.placement). Gradients of
copies are added on the owner, then over replicas; the norm counts every element once; after the
update the owner's values travel back to the copies. Small tensors travel together, in buckets.

What several stages of a pipeline share is owned on each of them: gradients are added up over them,
after the copies and before the replicas, and the first one's count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes, Axis
from gridformer.parallel.placement import Shard, shard_of

_BUCKET_BYTES = 25 << 20
LABEL = "gradients"
Piece = TypeVar("Piece", bound=Tensor)


def owned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that this rank updates, counts and saves."""
    return [(name, p) for name, p in model.named_parameters() if shard_of(p).owned]


def reduce_gradients(model: nn.Module, axes: Axes, begun: GradientSums | None = None) -> None:
    """Add up gradients where they are partial: copies on their owner, then over the stages that
    share a parameter, then over replicas.

    Afterwards the gradients of owned parameters are those of the whole batch (zero where one took
    no part, so that every layout updates it alike); the others' are undefined. begun: sums that
    were started during the backward pass; they are finished here.
    """
    partial: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        shard = shard_of(parameter)
        if shard.partial and shard.copies:
            partial[shard.copies].append(_grad(parameter))
    for name, grads in partial.items():
        axis = axes[name]
        _in_buckets(grads, lambda flat, axis=axis: comm.reduce(flat, axis, 0, LABEL))  # type: ignore[misc]
    for stages, parameters in _shared(model).items():
        axis = axes.holders(stages)
        grads = [_grad(parameter) for _, parameter in parameters if shard_of(parameter).owned]
        _in_buckets(grads, lambda flat, axis=axis: comm.all_reduce(flat, axis, label=LABEL))  # type: ignore[misc]
    started = begun.parameters if begun else set()
    rest: dict[str, list[Tensor]] = defaultdict(list)
    for _, parameter in owned(model):
        if parameter not in started:
            rest[shard_of(parameter).replicas].append(_grad(parameter))
    for name, grads in rest.items():
        axis = axes[name]
        if axis.size > 1:
            _in_buckets(grads, lambda flat, axis=axis: comm.all_reduce(flat, axis, label=LABEL))  # type: ignore[misc]
    if begun:
        begun.finish()


class GradientSums:
    """Sums over replicas that are started while the backward pass goes on, bucket by bucket.

    Buckets are filled from the model's end, where backward begins, and are sent in that order on
    every rank, each as soon as all its gradients are there. Parameters whose gradients are partial
    on copies or on stages are left to `reduce_gradients`, which adds up these first.

    Args:
        groups: axes, and the parameters whose gradients are added up over each.
        order: all parameters, in the model's order; the same on every rank of an axis.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Axis, Sequence[nn.Parameter]]],
        order: Sequence[nn.Parameter],
    ) -> None:
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._armed: Collection[nn.Parameter] = ()
        self._sent = 0
        place = {parameter: i for i, parameter in enumerate(reversed(order))}
        for axis, parameters in groups:
            if axis.size == 1:
                continue
            total = sum(p.numel() * p.element_size() for p in parameters)
            # At least four, so that all but the last can travel while backward goes on.
            limit = min(_BUCKET_BYTES, total // 4)
            for part in _buckets(sorted(parameters, key=lambda p: place[p]), limit):
                self._buckets.append(_Bucket(axis, list(part)))
        self._buckets.sort(key=lambda bucket: max(place[p] for p in bucket.parameters))
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._ready)

    @staticmethod
    def of(model: nn.Module, axes: Axes) -> GradientSums:
        """Over replicas of what a rank owns, but for what is partial on copies or on stages."""
        held: dict[str, list[nn.Parameter]] = defaultdict(list)
        for _, parameter in owned(model):
            shard = shard_of(parameter)
            if not shard.partial and not shard.stages:
                held[shard.replicas].append(parameter)
        groups = [(axes[name], parameters) for name, parameters in held.items()]
        return GradientSums(groups, [*model.parameters()])

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
            yield
        finally:
            self._armed = ()

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


class _Bucket:
    """Gradients that are added up over an axis in one message."""

    def __init__(self, axis: Axis, parameters: list[nn.Parameter]) -> None:
        self.axis, self.parameters = axis, parameters
        self.missing = set(parameters)
        self._pending: comm.Pending | None = None

    def start(self) -> None:
        flat = torch.cat([_grad(parameter).reshape(-1) for parameter in self.parameters])
        self._pending = comm.start_all_reduce(flat, self.axis, label=LABEL)

    def finish(self) -> None:
        assert self._pending is not None
        total, self._pending = self._pending.wait(), None
        parts = total.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            grad = _grad(parameter)
            grad.copy_(part.view_as(grad))


def squared_norm(model: nn.Module, axes: Axes) -> Tensor:
    """This rank's share of the squared gradient norm (float64): sum it over all ranks.

    Every element counts once: owned ones only, on the first replica and the first stage only.
    """
    mine = [p for _, p in owned(model) if _counts(shard_of(p), axes)]
    grads = [p.grad for p in mine if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=axes.device_type)
    # torch._foreach_norm adds up one by one on CPU: 4e-4 off at 1600 x 6400, and so by the layout.
    return torch.stack([grad.square().sum() for grad in grads]).double().sum()


def _counts(shard: Shard, axes: Axes) -> bool:
    first_stage = not shard.stages or axes.pp.index == shard.stages[0]
    return first_stage and axes[shard.replicas].index == 0


def clip_gradients(model: nn.Module, norm: float, max_norm: float) -> None:
    """Scale gradients so that a global norm above `max_norm` becomes that; 0 turns it off."""
    if max_norm and norm > max_norm:
        grads = [p.grad for _, p in owned(model) if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, max_norm / (norm + 1e-6))


@torch.no_grad()
def share_copies(model: nn.Module, axes: Axes) -> None:
    """Give every copy of a parameter its owner's value: one message an axis."""
    copies: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        name = shard_of(parameter).copies
        if name:
            copies[name].append(parameter.data)
    for name, tensors in copies.items():
        axis = axes[name]
        _in_buckets(tensors, lambda flat, axis=axis: comm.broadcast(flat, axis, 0, "copies"))  # type: ignore[misc]


def assert_copies_equal(model: nn.Module, axes: Axes) -> None:
    """Compare, bit by bit, what must be equal on several ranks: replicas, copies of vectors, and
    what stages share.

    Raises RuntimeError with the names that differ, on every rank of the axis concerned.
    """
    found = []
    for key in ("dp", "every", "row", "col", "grid"):
        held = [
            (name, p)
            for name, p in model.named_parameters()
            if key in (shard_of(p).replicas, shard_of(p).copies)
        ]
        found += _unequal(held, axes[key])
    for stages, held in _shared(model).items():
        found += _unequal(held, axes.holders(stages))
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
    words = parameter.detach().contiguous().view(torch.uint8).to(torch.int64).flatten()
    return (words * (torch.arange(len(words), device=words.device) % 8191 + 1)).sum()


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
