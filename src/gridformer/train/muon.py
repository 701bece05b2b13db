"""Muon: updates of matrices by their orthogonalized momentum (Jordan et al. 2024), on any layout.

Newton and Schulz's iteration turns a matrix X = U S Vᵀ into about U Vᵀ, by products alone:

    A = X Xᵀ      P = b A + c A A      X <- a X + P X          (or Xᵀ X and X P, if that is smaller)

On a grid they are SUMMA's products C = A Bᵀ and C = A B of the blocks that devices have, so that no
device ever has a whole matrix. Replicas that shard the update (`dp_mode: zero1` and `fsdp`) divide
it by matrices: each receives some whole blocks, orthogonalizes them, and sends back the parts.
Otherwise every replica does it all. Small matrices that are alike are multiplied together.

The step and its constants are those of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`:
updates are as large as AdamW's (Liu et al. 2025), so both share a learning rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import irregular
from gridformer.config import TrainConfig
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import Attention, CrossAttention, Layer
from gridformer.parallel.data.zero import FlatBucket, own_part, replica_part
from gridformer.parallel.sharding import info_of
from gridformer.utils.tensors import loop

LABEL = "muon"
_A, _B, _C, _TURNS = 3.4445, -4.7750, 2.0315, 5
_LEAST = 1e-7  # of a norm by which momentum is divided
TOGETHER = 2**24  # elements of blocks of matrices that are multiplied together
_AS_ADAMW = 0.2  # the root mean square of AdamW's updates, about


def muon_matrices(model: nn.Module, by_head: bool) -> dict[nn.Parameter, int]:
    """Returns the matrices of layers that Muon updates, tables not among them.

    The value is the number of columns that are a matrix each: the width of a head, if matrices of
    queries, keys and values are orthogonalized `by_head`, otherwise 0, which means all.
    """
    tables, heads = set[nn.Parameter](), dict[nn.Parameter, int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables.update(module.parameters())
        if by_head and isinstance(module, Attention | CrossAttention):
            opens = [one for name, one in module.named_children() if name in ("qkv", "q", "kv")]
            heads |= {p: module.head_dim for one in opens for p in one.parameters()}
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    inside = dict.fromkeys(p for layer in layers for p in layer.parameters())
    return {p: heads.get(p, 0) for p in inside if p.dim() in (2, 3) and p not in tables}


class Muon(torch.optim.Optimizer):
    """Muon of blocks of matrices; see the module's docstring.

    Args:
        matrices: What `muon_matrices` returns of the parameters that this rank owns. All ranks that
            hold a block of one of them, or a part of such a block, step together.
        axes: The axes of the mesh.

    Attributes:
        alike: The matrices, in lists of those that are alike.
        found_inf: 1 if a step must update nothing, otherwise 0, as a float32 scalar; None means 0.
        grad_scale: What gradients are to be divided by; None means 1.
    """

    def __init__(
        self, matrices: Mapping[nn.Parameter, int], train: TrainConfig, axes: Axes
    ) -> None:
        updated = [own_part(parameter) for parameter in matrices]
        super().__init__(updated, {"lr": train.lr, "weight_decay": train.weight_decay})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._momentum = train.muon_momentum
        self._dtype = torch.bfloat16 if train.dtype == "bfloat16" else None
        alike: dict[Any, list[_Matrix]] = defaultdict(list)
        for parameter, width in matrices.items():
            matrix = _Matrix(parameter, width, axes)
            alike[matrix.kind].append(matrix)
        self.alike = [*alike.values()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices from their gradients."""
        (group,) = self.param_groups
        for matrices in self.alike:
            first = matrices[0]
            n = first.replicas.size * max(1, TOGETHER // max(1, first.parameter.numel()))
            turns = [matrices[i : i + n] for i in range(0, len(matrices), n)]
            for turn in loop(turns):
                self._update(turn, group["lr"], group["weight_decay"])

    def _update(self, matrices: Sequence[_Matrix], lr: float, weight_decay: float) -> None:
        updated: list[Tensor] = [matrix.updated for matrix in matrices]
        going = torch.ones((), device=updated[0].device)
        going = going if self.found_inf is None else going - self.found_inf
        going = going.to(updated[0].dtype)
        momenta = [self.state[one]["momentum"] for one in updated]
        grads = [one.grad for one in updated if one.grad is not None]
        if self.grad_scale is not None:
            grads = [*torch._foreach_div(grads, self.grad_scale)]
        if self.found_inf is not None:  # 0 times what is not finite would not be 0
            grads = [torch.where(going > 0, x, m) for x, m in zip(grads, momenta, strict=True)]
        torch._foreach_lerp_(momenta, grads, 1.0 - self._momentum)
        steps = torch._foreach_lerp(grads, momenta, self._momentum)  # Nesterov's
        updates = _orthogonalized(matrices, steps, self._dtype or going.dtype, going)
        torch._foreach_mul_(updated, 1.0 - lr * weight_decay * going)
        size = _AS_ADAMW * math.sqrt(max(matrices[0].size))
        torch._foreach_add_(updated, updates, alpha=-lr * size)


class _Matrix:
    """A parameter that is a matrix [K, N], or several [E, K, N], on this rank and on others.

    Attributes:
        updated: The parameter, or this replica's part of it.
        replicas: The axis of the replicas that share the update.
        size: K and N of the whole matrix; those of a head if it is divided by heads.
        kind: Is equal for parameters that are alike on all ranks.
    """

    def __init__(self, parameter: nn.Parameter, width: int, axes: Axes) -> None:
        info = info_of(parameter)
        self.parameter, self.updated, self.width = parameter, own_part(parameter), width
        shared = replica_part(parameter) is not None
        self.replicas = axes[info.shard.replicas or ""] if shared else Axis("replicas")
        cut = info.cut or (None,) * parameter.dim()
        self.rows, self.columns = (axes[name] if name else Axis("whole") for name in cut[-2:])
        *_, k, n = info.shard.size
        self.size = k, width or n
        if width:
            self.columns = Axis("whole")
            assert parameter.shape[1] % width == 0, "a head lies on several devices"
        shape = tuple(parameter.shape)
        self.kind = shape, info.shard.transposed, width, self.size, cut, info.shard.replicas, shared
        self.bucket = FlatBucket([parameter], self.replicas) if shared else None

    def part_in(self, share: Tensor) -> Tensor:
        """Returns the view of this replica's part in its share of the block."""
        assert self.bucket is not None
        return self.bucket.parts(share)[0]

    def joined(self, shares: Tensor) -> Tensor:
        """Returns the block, given the shares of all replicas [replicas, share]."""
        assert self.bucket is not None
        shape, strides = self.parameter.shape, self.parameter.stride()
        block = torch.empty_strided(shape, strides, dtype=shares.dtype, device=shares.device)
        self.bucket.part(shares, [block])
        return block

    def stacked(self, blocks: Sequence[Tensor]) -> Tensor:
        """Returns this device's blocks of matrices like this one as one tensor [n, ..]."""
        several = torch.stack([*blocks])
        if self.width:
            several = several.unflatten(2, (-1, self.width)).transpose(1, 2)
        return several.flatten(0, -3)

    def unstacked(self, several: Tensor, n: int) -> list[Tensor]:
        """Returns the blocks of n matrices, which `stacked` has put together."""
        several = several.unflatten(0, (n, -1))
        if self.width:
            several = several.transpose(1, 2).flatten(2)
        elif self.parameter.dim() == 2:
            several = several.squeeze(1)
        return [*several.unbind()]

    def orthogonalized(self, blocks: Sequence[Tensor]) -> Tensor:
        """Orthogonalizes matrices like this one; all devices with blocks of them call it."""
        return orthogonalized(self.stacked(blocks), self.rows, self.columns)


def _orthogonalized(
    matrices: Sequence[_Matrix], blocks: Sequence[Tensor], dtype: torch.dtype, factor: Tensor
) -> list[Tensor]:
    """Orthogonalizes matrices that are alike, in `dtype`, given this rank's part of each.

    Of n replicas that share the update, each has every n-th matrix. The results are multiplied by
    `factor`, whose type they have.
    """
    like, replicas = matrices[0], matrices[0].replicas
    if like.bucket is None:
        several = like.orthogonalized([block.to(dtype) for block in blocks])
        return like.unstacked(several.to(factor.dtype).mul_(factor), len(blocks))
    n = replicas.size
    shape, one_each = (n, -(-len(matrices) // n), like.bucket.share), [1] * n
    sent = blocks[0].new_zeros(shape, dtype=dtype)
    for i, (matrix, block) in enumerate(zip(matrices, blocks)):
        matrix.part_in(sent[i % n, i // n]).copy_(block)
    parts = irregular.all_to_all_rows(sent, one_each, one_each, replicas, LABEL)
    if mine := matrices[replicas.index :: n]:
        several = like.orthogonalized([one.joined(parts[:, j]) for j, one in enumerate(mine)])
        for j, (matrix, whole) in enumerate(zip(mine, like.unstacked(several, len(mine)))):
            assert matrix.bucket is not None
            sent[:, j] = matrix.bucket.join([whole])
    parts = irregular.all_to_all_rows(sent, one_each, one_each, replicas, LABEL)
    parts = parts.to(factor.dtype).mul_(factor)
    return [matrix.part_in(parts[i % n, i // n]) for i, matrix in enumerate(matrices)]


def orthogonalized(x: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Returns about U Vᵀ of matrices U S Vᵀ, given this device's block of each.

    Args:
        x: The blocks [E, k, n], equally large on all devices.
        rows: The axis over which rows of the matrices are cut.
        columns: The axis over which their columns are cut.
    """
    (_, k, n), r, c = x.shape, rows.size, columns.size
    if k * r > n * c:  # X Xᵀ would be larger than Xᵀ X
        return orthogonalized(x.mT, columns, rows).mT
    wide = torch.promote_types(x.dtype, torch.float32)
    squares = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide).square()
    for axis in (rows, columns):
        squares = comm.all_reduce(squares, axis, label=LABEL)
    x = x / squares.sqrt().clamp(min=_LEAST).to(x.dtype)
    if more := -k % (c // math.gcd(r, c)):  # zeros, which stay zeros
        x = nn.functional.pad(x, (0, 0, 0, more))
    for _ in range(_TURNS):
        column = comm.all_gather(x, rows, 1, LABEL)
        gram = comm.reduce_scatter(x @ column.mT, columns, 2, LABEL)
        along = comm.start_all_gather(gram, columns, 2, LABEL)
        down = comm.all_gather(gram, rows, 1, LABEL)
        terms = torch.baddbmm(gram, along.wait(), down, beta=_B, alpha=_C)
        x = torch.baddbmm(x, comm.all_gather(terms, columns, 2, LABEL), column, beta=_A)
    return x[:, :k]
