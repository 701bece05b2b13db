"""The modules whose products travel, for every scheme on a grid; Megatron's grid has one row.

A module here stands in for its plain namesake: same name, same parameters, local blocks. Where its
blocks lie follows from which operand of its product stays (gridformer.parallel.auto.cost):

    output stays    W [in, out]: in over rows, out over columns    C = A B, B = W
    input stays     W [in, out]: in over columns, out over rows    C = A Bᵀ, B = Wᵀ
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.data.fsdp import gathered, materialized
from gridformer.parallel.sharding import ParamPlacement, place, vocabulary_multiple
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.boundary import Boundary

OUTPUT_STAYS = ParamPlacement(cut=("row", "col"))
INPUT_STAYS = ParamPlacement(cut=("col", "row"), transposed=True)  # B is read row by row


class Schedules:
    """One of each schedule that a model uses, so that its products share their workspace."""

    def __init__(self, axes: Axes, boundary: Boundary) -> None:
        self.axes, self.boundary = axes, boundary
        self._made: dict[tuple[str, int], summa.Schedule] = {}
        self._last: summa.WeightPrefetcher | None = None

    def chain(self, weight: summa.WeightPrefetcher) -> None:
        """Products are made in forward order; each may ask for its neighbor's weight early."""
        if self.axes.row.size == 1:
            return  # weights are whole
        if self._last is not None:
            self._last.after, weight.before = weight, self._last
        self._last = weight

    def __getitem__(self, choice: Choice) -> summa.Schedule:
        key = choice.schedule, choice.n_chunks
        if key not in self._made:
            match choice.schedule:
                case "broadcast":
                    self._made[key] = summa.Broadcast(self.axes)
                case "pipelined":
                    self._made[key] = summa.Pipelined(self.axes)
                case "gather" if choice.n_chunks == 1:
                    self._made[key] = summa.Gather(self.axes, self.boundary)
                case "gather":
                    self._made[key] = summa.ChunkedGather(self.axes, self.boundary, choice.n_chunks)
        return self._made[key]


def keep_gathered_of(choice: Choice) -> summa.KeepGathered:
    gathers = choice.schedule == "gather"
    return summa.KeepGathered(
        choice.keep_input, summa.WeightPrefetcher(choice.keep_weight) if gathers else None
    )


class GridLinear(nn.Module):
    """y = x W + b. x [.., in/c], y [.., out/c]; W as its choice says; b [out/c]."""

    def __init__(
        self, plain: blocks.Linear, choice: Choice, bias: ParamPlacement, schedules: Schedules
    ) -> None:
        super().__init__()
        self.output_stays = choice.stays == "output"
        self.schedule, self.keep = schedules[choice], keep_gathered_of(choice)
        self.weight, self.bias = plain.weight, plain.bias
        place(self, "weight", OUTPUT_STAYS if self.output_stays else INPUT_STAYS, schedules.axes)
        if plain.bias is not None:
            place(self, "bias", bias, schedules.axes)
        if self.keep.weight is not None:
            self.keep.weight.source = self._source
            role = plain.role
            self.keep.weight.ends_block = role.section == "feed_forward" and not role.opens
            schedules.chain(self.keep.weight)

    def _source(self) -> tuple[Tensor, summa.Schedule]:
        weight = materialized(self.weight)  # of a layer whose turn may be yet to come
        return weight if self.output_stays else weight.t(), self.schedule

    def forward(self, x: Tensor) -> Tensor:
        if self.output_stays:
            return summa.product_ab(x, self.weight, self.schedule, self.bias, self.keep)
        return summa.product_abt(x, self.weight.t(), self.schedule, self.bias, self.keep)


class GridTokenEmbedding(nn.Module):
    """Rows of the table [v, h] for tokens [b/r, s] that are equal along a row of devices.

    The tied head reads the same table, so the head's choice places it. Head's output stays: v over
    columns, h over rows; each column finds the tokens of its range, and the terms are summed.
    Head's input stays (the paper's): v over rows, h over columns.
    """

    def __init__(
        self,
        plain: blocks.TokenEmbedding,
        head: Choice,
        keep: summa.KeepGathered,
        schedules: Schedules,
    ) -> None:
        super().__init__()
        self.axes = axes = schedules.axes
        self.schedule, self.keep = schedules[head], keep
        self.head_output_stays = head.stays == "output"
        self.weight = plain.weight
        cut = ("col", "row") if self.head_output_stays else ("row", "col")
        # The vocabulary alone: a width that columns do not divide is whole on each of them.
        place(self, "weight", ParamPlacement(cut=cut, pad=(vocabulary_multiple(axes), 0)), axes)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        table = self.weight.t() if self.head_output_stays else self.weight
        return summa.lookup(
            tokens_BS, table, self.schedule, self.axes, not self.head_output_stays, self.keep
        )


