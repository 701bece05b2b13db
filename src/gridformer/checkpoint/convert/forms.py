"""How a parameter of ours is stored by Hugging Face: as it is, transposed, or in several parts.

Every form works on some rows of its result at a time, so that a conversion needs the memory of a
few rows, whatever the size of a tensor. Its arguments may be views of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Form(Protocol):
    """The relation between one parameter of ours and one or more tensors of theirs."""

    def shape_of_theirs(self, ours: Shape) -> Shape:
        """Returns the shape of each of their tensors, given that of ours."""

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        """Returns some rows of our parameter.

        Args:
            theirs: Their tensors in the table's order, whole.
            rows: The rows of ours.
        """

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        """Returns some rows of one of their tensors.

        Args:
            ours: Our parameter, whole.
            part: The number of their tensor in the table's order.
            rows: The rows of theirs.
        """


@dataclass(frozen=True)
class Same:
    """Both store the same tensor."""

    def shape_of_theirs(self, ours: Shape) -> Shape:
        return ours

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        return theirs[0][rows]

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        return ours[rows]


@dataclass(frozen=True)
class Transposed:
    """Our matrix is [in, out] and theirs is that of torch.nn.Linear, [out, in]."""

    def shape_of_theirs(self, ours: Shape) -> Shape:
        return ours[::-1]

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        return theirs[0][:, rows].t()

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        return ours[:, rows].t()


@dataclass(frozen=True)
class Interleaved:
    """Ours are the columns of several products by heads; theirs is one torch.nn.Linear for each.

    Ours is a matrix [in, n parts d] or a bias [n parts d], whose columns are ordered by head, then
    by part; theirs are matrices [n d, in] or biases [n d].

    Attributes:
        parts: The number of products, such as 3 for q, k and v.
        d: The width of a head.
    """

    parts: int
    d: int

    def shape_of_theirs(self, ours: Shape) -> Shape:
        return ours[-1] // self.parts, *ours[:-1]

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        bias = theirs[0].dim() == 1
        chosen = theirs if bias else [one[:, rows].t() for one in theirs]
        by_head = torch.stack([one.unflatten(-1, (-1, self.d)) for one in chosen], -2)
        found = by_head.flatten(-3)
        return found[rows] if bias else found

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        column = torch.arange(rows.start, rows.stop)
        head, within = column // self.d, column % self.d
        found = ours[..., (head * self.parts + part) * self.d + within]
        return found if found.dim() == 1 else found.t()


@dataclass(frozen=True)
class SideBySide:
    """As `Interleaved`, but theirs is one tensor [in, parts n d] or [parts n d], as in GPT-2."""

    parts: int
    d: int

    def shape_of_theirs(self, ours: Shape) -> Shape:
        return ours

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        return self._reordered(theirs[0], (self.parts, -1, self.d), rows)

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        return self._reordered(ours, (-1, self.parts, self.d), rows)

    def _reordered(self, x: Tensor, columns: tuple[int, int, int], rows: slice) -> Tensor:
        bias = x.dim() == 1
        chosen = x if bias else x[rows]
        found = chosen.unflatten(-1, columns).transpose(-3, -2).flatten(-3)
        return found[rows] if bias else found


@dataclass(frozen=True)
class Reversed:
    """As torch.nn.Linear's weight or bias, with the outputs in the opposite order."""

    def shape_of_theirs(self, ours: Shape) -> Shape:
        return ours[::-1]

    def ours(self, theirs: Sequence[Tensor], rows: slice) -> Tensor:
        return theirs[0].flip(0).t()[rows]

    def theirs(self, ours: Tensor, part: int, rows: slice) -> Tensor:
        return ours.t().flip(0)[rows]


SAME, TRANSPOSED, REVERSED = Same(), Transposed(), Reversed()
