"""Linear layers, embeddings and heads of all schemes on a device grid; Megatron's grid has one row.

Each module here replaces the plain module it is named after, with the same parameter names and
local blocks of the parameters. Where the blocks lie depends on which operand of the product stays
in place (gridformer.parallel.auto.cost):

    output stays    W [in, out]: in over rows, out over columns    C = A B, B = W
    input stays     W [in, out]: in over columns, out over rows    C = A Bᵀ, B = Wᵀ
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.blocks.cast import transposed
from gridformer.models.blocks.linear import linear
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.data.fsdp import gathered, materialized
from gridformer.parallel.sharding import ParamPlacement, shard_parameter, vocabulary_multiple
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.boundary import Boundary

OUTPUT_STAYS = ParamPlacement(cut=("row", "col"))
INPUT_STAYS = ParamPlacement(cut=("col", "row"), transposed=True)  # B is read row by row


class Schedules:
    """The schedules of a model: one object for each kind, so that products share its workspace."""

    def __init__(self, axes: Axes, boundary: Boundary) -> None:
        self.axes, self.boundary = axes, boundary
        self._made: dict[tuple[str, int], summa.Schedule] = {}
        self._last: summa.WeightPrefetcher | None = None

    def chain(self, weight: summa.WeightPrefetcher) -> None:
        """Links the prefetcher of a product to that of the previous product.

        Modules are built in forward order, so a product can prefetch its neighbors' weights.
        """
        if self.axes.row.size == 1:
            return  # no weight is gathered
        if self._last is not None:
            self._last.after, weight.before = weight, self._last
        self._last = weight

    def __getitem__(self, choice: Choice) -> summa.Schedule:
        """Returns the schedule that `choice` names, created on first use."""
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
    """Returns what `choice` keeps of a product's gathered operands."""
    gathers = choice.schedule == "gather"
    return summa.KeepGathered(
        choice.keep_input, summa.WeightPrefetcher(choice.keep_weight) if gathers else None
    )


class GridLinear(nn.Module):
    """y = x W + b, with x [.., in/c], y [.., out/c] and b [out/c].

    W is [in/r, out/c] if the output stays (Optimus, Algorithm 1), and [in/c, out/r] if the input
    stays (Algorithm 2 with B = Wᵀ).

    Args:
        plain: The module to replace; its parameters are sharded.
        choice: Which operand stays, and by which schedule the others travel.
        bias: Placement of the bias.
        schedules: The schedules of the model.
    """

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(
        self, plain: blocks.Linear, choice: Choice, bias: ParamPlacement, schedules: Schedules
    ) -> None:
        super().__init__()
        self.output_stays = choice.stays == "output"
        self.schedule, self.keep = schedules[choice], keep_gathered_of(choice)
        self.weight, self.bias = plain.weight, plain.bias
        shard_parameter(
            self, "weight", OUTPUT_STAYS if self.output_stays else INPUT_STAYS, schedules.axes
        )
        if plain.bias is not None:
            shard_parameter(self, "bias", bias, schedules.axes)
        if self.keep.weight is not None:
            self.keep.weight.source = self._source
            role = plain.role
            self.keep.weight.ends_block = role.section == "feed_forward" and not role.opens
            schedules.chain(self.keep.weight)

    def _source(self) -> tuple[Tensor, summa.Schedule]:
        weight = materialized(self.weight)  # its layer may not have been reached yet
        return weight if self.output_stays else transposed(weight), self.schedule

    def forward(self, x: Tensor) -> Tensor:
        if self.output_stays:
            return summa.product_ab(x, self.weight, self.schedule, self.bias, self.keep)
        weight = transposed(self.weight)
        return summa.product_abt(x, weight, self.schedule, self.bias, self.keep)


