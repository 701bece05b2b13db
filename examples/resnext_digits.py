"""Trains a ResNeXt on hand-written digits, with its branches on sub-grids of processes.

    python examples/resnext_digits.py --processes 4 --branches-on 4 --common first

The losses are the same for any --processes, --branches-on and --common. It computes in float64,
because rounding in float32 alone would separate the curves within an epoch. Under torchrun or srun
it uses the processes they started.

Data: 1,797 gray images of 8x8 pixels from scikit-learn (nothing is downloaded). Source: Alpaydin
and Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, license CC BY 4.0; scikit-learn ships its test set.
"""

from __future__ import annotations

import argparse
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.launch import launch
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.models.branches import Branches
from gridformer.parallel.branches import parallelize_branches

Common = Literal["all", "first"]
BATCH = 32  # does not divide the number of training images: an epoch ends with a smaller batch
HELD_OUT = 360


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
    """ResNeXt (Xie et al. 2017) for small images [b, colors, y, x]: logits [b, classes].

    GroupNorm replaces BatchNorm, whose statistics would depend on how a batch is distributed.
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


def digits() -> tuple[Tensor, Tensor]:
    """Load images [1797, 1, 8, 8] in [-1, 1] and labels [1797]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float64).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


def train(
    images: Tensor,
    labels: Tensor,
    branches_on: int,
    common: Common,
    epochs: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[list[float], float]:
    """Train; return each epoch's mean loss and the accuracy, equal on all processes."""
    torch.manual_seed(seed)  # the same weights on every process
    model = ResNeXt(branches=8, blocks=2).to(device, images.dtype)
    placed = parallelize_branches(model, branches_on, common)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    if placed.rank == 0:
        print(placed.describe(), flush=True)

    shuffle = torch.Generator().manual_seed(seed)  # the same batches on every process
    held_out, training = torch.randperm(len(images), generator=shuffle).split(
        [HELD_OUT, len(images) - HELD_OUT]
    )
    means = []
    for epoch in range(epochs):
        losses = []
        for batch in training[torch.randperm(len(training), generator=shuffle)].split(BATCH):
            x, y = placed.local(images[batch]), placed.local(labels[batch])
            loss = F.cross_entropy(placed.model(x), y, reduction="sum")
            optimizer.zero_grad()
            placed.backward(loss / len(batch))
            optimizer.step()
            losses.append(loss.detach())
        schedule.step()
        means.append(placed.total(torch.stack(losses).sum()) / len(training))
        if placed.rank == 0:
            print(f"epoch {epoch + 1:2}  loss {means[-1]:.4f}", flush=True)

    with torch.no_grad():
        x, y = placed.local(images[held_out]), placed.local(labels[held_out])
        correct = placed.total((placed.model(x).argmax(1) == y).sum())
    if placed.rank == 0:
        print(f"held-out accuracy {correct / HELD_OUT:.1%} of {HELD_OUT} images", flush=True)
    return means, correct / HELD_OUT


def worker(
    n: int, images: Tensor, labels: Tensor, branches_on: int, common: Common, epochs: int, seed: int
) -> None:
    """Train on one of n processes."""
    world = init_process_groups("auto", n, timeout_s=60.0)
    train(images, labels, branches_on, common, epochs, seed, world.device)
    close_process_groups()


def main() -> None:
    parser = argparse.ArgumentParser(description="A ResNeXt with its branches on sub-grids.")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--branches-on", type=int, metavar="G", help="sub-grids; default: N")
    parser.add_argument(
        "--common",
        choices=["all", "first"],
        default="all",
        help="where the layers outside branches lie: on all processes, or on the first sub-grid's",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    g = args.branches_on or args.processes
    how = (g, args.common, args.epochs, args.seed)
    launch(worker, (args.processes, *digits(), *how), args.processes)


if __name__ == "__main__":
    main()
