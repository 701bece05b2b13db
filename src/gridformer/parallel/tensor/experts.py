"""Mixtures of experts on several devices: how their tokens lie there, and who computes experts.

`layout.experts_over` names axes of the mesh whose devices have different experts. Tokens that lie
on them travel to their experts and back, by all-to-alls whose sizes depend on the data. The scheme
shards each expert's matrices over its other axes, as those of a feed-forward: the inner width over
the axis of its boundary (columns, branches), and h over the other axis of a grid (rows), along
which matrices are gathered where they multiply.

Between sections tokens lie as the scheme says. A mixture needs all of h of a token:

    along the boundary's axis    experts over axes           all experts on each device, sharded
    replicated                   each device takes a part    as they are
    tokens sharded (s, b)        as they are                 all-gather, reduce-scatter
    h sharded                    all-to-all                  all-gather, reduce-scatter
    on the first (cSub)          as they are                 broadcast, reduce

Where experts lie over some axes, and the boundary's axis shards each of them, rows are gathered
over it after they have traveled, so that each is sent only once. In cSub they are broadcast before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import autograd, irregular
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import MixtureOfExperts
from gridformer.models.blocks.experts import ComputeRows, Router, Tokens, Whole, sorted_rows
from gridformer.models.kernels.grouped import sizes_on_host
from gridformer.parallel.data.zero import own_part
from gridformer.parallel.scheme import BoundarySpec, expert_axes
from gridformer.parallel.sharding import ParamPlacement, shard_of, shard_parameter
from gridformer.parallel.tensor.summa import InRankOrder, Replicated, boundary_of

LABEL = "experts"
AXIS, COPIES = "experts", "experts_replicate"
Lies = Literal["whole", "parts", "tokens", "h", "first", "section"]


class TokensOfGrid(Tokens):
    """Tokens on one device of a grid; see the module's docstring.

    Args:
        axis: The axis of the boundary.
        lies: How tokens lie along it: `section` if they are gathered as other sections do; `whole`,
            `tokens`, `h` and `first` if experts lie over it.
        section: The boundary of a section.
        experts: The axis whose devices have different experts.
        n_experts: E, of which the last device may have fewer.
        parts: The axis whose devices have parts of the same experts, each for its own tokens; these
            are gathered where the experts are.
    """

    def __init__(
        self,
        axis: Axis,
        lies: Lies,
        section: Replicated,
        experts: Axis,
        n_experts: int,
        parts: Axis | None = None,
    ) -> None:
        self.axis, self.lies, self.section, self.experts = axis, lies, section, experts
        self.n_experts = -(-n_experts // experts.size) * experts.size
        self.parts = parts or Axis("parts")

    def enter(self, x_BSH: Tensor) -> Tensor:
        axis, section = self.axis, self.section
        match self.lies:
            case "section":
                x_BSH = autograd.pair(
                    x_BSH,
                    axis,
                    lambda x: section.gather(x).wait(),
                    lambda grad: section.reduce_scatter(grad).wait(),
                )
            case "whole" | "h":
                n_here, x = self._part(x_BSH), self._padded(x_BSH.flatten(0, -2))
                if self.lies == "h":
                    return autograd.alltoall(x, axis, 0, 1, LABEL)[:n_here]
                return autograd.pair(
                    x,
                    axis,
                    lambda x: x.chunk(axis.size)[axis.index].clone(),
                    lambda grad: comm.all_gather(grad, axis, 0, LABEL),
                )[:n_here]
            case "first":
                return self._only_first(x_BSH, (-1, x_BSH.shape[-1]), (0, x_BSH.shape[-1]))
        return x_BSH.flatten(0, -2)

    def leave(self, y_NH: Tensor, x_BSH: Tensor) -> Tensor:
        axis, section = self.axis, self.section
        match self.lies:
            case "section":
                y_BSH = y_NH.view(*section.full(x_BSH.shape)[:-1], -1)
                return autograd.pair(
                    y_BSH,
                    axis,
                    lambda y: section.reduce_scatter(y).wait(),
                    lambda grad: section.gather(grad).wait(),
                )
            case "whole" | "h":
                n = x_BSH.shape[:-1].numel()
                y = F.pad(y_NH, (0, 0, 0, -(-n // axis.size) - len(y_NH)))
                if self.lies == "h":
                    y = autograd.alltoall(y, axis, 1, 0, LABEL)
                else:
                    y = autograd.pair(
                        y,
                        axis,
                        lambda y: comm.all_gather(y, axis, 0, LABEL),
                        lambda grad: grad.chunk(axis.size)[axis.index].clone(),
                    )
                return y[:n].view(x_BSH.shape)
            case "first":
                return self._only_first(y_NH, x_BSH.shape, None)
        return y_NH.view(x_BSH.shape)

    def compute(self, rows_SH: Tensor, counts_E: Tensor, experts: ComputeRows) -> Tensor:
        """Sends rows to their experts: forward all-to-all of rows, backward of their gradients."""
        axis = self.experts
        if axis.size == 1:
            return super().compute(rows_SH, counts_E, experts)
        counts = F.pad(counts_E, (0, self.n_experts - len(counts_E))).view(axis.size, -1)
        one = [1] * axis.size
        coming = irregular.all_to_all_rows(counts, one, one, axis, LABEL)
        every_APE = comm.all_gather(coming.unsqueeze(0), self.parts, 0, LABEL)
        sizes = torch.stack((counts.sum(1), coming.sum(1)))
        n_rows = every_APE.sum((1, 2))
        here = self.recompute.read(
            lambda: sizes_on_host(sizes, n_rows, len(rows_SH), len(counts_E))
        )
        sends, receives = here[: axis.size], here[axis.size : 2 * axis.size]
        arrives = here[2 * axis.size :]  # at each device that has parts of these experts

        def moved(x: Tensor, there: list[int], back: list[int]) -> Tensor:
            return autograd.pair(
                x,
                axis,
                lambda x: irregular.all_to_all_rows(x, there, back, axis, LABEL),
                lambda grad: irregular.all_to_all_rows(grad, back, there, axis, LABEL),
            )

        arrived = moved(rows_SH, sends, receives)
        n, most = coming.shape[1], max(arrives)
        # Of each sender, rows arrive sorted by expert. Those that pad come last, for no expert.
        senders = torch.arange(n, device=coming.device).repeat(axis.size)
        numbers = [
            F.pad(senders.repeat_interleave(one.flatten(), output_size=k), (0, most - k), value=n)
            for one, k in zip(every_APE, arrives)
        ]
        mine, restore = sorted_rows(self._gathered(arrived, most), torch.cat(numbers))
        results = restore(experts(mine, every_APE.sum((0, 1)).cumsum(0).to(torch.int32)))
        return moved(self._summed(results)[: len(arrived)], receives, sends)

    def _gathered(self, rows_RH: Tensor, most: int) -> Tensor:
        """Forward all-gather of the rows of devices with parts, backward reduce-scatter."""
        rows = F.pad(rows_RH, (0, 0, 0, most - len(rows_RH)))
        return autograd.pair(
            rows,
            self.parts,
            lambda x: comm.all_gather(x, self.parts, 0, LABEL),
            lambda grad: comm.reduce_scatter(grad, self.parts, 0, LABEL),
        )

    def _summed(self, results: Tensor) -> Tensor:
        """Forward reduce-scatter of partial results, backward all-gather."""
        return autograd.pair(
            results,
            self.parts,
            lambda x: comm.reduce_scatter(x, self.parts, 0, LABEL),
            lambda grad: comm.all_gather(grad, self.parts, 0, LABEL),
        )

    def _part(self, x_BSH: Tensor) -> int:
        """Returns how many tokens this device has of those that are divided over the axis."""
        n, (size, index) = x_BSH.shape[:-1].numel(), (self.axis.size, self.axis.index)
        each = -(-n // size)
        return max(0, min(each, n - index * each))

    def _padded(self, x_NH: Tensor) -> Tensor:
        return F.pad(x_NH, (0, 0, 0, -len(x_NH) % self.axis.size))

    def _only_first(
        self, x: Tensor, shape: tuple[int, ...], elsewhere: tuple[int, ...] | None
    ) -> Tensor:
        """Views x on the first device. The others have `elsewhere` of it, or it on meta (None)."""
        device, before = self.section.device, x.shape  # type: ignore[attr-defined]

        def on_meta(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            return x.new_empty(shape, device="meta")

        def empty(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            return x.new_empty(shape, device=device)

        if self.axis.index == 0:
            return x.view(shape)
        if elsewhere is None:
            return autograd.pair(
                x, self.axis, lambda x: on_meta(x, shape), lambda grad: empty(grad, before)
            )
        return autograd.pair(
            x, self.axis, lambda x: empty(x, elsewhere), lambda grad: on_meta(grad, before)
        )


class GatheredAlong(Whole):
    """Matrices that an axis shards along `dim`: gathered, and their gradients reduce-scattered."""

    def __init__(self, axis: Axis, dim: int) -> None:
        self.axis, self.dim = axis, dim

    def gather(self, weight: Tensor) -> Tensor:
        return comm.all_gather(weight, self.axis, self.dim, LABEL)

    def scatter(self, grad: Tensor) -> Tensor:
        return comm.reduce_scatter(grad, self.axis, self.dim, LABEL)


def mixture_role(
    axes: Axes,
    layout: LayoutConfig,
    boundary: BoundarySpec,
    router: ParamPlacement,
    common: bool = False,
) -> Callable[[MixtureOfExperts], None]:
    """Returns what a scheme makes of a mixture of experts.

    Args:
        boundary: How activations lie between sections.
        router: The placement of vectors that every device needs in full there, whose gradients are
            partial sums.
        common: Whether each device computes whole experts for its own tokens.
    """
    over = expert_axes(layout)
    name, layout_of_x = boundary.axis, boundary.activation_layout
    other = "row" if name == "col" else ""
    if boundary.h_over:
        name, other, layout_of_x = boundary.h_over, boundary.axis, "h"
    axis = axes[name]
    folded = name in over or axis.size == 1 or common
    numbers = AXIS if AXIS in axes.further else None
    experts_axis = axes[AXIS] if numbers else Axis(AXIS)
    # Tokens travel to other experts before devices with parts of these gather them.
    apart = folded or (experts_axis.size > 1 and layout_of_x != "first")
    lies: Lies = "section"
    if apart:
        kinds: dict[str, Lies] = {"replicated": "whole", "h": "h", "first": "first"}
        lies = kinds.get(layout_of_x, "tokens") if axis.size > 1 else "tokens"
    spec = BoundarySpec(name, layout_of_x)
    section = InRankOrder(axis) if layout_of_x == "s" else boundary_of(spec, axes)
    replicas = COPIES if "dp" in over and numbers else (router.replicas if common else "dp")
    inner, parts = (None, None) if folded else (name, axis if apart else None)
    gathered = other if other and other not in over and axes[other].size > 1 else None

    def mixture(plain: MixtureOfExperts) -> None:
        experts, config = plain.experts, plain.router.config
        plain.tokens = TokensOfGrid(axis, lies, section, experts_axis, config.n_experts, parts)
        plain.router.balance.first = apart or axis.index == 0
        shard_parameter(plain.router, "weight", router, axes)
        if plain.router.bias is not None:
            vector = ParamPlacement((None,), router.copies, router.partial, router.replicas)
            shard_parameter(plain.router, "bias", vector, axes)
        for matrix, cut, dim in (
            (experts.gate, (numbers, gathered, inner), 1),
            (experts.up, (numbers, gathered, inner), 1),
            (experts.down, (numbers, inner, gathered), 2),
        ):
            shard_parameter(matrix, "weight", ParamPlacement(cut, replicas=replicas), axes)
            if gathered:
                matrix.whole = GatheredAlong(axes[gathered], dim)

    return mixture


@torch.no_grad()
def move_biases(model: nn.Module, total: Tensor, overflow: Tensor) -> None:
    """Moves the biases of routers toward even shares, given the tokens of each expert [L, E].

    It does nothing if `overflow` is 1. It moves what this rank updates; copies get it later.
    """
    for router in (module for module in model.modules() if isinstance(module, Router)):
        if router.bias is None or not shard_of(router.bias).owned:
            continue
        counts = total[router.layer - router.config.dense_layers].to(torch.float64)
        rate = router.config.balance_rate * (1.0 - overflow)
        step = (counts.mean() - counts).sign() * rate
        part = own_part(router.bias)
        (offset,) = shard_of(part).offset
        part.add_(step[offset : offset + len(part)].to(part.dtype))