class GridTokenEmbedding(nn.Module):
    """Embeds tokens [b/r, s], equal along a row of devices, with a table [v, h]: [b/r, s, h/c].

    The tied head reads the same table, so the head's choice decides where it lies:

    - The head's output stays: v over columns, h over rows. Each column of devices looks up the
      tokens of its range, and the partial sums are reduced.
    - The head's input stays (as in the paper): v over rows, h over columns.

    Args:
        plain: The module to replace; its table is sharded.
        head: Choice of the tied head.
        keep: What is kept of the gathered table; shared with the head.
        schedules: The schedules of the model.
    """

    cast_parameters = ("weight",)  # for the head
    cast_multiple = 1

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
        self.cast_multiple = _cast_multiple(plain, self.head_output_stays, self.schedule)
        self.weight = plain.weight
        shard_parameter(self, "weight", table_placement(self.head_output_stays, axes), axes)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        table = self.weight.t() if self.head_output_stays else self.weight
        return summa.lookup(
            tokens_BS, table, self.schedule, self.axes, not self.head_output_stays, self.keep
        )


def table_placement(output_stays: bool, axes: Axes) -> ParamPlacement:
    """Returns where a table [v, h] lies that a head reads.

    Args:
        output_stays: Whether the output of the head stays.
        axes: Axes of the grid.
    """
    cut = ("col", "row") if output_stays else ("row", "col")
    # Only v is padded to this multiple. h is sharded over the other axis alone, so on a grid of one
    # row it may be whole and need not be divisible by the columns.
    return ParamPlacement(cut=cut, pad=(vocabulary_multiple(axes), 0))


def _cast_multiple(
    plain: blocks.TokenEmbedding | blocks.TiedHead, output_stays: bool, schedule: summa.Schedule
) -> int:
    """Returns the multiple of rows that the cast copy of a head's table has."""
    whole = output_stays and isinstance(schedule, summa.Gather)
    return plain.cast_multiple if whole else 1


class GridTiedHead(nn.Module):
    """Logits [b/r, s, v/c] = x Tᵀ for x [b/r, s, h/c] and the table T of the token embedding.

    A bias [v] is sharded over columns, as the logits are, and each row of devices holds a copy. An
    untied head has a table of its own, which lies as that of the embedding does.

    Args:
        plain: The module to replace; its bias and its table, if any, are sharded.
        choice: Which operand stays, and by which schedule the others travel.
        keep: What is kept of the gathered table; shared with the embedding.
        schedules: The schedules of the model.
    """

    cast_parameters: tuple[str, ...] = ("bias",)
    cast_multiple = 1

    def __init__(
        self, plain: blocks.TiedHead, choice: Choice, keep: summa.KeepGathered, schedules: Schedules
    ) -> None:
        super().__init__()
        self.output_stays = choice.stays == "output"
        self.schedule, self.keep = schedules[choice], keep
        self.bias = plain.bias
        axes = schedules.axes
        self.of_column = self.schedule  # multiplies a table from `prepare`
        if isinstance(self.schedule, summa.Gather):
            self.of_column = summa.Gather(replace(axes, row=Axis("row")), self.schedule.boundary)
        if plain.bias is not None:
            pad = (vocabulary_multiple(axes),)
            lies = ParamPlacement(("col",), copies="row", partial=True, pad=pad)
            shard_parameter(self, "bias", lies, axes)
        if isinstance(plain, blocks.UntiedHead):
            self.keep, self.cast_parameters = keep_gathered_of(choice), ("bias", "weight")
            self.cast_multiple = _cast_multiple(plain, self.output_stays, self.schedule)
            self.weight = plain.weight
            shard_parameter(self, "weight", table_placement(self.output_stays, axes), axes)

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """Gathers the part of the table that this column of devices reads, for several products.

        Forward all-gather down the column, backward reduce-scatter. Schedules that work panel by
        panel never gather the table: they return it as it is and send it again in each product.

        Args:
            table_VH: Local block of the table.
            dtype: Dtype of the products.

        Returns:
            [V/c, h] if the output stays and [V, h/c] otherwise, V being the padded vocabulary.
        """
        if not isinstance(self.schedule, summa.Gather) or self.schedule.row.size == 1:
            return table_VH
        if self.output_stays:
            return summa.whole_column(
                table_VH.t(), dtype, self.schedule, self.keep, padded=True
            ).t()
        return summa.whole_column(table_VH, dtype, self.schedule, self.keep)

    def forward(
        self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False, padded: bool = False
    ) -> Tensor:
        """Returns logits [b/r, s, v/c].

        Args:
            x_BSH: Hidden states: [b/r, s, h/c] under Optimus, else as the boundary says.
            table_VH: The embedding's local block of the table, or what `prepare` made of it.
            prepared: Whether the table comes from `prepare`.
            padded: Whether the logits may have additional columns, which a loss leaves out.
        """
        schedule, keep = self.schedule, self.keep
        if prepared:  # a chunk of a loss: its backward pass follows at once, so keep the input
            schedule, keep = self.of_column, summa.KeepGathered(input=True)
        if self.output_stays:
            return summa.product_ab(x_BSH, table_VH.t(), schedule, self.bias, keep, padded)
        return summa.product_abt(x_BSH, table_VH, schedule, self.bias, keep)


