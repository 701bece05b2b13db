"""ResNeXt (Xie et al. 2017): residual blocks that sum many narrow paths.

A small network for small images, as an example of branches outside transformers. GroupNorm replaces
the paper's BatchNorm, whose statistics would depend on how a batch is distributed over devices.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.branches import Branches


class Path(nn.Module):
    """One branch: reduces c channels to `width`, convolves 3x3, expands. Keeps [b, c, y, x]."""

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
    """Computes relu(x + norm(sum of path_i(x))) for x [b, c, y, x]."""

    def __init__(self, channels: int, width: int, branches: int) -> None:
        super().__init__()
        self.paths = Branches([Path(channels, width) for _ in range(branches)])
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.paths(x)))


class ResNeXt(nn.Module):
    """Maps images [b, colors, y, x] to logits [b, classes].

    Args:
        channels: Channels between blocks.
        width: Channels inside each path.
        branches: Paths per block (the paper's cardinality).
        blocks: Number of residual blocks.
        classes: Number of classes.
        colors: Channels of an image.
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