class GridTiedHead(nn.Module):
    """Logits [b/r, s, v/c] = x Tᵀ with the table that also embeds, and what it keeps of it.

    A bias [v] lies over the columns, as the logits do; every row holds a copy.
    """

    def __init__(
        self, plain: blocks.TiedHead, choice: Choice, keep: summa.KeepGathered, schedules: Schedules
    ) -> None:
        super().__init__()
        self.output_stays = choice.stays == "output"
        self.schedule, self.keep = schedules[choice], keep
        self.bias = plain.bias
        axes = schedules.axes
        self.of_column = self.schedule  # for a table that is prepared
        if isinstance(self.schedule, summa.Gather):
            self.of_column = summa.Gather(replace(axes, row=Axis("row")), self.schedule.boundary)
        if plain.bias is not None:
            pad = (vocabulary_multiple(axes),)
            lies = ParamPlacement(("col",), copies="row", partial=True, pad=pad)
            place(self, "bias", lies, axes)

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """What this column of devices reads of the table: [V/c, h], or [V, h/c].

        Panel by panel it is never whole: then it travels again for each part of a loss.
        """
        if not isinstance(self.schedule, summa.Gather) or self.schedule.row.size == 1:
            return table_VH
        if self.output_stays:
            return summa.whole_column(table_VH.t(), dtype, self.schedule, self.keep).t()
        return summa.whole_column(table_VH, dtype, self.schedule, self.keep)

    def forward(self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False) -> Tensor:
        schedule, keep = self.schedule, self.keep
        if prepared:  # a part of a loss, whose gradient is taken at once
            schedule, keep = self.of_column, summa.KeepGathered(input=True)
        if self.output_stays:
            return summa.product_ab(x_BSH, table_VH.t(), schedule, self.bias, keep)
        return summa.product_abt(x_BSH, table_VH, schedule, self.bias, keep)


class RowParallelLabelHead(nn.Module):
    """Logits [b, n_labels] = x W + b, x [b, h/c]: terms over the columns are added up.

    W [h/c, n_labels]. The bias exists on column 0 alone, which adds it to its terms.
    """

    def __init__(self, plain: blocks.LabelHead, copies: str | None, axes: Axes) -> None:
        super().__init__()
        self.col = axes.col
        self.weight, self.bias = plain.weight, plain.bias
        partial = copies is not None
        place(
            self, "weight", ParamPlacement(cut=("col", None), copies=copies, partial=partial), axes
        )
        if self.col.index:
            self.bias = None
        else:
            place(self, "bias", ParamPlacement(cut=(None,), copies=copies, partial=partial), axes)

    def forward(self, x_BH: Tensor) -> Tensor:
        terms = x_BH @ self.weight.to(x_BH.dtype)
        if self.bias is not None:
            terms = terms + self.bias.to(terms.dtype)
        return autograd.allreduce_identity(terms, self.col)


class SequenceParallelChosenToken(nn.Module):
    """One token's vector of each sequence where s is cut over columns; every column gets it."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.col = axes.col

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        b, part, _ = x_BSH.shape
        local = at_B - self.col.index * part
        here = (local >= 0) & (local < part)
        mine = x_BSH[torch.arange(b, device=at_B.device), torch.where(here, local, 0)]
        terms = mine * here.unsqueeze(-1).to(mine.dtype)
        return autograd.allreduce_identity(terms, self.col)


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """While weights do not change: what is gathered of them may be kept, as the choices say.

    Where they lie cut over replicas they are gathered inside it, layer by layer.
    """
    keeps = [getattr(module, "keep", None) for module in model.modules()]
    weights = [
        keep.weight for keep in keeps if isinstance(keep, summa.KeepGathered) and keep.weight
    ]
    for weight in weights:
        weight.open()
    try:
        with gathered(model):
            yield
    finally:
        for weight in weights:
            weight.close()
