"""ResNeXt (Xie et al. 2017): residual blocks whose middle is a sum of many narrow paths.

Small, for small images: a network with branches that is no transformer. GroupNorm stands where the
paper has BatchNorm, because statistics over a batch would depend on how its samples are shared out.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.branches import Branches


class Path(nn.Module):
    """One branch: c channels to a few, a 3x3 convolution, and back. [b, c, y, x] to the same."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.GroupNorm(1, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, width)
        self.expand = nn.Conv2d(width, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.reduce(x)))
        x = F.relu(self.norm2(self.conv(x)))
        out: Tensor = self.expand(x)
        return out


class ResidualBlock(nn.Module):
    """x + norm(sum of the paths of x)."""

    def __init__(self, channels: int, width: int, branches: int) -> None:
        super().__init__()
        self.paths = Branches([Path(channels, width) for _ in range(branches)])
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.paths(x)))


class ResNeXt(nn.Module):
    """Images [b, colors, y, x] to logits [b, classes].

    Args:
        channels, width: of the blocks, and of each path inside one. branches: paths of a block (the
            paper's cardinality). blocks: how many.
    """

    def __init__(
        self,
        channels: int = 32,
        width: int = 4,
        branches: int = 8,
        blocks: int = 3,
        classes: int = 10,
        colors: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(colors, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, channels)
        layers = [ResidualBlock(channels, width, branches) for _ in range(blocks)]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out
