"""Two towers, of users and of items, on sub-grids; inside one of them, a section of its own.

    python examples/two_towers.py --processes 4

The data are synthetic, made from a seed: a user has 24 features, an item 12, and a score is the
product of two hidden vectors, each a fixed nonlinear function of one side's features, plus noise.
The user tower costs twice what the item tower does, so 3 processes do equal work; the paths inside
it are of five costs, which sub-grids share evenly. Any --processes print the same losses.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.launch import launch
from gridformer.mesh.process_group import close_world, init_world
from gridformer.models.branches import Branches
from gridformer.parallel.branches import parallelize_branches

USER, ITEM, HIDDEN = 24, 12, 4  # features of each, and of the vectors behind a score
N, HELD_OUT, BATCH = 9192, 1000, 120  # 8192 do not divide by 120: a smaller batch ends an epoch
NOISE = 0.05  # standard deviation


class Path(nn.Module):
    """h features to h by way of `width`."""

    def __init__(self, h: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, width), nn.Linear(width, h)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class TwoTowers(nn.Module):
    """Features [b, user + item] to scores [b]."""

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
    """Synthetic features [N, user + item], and scores [N] of mean 0 and deviation 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    x = normal(N, USER + ITEM)
    user = torch.tanh(x[:, :USER] @ normal(USER, HIDDEN) / USER**0.5)
    item = torch.tanh(x[:, USER:] @ normal(ITEM, HIDDEN) / ITEM**0.5)
    y = (user * item).sum(1)
    return x, (y - y.mean()) / y.std() + NOISE * normal(N)


def sub_grids(n: int) -> dict[str, int]:
    """Of n processes: two for the towers, and up to three inside the user tower's."""
    in_user_tower = n - n // 2  # the first sub-grid is the larger, and LPT gives it the costlier
    return {"towers": min(2, n), "towers.branches.0.*": min(3, in_user_tower)}


def train(
    g: int | dict[str, int], epochs: int, seed: int = 0, device: str | torch.device = "cpu"
) -> tuple[list[float], float]:
    """Mean squared error of each epoch, and of the held-out scores; the same on all processes."""
    torch.manual_seed(seed)  # the same weights everywhere
    placed = parallelize_branches(TwoTowers().double().to(device), g)
    optimizer = torch.optim.Adam(placed.parameters(), lr=3e-3)
    if placed.rank == 0:
        print(placed.describe(), flush=True)

    features, wanted = scores(seed)  # the same data everywhere
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
    """What each of n processes runs."""
    world = init_world("auto", n, timeout_s=60.0)
    train(sub_grids(n), epochs, seed, world.device)
    close_world()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two towers on sub-grids of processes.")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    launch(worker, (args.processes, args.epochs, args.seed), args.processes)


if __name__ == "__main__":
    main()
