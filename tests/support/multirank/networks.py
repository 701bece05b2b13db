"""Networks with branch sections, and the work of one rank to compare them with one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from examples.resnext_digits import ResNeXt
from torch import Tensor, nn

from gridformer.models.branches import Branches
from gridformer.parallel.branches import parallelize_branches


class TwoTowers(nn.Module):
    """Two towers of unequal width and depth on slices of the input, joined by a common head."""

    def __init__(self) -> None:
        super().__init__()
        users = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.common = nn.Linear(9, 9)
        self.towers = Branches([users, nn.Linear(4, 3)], "slice", "concat", sizes=(5, 4))
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.towers(torch.tanh(self.common(x)))))
        return out


class Path(nn.Module):
    def __init__(self, h: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(h, width), nn.Linear(width, h)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Nested(nn.Module):
    """Sections with different numbers of branches, in sequence and nested."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(Branches([Path(9, w) for w in (2, 5, 3)]), nn.Linear(9, 9))
        self.first = Branches([Path(9, 3) for _ in range(4)])
        self.norm = nn.LayerNorm(9)
        self.outer = Branches([inner, Path(9, 7)])
        self.joined = Branches([nn.Linear(9, w) for w in (1, 2, 1)], "split", "concat")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.first(x))
        out: Tensor = self.joined(x + self.outer(x))
        return out


class Uneven(nn.Module):
    """The first section works on the raw input; one of its branches has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Branches([nn.Identity(), Path(9, 30), Path(9, 2), Path(9, 3)])
        self.slices = Branches([nn.Linear(3, 2) for _ in range(3)], "slice", "sum")
        self.head = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.slices(self.front(x)))
        return out


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "towers": TwoTowers,
    "nested": Nested,
    "uneven": Uneven,
    "resnext": lambda: ResNeXt(channels=8, width=2, branches=4, blocks=2, classes=4),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(11)
    return NETWORKS[name]().double()


def batch(name: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (n, 1, 8, 8) if name == "resnext" else (n, 9)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (n,), generator=generator)


def compare(name: str, how: dict[str, Any], sizes: list[int]) -> dict[str, float]:
    """Return the largest differences from one process over some steps of SGD."""
    torch.set_num_threads(1)
    want = build(name)
    placed = parallelize_branches(build(name), **how)
    reference = dict(want.named_parameters())
    mine = {n: p for n, p in placed.model.named_parameters() if not p.is_meta}
    assert mine.keys() <= reference.keys()
    assert set(mine.values()) == set(placed.parameters())
    one = torch.optim.SGD(want.parameters(), lr=0.1)
    many = torch.optim.SGD(placed.parameters(), lr=0.1) if mine else None
    worst = {"output": 0.0, "loss": 0.0, "gradient": 0.0, "parameter": 0.0, "held": 0.0}
    for step, n in enumerate(sizes):
        x, y = batch(name, n, step)
        logits = want(x)
        loss = F.cross_entropy(logits, y, reduction="sum") / n
        one.zero_grad()
        loss.backward()
        one.step()
        if many:
            many.zero_grad()
        local_x, local_y = placed.local(x), placed.local(y)
        out = placed.model(local_x)
        part = F.cross_entropy(out, local_y, reduction="sum") / n
        placed.backward(part)
        assert out.is_meta != placed.holds_common
        if placed.holds_common:
            number = placed.common.ranks.index(placed.rank)
            worst["output"] = worse(worst["output"], out, logits[number :: len(placed.common)])
        worst["loss"] = max(worst["loss"], abs(placed.total(part) - loss.item()))
        for key, p in mine.items():
            assert p.grad is not None, key
            worst["gradient"] = worse(worst["gradient"], p.grad, reference[key].grad)
        if many:
            many.step()
    for key, p in mine.items():
        worst["parameter"] = worse(worst["parameter"], p, reference[key])
    worst["held"] = sum(p.numel() for p in mine.values())
    return worst


def worse(so_far: float, a: Tensor, b: Tensor | None) -> float:
    assert b is not None
    assert a.shape == b.shape
    return max(so_far, float((a.detach() - b.detach()).abs().max()) if a.numel() else 0.0)
