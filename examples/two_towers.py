"""Trains a tower for users and a tower for items on sub-grids; the user tower has a section inside.

    python examples/two_towers.py --processes 4

The data are synthetic and follow from a seed. A user has 24 features, an item has 12, and a score
is the product of two hidden vectors plus noise, where each vector is a fixed nonlinear function of
one side's features. The user tower costs twice as much as the item tower, so 3 processes do equal
work; the five paths inside it have different costs, which the sub-grids share evenly. The losses
are the same for any --processes.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.launch import launch
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.models.branches import Branches
from gridformer.parallel.branches import parallelize_branches

USER, ITEM, HIDDEN = 24, 12, 4  # features of each, and size of the vectors behind a score
N, HELD_OUT, BATCH = 9192, 1000, 120  # 120 does not divide 8192: an epoch ends with a smaller batch
NOISE = 0.05  # standard deviation


class Path(nn.Module):
    """Maps h features to h through `width`."""

    def __init__(self, h: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, width), nn.Linear(width, h)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class TwoTowers(nn.Module):
    """Maps features [b, user + item] to scores [b]."""

    def __init__(self, h: int = 32, embedding: int = 8) -> None:
        super().__init__()
        paths = Branches([Path(h, width) for width in (48, 8, 32, 16, 24)])
        user = nn.Sequential(nn.Linear(USER, h), nn.GELU(), paths, nn.Linear(h, embedding))
        item = nn.Sequential(
            nn.Linear(ITEM, 96), nn.GELU(), nn.Linear(96, h), nn.GELU(), nn.Linear(h, embedding)
        )
        self.towers = Branches([user, item], "slice", "concat", sizes=(USER, ITEM))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.towers(x).chunk(2, dim=-1)
        return (user * item).sum(-1) + self.bias


def scores(seed: int) -> tuple[Tensor, Tensor]:
    """Return features [N, user + item], and scores [N] of mean 0 and deviation 1 plus noise."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    x = normal(N, USER + ITEM)
    user = torch.tanh(x[:, :USER] @ normal(USER, HIDDEN) / USER**0.5)
    item = torch.tanh(x[:, USER:] @ normal(ITEM, HIDDEN) / ITEM**0.5)
    y = (user * item).sum(1)
    return x, (y - y.mean()) / y.std() + NOISE * normal(N)


def sub_grids(n: int) -> dict[str, int]:
    """Return sub-grids of n processes: up to two for towers, three inside the user tower."""
    # the first sub-grid is the larger, and LPT gives it the costlier tower
    in_user_tower = n - n // 2
    return {"towers": min(2, n), "towers.branches.0.*": min(3, in_user_tower)}


def train(
    g: int | dict[str, int], epochs: int, seed: int = 0, device: str | torch.device = "cpu"
) -> tuple[list[float], float]:
    """Train, and return each epoch's mean squared error and that of the held-out scores.

    The results are the same on all processes.
    """
    torch.manual_seed(seed)  # the same weights on every process
    placed = parallelize_branches(TwoTowers().double().to(device), g)
    optimizer = torch.optim.Adam(placed.parameters(), lr=3e-3)
    if placed.rank == 0:
        print(placed.describe(), flush=True)

    features, wanted = scores(seed)  # the same data on every process
    shuffle = torch.Generator().manual_seed(seed)
    means = []
    for epoch in range(epochs):
        losses = []
        for batch in torch.randperm(N - HELD_OUT, generator=shuffle).split(BATCH):
            x, y = placed.local(features[batch]), placed.local(wanted[batch])
            loss = F.mse_loss(placed.model(x), y, reduction="sum")
            optimizer.zero_grad()
            placed.backward(loss / len(batch))
            optimizer.step()
            losses.append(loss.detach())
        means.append(placed.total(torch.stack(losses).sum()) / (N - HELD_OUT))
        if placed.rank == 0:
            print(f"epoch {epoch + 1:2}  squared error {means[-1]:.4f}", flush=True)

    with torch.no_grad():
        x, y = placed.local(features[-HELD_OUT:]), placed.local(wanted[-HELD_OUT:])
        error = placed.total(F.mse_loss(placed.model(x), y, reduction="sum")) / HELD_OUT
    if placed.rank == 0:
        print(f"held-out squared error {error:.4f} (the mean for all: 1.00)", flush=True)
    return means, error


def worker(n: int, epochs: int, seed: int) -> None:
    """Train on one of n processes."""
    world = init_process_groups("auto", n, timeout_s=60.0)
    train(sub_grids(n), epochs, seed, world.device)
    close_process_groups()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two towers on sub-grids of processes.")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    launch(worker, (args.processes, args.epochs, args.seed), args.processes)


if __name__ == "__main__":
    main()
