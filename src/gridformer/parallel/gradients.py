"""What happens to gradients between backward and update, and to parameters after it.

Each parameter element has one owner per replica (gridformer.parallel.placement). Gradients of
copies are added on the owner, then over replicas; the norm counts every element once; after the
update the owner's values travel back to the copies. Small tensors travel together, in buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes
from gridformer.parallel.placement import shard_of

_BUCKET_BYTES = 25 << 20


def owned(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that this rank updates, counts and saves."""
    return [(name, p) for name, p in model.named_parameters() if shard_of(p).owned]


def reduce_gradients(model: nn.Module, axes: Axes) -> None:
    """Add up gradients where they are partial: copies on their owner, then over replicas.

    Afterwards the gradients of owned parameters are those of the whole batch; the others' are
    undefined.
    """
    partial: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        shard = shard_of(parameter)
        if shard.partial and shard.copies:
            partial[shard.copies].append(_grad(parameter))
    for name, grads in partial.items():
        axis = axes[name]
        _in_buckets(grads, lambda flat, axis=axis: comm.reduce(flat, axis, 0, "gradients"))  # type: ignore[misc]
    if axes.dp.size > 1:
        grads = [_grad(parameter) for _, parameter in owned(model)]
        _in_buckets(grads, lambda flat: comm.all_reduce(flat, axes.dp, label="gradients"))


def squared_norm(model: nn.Module, axes: Axes) -> Tensor:
    """This rank's share of the squared gradient norm (float64): sum it over all ranks.

    Every element counts once: owned ones only, on the first replica only.
    """
    grads = [p.grad for _, p in owned(model) if p.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    if axes.dp.index or not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    # torch._foreach_norm adds up one by one on CPU: 4e-4 off at 1600 x 6400, and so by the layout.
    return torch.stack([grad.square().sum() for grad in grads]).double().sum()


def clip_gradients(model: nn.Module, norm: float, max_norm: float) -> None:
    """Scale gradients so that a global norm above `max_norm` becomes that; 0 turns it off."""
    if max_norm and norm > max_norm:
        grads = [p.grad for _, p in owned(model) if p.grad is not None]
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
    for axis in (axes.dp, axes.row, axes.col, axes.grid):
        if axis.size == 1:
            continue
        held = [
            (name, p)
            for name, p in model.named_parameters()
            if axis.name == "dp" or shard_of(p).copies == axis.name
        ]
        if not held:
            continue
        sums = torch.stack([_checksum(p) for _, p in held])
        low = comm.all_reduce(sums.clone(), axis, "min", "sanity")
        high = comm.all_reduce(sums, axis, "max", "sanity")
        names = [name for (name, _), differs in zip(held, (low != high).tolist()) if differs]
        if names:
            raise RuntimeError(f"copies over axis {axis.name} differ: {', '.join(names)}")


def _checksum(parameter: Tensor) -> Tensor:
    words = parameter.detach().contiguous().view(torch.uint8).to(torch.int64).flatten()
    return (words * (torch.arange(len(words), device=words.device) % 8191 + 1)).sum()


def _grad(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _in_buckets(tensors: Iterable[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    """Run an in-place collective on flat buckets of tensors of one type, and copy back."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        flat = collective(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[Sequence[Tensor]]:
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    size: dict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if by_type[tensor.dtype] and size[tensor.dtype] + n_bytes > _BUCKET_BYTES:
            yield by_type.pop(tensor.dtype)
            size[tensor.dtype] = 0
        by_type[tensor.dtype].append(tensor)
        size[tensor.dtype] += n_bytes
    yield from by_type.values()