class RowParallelLabelHead(nn.Module):
    """Logits [b, n_labels] = x W + b for x [b, h/c] and W [h/c, n_labels].

    Forward all-reduce of partial sums over columns, backward identity. Only column 0 has the bias
    and adds it to its partial sum.

    Args:
        plain: The module to replace; its weight is sharded.
        copies: The axis along which every rank holds a copy of the parameters, or None.
        axes: Axes of the grid.
    """

    cast_parameters = ("weight",)

    def __init__(self, plain: blocks.LabelHead, copies: str | None, axes: Axes) -> None:
        super().__init__()
        self.col = axes.col
        self.weight, self.bias = plain.weight, plain.bias
        partial = copies is not None
        shard_parameter(
            self, "weight", ParamPlacement(cut=("col", None), copies=copies, partial=partial), axes
        )
        if self.col.index:
            self.bias = None
        if self.bias is not None:
            shard_parameter(
                self, "bias", ParamPlacement(cut=(None,), copies=copies, partial=partial), axes
            )

    def forward(self, x_BH: Tensor) -> Tensor:
        terms = linear(x_BH, self.weight, None)
        if self.bias is not None:
            terms = terms + self.bias.to(terms.dtype)
        return autograd.allreduce_identity(terms, self.col)


class SequenceParallelChosenToken(nn.Module):
    """Selects one token of each sequence where s is sharded over columns.

    x [b, s/c, h] and global positions [b] give [b, h] on every column: forward all-reduce, backward
    identity.
    """

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


class SequenceParallelJoin(nn.Module):
    """Returns logits [b, s, n] on every column, given each column's [b, s/c, n]; n is small.

    Forward all-reduce of logits that are zero at the other columns' tokens, backward identity.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.col = axes.col

    def forward(self, logits_BSN: Tensor) -> Tensor:
        part, before = logits_BSN.shape[1], self.col.index
        after = self.col.size - before - 1
        terms = F.pad(logits_BSN, (0, 0, before * part, after * part))
        return autograd.allreduce_identity(terms, self.col)


class KeptWeights:
    """The parts of a model that `weights_kept` opens and closes, found once for many steps.

    The model is complete: no product and no copy of a weight is added to it later.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Not getattr, which is slow for what a module does not have.
        keeps = [vars(module).get("keep") for module in model.modules()]
        self.weights = [
            keep.weight for keep in keeps if isinstance(keep, summa.KeepGathered) and keep.weight
        ]
        self.copied = [p for p in model.parameters() if blocks.copy_of(p) is not None]
        self.places = [at for p in model.parameters() if (at := blocks.gradient_slot(p))]
        self.in_pipeline = len(vars(model).get("stages", ())) > 1

    @contextmanager
    def open(self) -> Iterator[None]:
        """See `weights_kept`."""
        for weight in self.weights:
            weight.open()
        for each in self.places:
            each.continued = True
        try:
            with blocks.keep_copies(self.copied), gathered(self.model):
                if self.in_pipeline:  # while a rank waits for its first micro-batch
                    blocks.make_copies(self.copied)
                yield
        finally:
            for weight in self.weights:
                weight.close()
            for each in self.places:
                each.continued = False


def weights_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Lets products keep and prefetch gathered weights, as their choices say, inside this context.

    It also keeps the copies of weights in the type of the computation, and lets products add to the
    gradients of earlier micro-batches (gridformer.models.blocks.gradient_sum). Weights must not
    change inside it, except that a weight may be updated when the last product of a step has read
    it. With FSDP, it also enables gathering the parameters of each layer from the replicas.
    """
    return KeptWeights(model).open()
