"""Dropout whose masks do not depend on the layout, and the clock that they do depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gridformer.models.kernels import library
from gridformer.models.kernels.dropout import masked
from gridformer.utils import rng


class Clock(Protocol):
    """What a dropout mask depends on besides its site and the element's index; see DropoutClock."""

    @property
    def seed(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def first_sample(self) -> int: ...


@dataclass
class DropoutClock:
    """The Clock of a model, shared by all its dropout modules.

    Attributes:
        seed: The seed of the run.
        step: The optimizer step.
        first_sample: The index of this rank's first sequence within the step's global batch.
        n_samples: The number of sequences in this rank's micro-batch.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    n_samples: int = 0

    def at(self, rows: slice) -> None:
        """Sets the rows of the step's global batch that the model runs next."""
        self.first_sample, self.n_samples = rows.start, rows.stop - rows.start


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, site, global element index).

    The input is [b, s, h] or a block of it; `block` holds the indices along s and along h of the
    block on this device. With `fused` a GPU computes mask and product in one kernel.
    """

    def __init__(self, p: float, site: str, clock: Clock) -> None:
        super().__init__()
        self.p, self.site, self.clock = p, site, clock
        self.block = (0, 0)
        self.fused = True

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSH
        key = rng.key(self.clock.seed, self.clock.step, self.site)
        fused = self.fused and library.available(x_BSH.device, x_BSH.dtype)
        mask = Mask(key, self.clock.first_sample, self.block, self.p, fused)
        out: Tensor = _Masked.apply(x_BSH, mask)
        return out


@dataclass(frozen=True)
class Mask:
    """A mask over [b, s, h] that scales kept elements by 1 / (1 - p) and zeroes the others.

    Attributes:
        key: The random key of the seed, step and site.
        first_sample: The global index of the first sequence.
        block: Indices along s and along h of the block that the mask covers.
        p: The probability of dropping an element.
        fused: Whether a kernel of `gridformer.models.kernels` computes the mask.
    """

    key: int
    first_sample: int
    block: tuple[int, int]
    p: float
    fused: bool = False

    def times(self, x_BSH: Tensor) -> Tensor:
        """Returns x [b, s, h] masked."""
        b, s, h = x_BSH.shape
        token, column = self.block[0] * s, self.block[1] * h
        if self.fused:
            return masked(x_BSH, self.key, self.first_sample, token, column, self.p)
        # Runs on some rows at a time: the random integers take several times the memory of x.
        samples = indices(self.first_sample, b, x_BSH).view(b, 1)
        rows = rng.join(samples, indices(token, s, x_BSH)).view(-1)
        columns = indices(column, h, x_BSH)
        flat = x_BSH.reshape(-1, h)
        out = torch.empty_like(flat)
        n_rows = max(1, _CHUNK_ELEMENTS[x_BSH.is_cuda] // h)
        for some in each_part(len(flat), n_rows):
            torch.mul(flat[some], rng.keep(self.key, rows[some], columns, self.p), out=out[some])
        return out.mul_(1.0 / (1.0 - self.p)).view_as(x_BSH)


# Elements per chunk, by whether the tensor is on a GPU: there each chunk costs kernel launches.
_CHUNK_ELEMENTS = {False: 1 << 18, True: 1 << 24}


def each_part(n: int, size: int) -> Sequence[slice]:
    """Returns parts of n rows, in order. An estimate of memory runs equal ones once."""
    return [slice(start, start + size) for start in range(0, n, size)]


class _Masked(torch.autograd.Function):
    """Multiplies x by a mask, which backward generates again, so that nothing is saved.

    A block that ends in dropout therefore does not need the output of its last product in backward,
    and recomputation can stop before it.
    """

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask.times(x_BSH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.mask.times(grads[0]), None


def indices(start: int, n: int, like: Tensor) -> Tensor:
    """Returns the n integers from `start` on, on the device of `like`."""
    return torch.arange(start, start + n, device=like.device)
