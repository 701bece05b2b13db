"""A module of independent branches for any network: the paths of a ResNeXt, towers, experts.

    self.paths = Branches([Path(c) for _ in range(32)])            # y = sum of path_i(x)
    self.towers = Branches([user, item], "slice", "concat", sizes=(24, 40))

One device runs the branches one after the other.
`gridformer.parallel.branches.parallelize_branches` places them on sub-grids of processes; the
network around them stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Enter = Literal["split", "slice"]
Leave = Literal["sum", "concat"]


class Branches(nn.Module):
    """Computes branch_0(x_0) + branch_1(x_1) + ..., or concatenates the results along `dim`.

    Dimension 0 of the input holds the samples.

    Args:
        enter: `split` passes all of x to every branch; `slice` passes branch i its slice along
            `dim`.
        leave: `sum` adds the results; `concat` concatenates them along `dim` in order of the
            branches.
        dim: A dimension of features, so any but 0.
        sizes: The sizes of the slices; None makes them equal.
        costs: The work of each branch in any unit, for assigning branches to sub-grids. None uses
            the number of parameter elements, or 1 for a branch without parameters.

    Raises:
        ValueError: There is no branch, `dim` is 0, `enter` or `leave` is unknown, `sizes` or
            `costs` does not have one entry per branch, `sizes` is given without `enter="slice"`, or
            a cost is negative. `forward` raises it if the input does not divide into the slices.
    """

    def __init__(
        self,
        branches: Iterable[nn.Module],
        enter: Enter = "split",
        leave: Leave = "sum",
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        # A ModuleDict keeps parameter names the same in a process that holds only some branches.
        self.branches = nn.ModuleDict({str(i): branch for i, branch in enumerate(branches)})
        n = len(self.branches)
        if n == 0:
            raise ValueError("Branches needs at least one branch")
        if dim == 0:
            raise ValueError("dim=0 holds samples: use a dimension of features, such as 1 or -1")
        if enter not in ("split", "slice") or leave not in ("sum", "concat"):
            raise ValueError(
                f"enter={enter!r}, leave={leave!r}: enter must be 'split' or 'slice', and leave "
                "'sum' or 'concat'"
            )
        for name, values in (("sizes", sizes), ("costs", costs)):
            if values is not None and len(values) != n:
                raise ValueError(f"{len(values)} {name} for {n} branches: pass one per branch")
        if sizes is not None and enter != "slice":
            raise ValueError("sizes need enter='slice': set it, or omit sizes")
        if costs is not None and min(costs) < 0:
            raise ValueError(f"costs must not be negative: {[*costs]}")
        self.enter, self.leave, self.dim = enter, leave, dim
        self.sizes = None if sizes is None else tuple(sizes)
        self.costs = tuple(costs) if costs is not None else None

    def forward(self, x: Tensor) -> Tensor:
        inputs: Sequence[Tensor] = [x] * len(self.branches)
        if self.enter == "slice":
            widths = slice_widths(self.sizes, len(self.branches), x.shape[self.dim])
            inputs = x.split(widths, self.dim)
        results = [branch(part) for branch, part in zip(self.branches.values(), inputs)]
        if self.leave == "concat":
            return torch.cat(results, self.dim)
        total: Tensor = results[0]
        for result in results[1:]:
            total = total + result
        return total

    def work(self) -> list[float]:
        """Returns the cost of each branch; see `costs` of the class."""
        if self.costs is not None:
            return [float(cost) for cost in self.costs]
        return [
            float(max(1, sum(p.numel() for p in branch.parameters())))
            for branch in self.branches.values()
        ]


def slice_widths(sizes: Sequence[int] | None, n: int, total: int) -> list[int]:
    """Returns the widths of the n slices of an input dimension; see `Branches`.

    Raises:
        ValueError: `sizes` do not add up to `total`, or `total` is not divisible by n.
    """
    if sizes is not None:
        if sum(sizes) != total:
            raise ValueError(f"sizes {(*sizes,)} add up to {sum(sizes)}, not to {total}")
        return [*sizes]
    if total % n:
        raise ValueError(
            f"a dimension of size {total} does not divide into {n} equal slices: give sizes, one "
            "per branch"
        )
    return [total // n] * n
