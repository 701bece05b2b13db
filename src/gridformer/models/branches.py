"""A section of independent branches, for any network: the paths of a ResNeXt, towers, experts.

    self.paths = Branches([Path(c) for _ in range(32)])            # y = sum of path_i(x)
    self.towers = Branches([user, item], "slice", "concat", sizes=(24, 40))

On one device all branches run one after the other.
`gridformer.parallel.branches.parallelize_branches` puts them on sub-grids of processes; the network
around them stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Enter = Literal["split", "slice"]
Leave = Literal["sum", "concat"]


class Branches(nn.Module):
    """y = branch_0(x_0) + branch_1(x_1) + ..., or joined along `dim`. Dimension 0 holds samples.

    Args:
        branches: modules of one tensor to one tensor; results to be added have one shape.
        enter: `split` gives every branch all of x, `slice` gives branch i its part along `dim`.
        leave: `sum` adds the results up, `concat` joins them along `dim`, in order of the branches.
        dim: features, not samples: any but 0.
        sizes: of the slices; equal ones if there are none.
        costs: the branches' work in any unit, for sharing them out; if there are none, elements of
            their parameters, or 1 where a branch has none.
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
        # By number, so that names stay the same where a process holds some of the branches only.
        self.branches = nn.ModuleDict({str(i): branch for i, branch in enumerate(branches)})
        n = len(self.branches)
        if n == 0:
            raise ValueError("a section needs at least one branch")
        if dim == 0:
            raise ValueError("dim=0 holds samples: name a dimension of features, such as 1 or -1")
        if enter not in ("split", "slice") or leave not in ("sum", "concat"):
            raise ValueError(
                f"enter={enter!r}, leave={leave!r}: enter is 'split' or 'slice', leave is 'sum' or "
                "'concat'"
            )
        for name, values in (("sizes", sizes), ("costs", costs)):
            if values is not None and len(values) != n:
                raise ValueError(f"{len(values)} {name} for {n} branches: give one each")
        if sizes is not None and enter != "slice":
            raise ValueError("sizes are of slices: use enter='slice', or leave sizes out")
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
        """The branches' costs; see the class."""
        if self.costs is not None:
            return [float(cost) for cost in self.costs]
        return [
            float(max(1, sum(p.numel() for p in branch.parameters())))
            for branch in self.branches.values()
        ]


def slice_widths(sizes: Sequence[int] | None, n: int, total: int) -> list[int]:
    """Of n slices of an input that is `total` wide; see `Branches`."""
    if sizes is not None:
        if sum(sizes) != total:
            raise ValueError(f"sizes {(*sizes,)} add up to {sum(sizes)}, not to {total}")
        return [*sizes]
    if total % n:
        raise ValueError(f"{total} does not divide into {n} equal slices: give sizes, one a branch")
    return [total // n] * n
