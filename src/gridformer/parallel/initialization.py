"""Allocates and initializes the parameters that this device holds.

A value depends only on the seed, the parameter's name and the element's index in the global tensor,
so it is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gridformer.models.blocks import Init
from gridformer.parallel.sharding import info_of, set_info
from gridformer.utils import rng

_CHUNK = 1 << 20  # elements filled at a time, so that the float64 workspace stays small


def initialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    cut: Callable[[nn.Parameter], None] | None = None,
    filled: bool = True,
) -> None:
    """Replaces every parameter of a model by one that is allocated and initialized, in place.

    Args:
        model: A model on the meta device, sharded or not.
        seed: The seed of the initial values.
        device: Where parameters are allocated.
        dtype: The dtype of the parameters.
        cut: Called with each parameter as soon as it is initialized. The memory that it frees
            (gridformer.parallel.data.zero) is thus never allocated for two parameters at once.
        filled: Whether parameters get their initial values. Otherwise they are 0.
    """
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        info = info_of(parameter)
        shard, init = info.shard, info.init
        assert init is not None, f"{name} has no Init: create it with models.blocks.new_parameter"
        shape = parameter.shape[::-1] if shard.transposed else parameter.shape
        local = torch.zeros(shape, dtype=dtype, device=device)
        local = local.t() if shard.transposed else local
        if filled:
            _fill(shard.valid(local), init, rng.key(seed, name), shard.offset)
        ours = set_info(nn.Parameter(local), info)
        setattr(model.get_submodule(module_name), leaf, ours)
        if cut is not None:
            cut(ours)


def _fill(part: Tensor, init: Init, key: int, offset: tuple[int, ...]) -> None:
    """Fills the block of a vector or matrix that begins at the global index `offset`."""
    if init.std == 0.0 or part.numel() == 0:
        part.fill_(init.mean)
        return
    rows = part if part.dim() == 2 else part.unsqueeze(0)
    first_row, first_col = offset if part.dim() == 2 else (0, offset[0])
    cols = torch.arange(first_col, first_col + rows.shape[1], device=part.device)
    std: float | Tensor
    if isinstance(init.std, tuple):
        stds = torch.tensor(init.std, dtype=torch.float64, device=part.device)
        std = stds[cols // init.width % len(stds)]
    else:
        std = init.std
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        index = torch.arange(first_row + start, first_row + start + len(chunk), device=part.device)
        chunk.copy_(rng.normal(key, index, cols).mul_(std).add_(init.mean))
