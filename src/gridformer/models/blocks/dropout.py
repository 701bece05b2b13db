"""Dropout whose masks no layout can change, and the clock that they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gridformer.utils import rng


class Clock(Protocol):
    """What a dropout mask depends on besides its place."""

    @property
    def seed(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def first_sample(self) -> int: ...


@dataclass
class DropoutClock:
    """The Clock of a model, shared by all its dropouts.

    `first_sample` is the global number, within the step's batch, of this rank's first sequence, and
    `n_samples` counts those of its micro-batch.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    n_samples: int = 0

    def at(self, rows: slice) -> None:
        """These rows of the step's batch come next."""
        self.first_sample, self.n_samples = rows.start, rows.stop - rows.start


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, site, global element index).

    Input [b, s, h], or a block of it: `block` says which block along s and along h is held here.
    """

    def __init__(self, p: float, site: str, clock: Clock) -> None:
        super().__init__()
        self.p, self.site, self.clock = p, site, clock
        self.block = (0, 0)

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSH
        key = rng.key(self.clock.seed, self.clock.step, self.site)
        out: Tensor = _Masked.apply(x_BSH, Mask(key, self.clock.first_sample, self.block, self.p))
        return out


@dataclass(frozen=True)
class Mask:
    """Which elements of a [b, s, h] stay: they are multiplied by 1 / (1 - p), the others by 0."""

    key: int
    first_sample: int
    block: tuple[int, int]
    p: float

    def times(self, x_BSH: Tensor) -> Tensor:
        """x masked. Some rows at a time: the integers that decide take several times x's memory."""
        b, s, h = x_BSH.shape
        samples = indices(self.first_sample, b, x_BSH).view(b, 1)
        tokens = indices(self.block[0] * s, s, x_BSH)
        rows = rng.join(samples, tokens).view(-1)
        columns = indices(self.block[1] * h, h, x_BSH)
        flat = x_BSH.reshape(-1, h)
        out = torch.empty_like(flat)
        n_rows = max(1, _AT_ONCE[x_BSH.is_cuda] // h)
        for start in range(0, len(flat), n_rows):
            some = slice(start, start + n_rows)
            torch.mul(flat[some], rng.keep(self.key, rows[some], columns, self.p), out=out[some])
        return out.mul_(1.0 / (1.0 - self.p)).view_as(x_BSH)


# Elements; on a GPU (True) many, since there each piece costs a launch.
_AT_ONCE = {False: 1 << 18, True: 1 << 24}


class _Masked(torch.autograd.Function):
    """x times a mask that is made again for the backward pass, which therefore keeps nothing.

    So nothing of a block that ends in dropout needs its last product, either, and recomputation can
    end before it.
    """

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask.times(x_BSH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.mask.times(grads[0]), None


def indices(start: int, n: int, like: Tensor) -> Tensor:
    """start, start + 1, ...: n of them, where `like` is."""
    return torch.arange(start, start + n, device=like.device)
