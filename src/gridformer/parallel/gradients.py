"""What happens to gradients between backward and update, and to parameters after it.

Each parameter element has one owner per replica (gridformer.parallel.placement). Gradients of
copies are added on the owner, then over replicas; the norm counts every element once; after the
update the owner's values travel back to the copies. Small tensors travel together, in buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes, Axis
from gridformer.parallel.placement import shard_of

_BUCKET_BYTES = 25 << 20
LABEL = "gradients"
Piece = TypeVar("Piece", bound=Tensor)


def owned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that this rank updates, counts and saves."""
    return [(name, p) for name, p in model.named_parameters() if shard_of(p).owned]


def reduce_gradients(model: nn.Module, axes: Axes, begun: GradientSums | None = None) -> None:
    """Add up gradients where they are partial: copies on their owner, then over replicas.

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
    on copies are left to `reduce_gradients`, which adds up the copies first.

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
        self._armed, self._sent = False, 0
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
        """Over replicas of what a rank owns, but for copies whose gradients are partial."""
        held: dict[str, list[nn.Parameter]] = defaultdict(list)
        for _, parameter in owned(model):
            shard = shard_of(parameter)
            if not shard.partial:
                held[shard.replicas].append(parameter)
        groups = [(axes[name], parameters) for name, parameters in held.items()]
        return GradientSums(groups, [*model.parameters()])

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those whose gradients are added up here."""
        return set(self._bucket_of)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the backward pass after which gradients are complete: their sums start in it."""
        self._armed, self._sent = True, 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Wait until all gradients are added up. Call once after each `last_backward`."""
        for bucket in self._buckets[self._sent :]:  # some of its parameters had no gradient
            bucket.start()
        self._sent = 0
        for bucket in self._buckets:
            bucket.finish()

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self._armed:
            return
        self._bucket_of[parameter].missing.discard(parameter)
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._buckets[self._sent].start()
            self._sent += 1


class _Bucket:
    """Gradients that are added up over an axis in one message."""

    def __init__(self, axis: Axis, parameters: list[nn.Parameter]) -> None:
        self.axis, self.parameters = axis, parameters
        self.missing: set[nn.Parameter] = set()
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

    Every element counts once: owned ones only, on the first replica only.
    """
    mine = [p for _, p in owned(model) if axes[shard_of(p).replicas].index == 0]
    grads = [p.grad for p in mine if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=axes.device_type)
    # torch._foreach_norm adds up one by one on CPU: 4e-4 off at 1600 x 6400, and so by the layout.
    return torch.stack([grad.square().sum() for grad in grads]).double().sum()


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
    """Compare, bit by bit, what must be equal on several ranks: replicas, and copies of vectors.

    Raises RuntimeError with the names that differ, on every rank of the axis concerned.
    """
    for key in ("dp", "every", "row", "col", "grid"):
        axis = axes[key]
        if axis.size == 1:
            continue
        held = [
            (name, p)
            for name, p in model.named_parameters()
            if key in (shard_of(p).replicas, shard_of(p).copies)
        ]
        if not held:
            continue
        sums = torch.stack([_checksum(p) for _, p in held])
        low = comm.all_reduce(sums.clone(), axis, "min", "sanity")
        high = comm.all_reduce(sums, axis, "max", "sanity")
        names = [name for (name, _), differs in zip(held, (low != high).tolist()) if differs]
        if names:
            raise RuntimeError(f"copies over axis {key} differ: {', '.join(names)}")


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
