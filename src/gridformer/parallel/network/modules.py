"""What replaces the modules of any network. Parameters keep their names and the order of their
dimensions: a weight [out, in] of torch's Linear stays one.

Between sections an activation is as the boundary of the scheme says: whole on every device of a
row, or sharded over it by tokens or by h. Code of the network sees it so, and in between, from an
opening product to a closing one, it sees whole tokens and its own heads or columns.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks.cast import cast, transposed
from gridformer.models.blocks.linear import linear, side_by_side
from gridformer.models.blocks.norm import rms_norm
from gridformer.parallel.data.fsdp import materialized
from gridformer.parallel.network.plan import PlanRole, is_conv1d
from gridformer.parallel.sharding import ParamPlacement
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.experts import AXIS, COPIES, Lies, TokensOfGrid
from gridformer.parallel.tensor.norm import grid_norm, line_of
from gridformer.parallel.tensor.summa import Replicated, Sharded
from gridformer.utils.tensors import TensorAttribute, map_tensors

# Places a parameter of a module, by its name there. The last argument is a dimension and the order
# in which its indices are dealt out, if it is another one.
Place = Callable[[nn.Module, str, ParamPlacement, tuple[int, Tensor] | None], None]

# --------------------------------------------------------------------------- ends of sections


def enter(x: Tensor, boundary: Replicated) -> Tensor:
    """Enters a section: forward gather, backward reduce-scatter of the sum of gradients."""
    return autograd.pair(x, boundary.col, partial(_whole, boundary), partial(_sum, boundary))


def leave(x: Tensor, boundary: Replicated) -> Tensor:
    """Leaves a section with partial sums: forward reduce-scatter, backward gather."""
    return autograd.pair(x, boundary.col, partial(_sum, boundary), partial(_whole, boundary))


def cut(x: Tensor, boundary: Sharded) -> Tensor:
    """Takes this device's part of what every device has: forward slice, backward gather."""
    size = x.shape[boundary.dim]
    if size % boundary.col.size:
        raise ValueError(
            f"{boundary.col.size} columns of devices share dimension {boundary.dim} of an "
            f"activation {tuple(x.shape)} between sections, and {size} does not divide by "
            f"{boundary.col.size}: use another length, or a layout that does not shard it"
        )
    return autograd.pair(x, boundary.col, partial(_part, boundary), partial(_whole, boundary))


def join(x: Tensor, boundary: Sharded) -> Tensor:
    """Gives every device the whole, with which all compute the same: forward gather, backward
    slice."""
    return autograd.pair(x, boundary.col, partial(_whole, boundary), partial(_part, boundary))


def _whole(boundary: Replicated, x: Tensor) -> Tensor:
    return boundary.gather(x.contiguous()).wait()


def _sum(boundary: Replicated, x: Tensor) -> Tensor:
    return boundary.reduce_scatter(x.clone()).wait()


def _part(boundary: Sharded, x: Tensor) -> Tensor:
    return x.chunk(boundary.col.size, boundary.dim)[boundary.col.index].contiguous()


# --------------------------------------------------------------------------- products


class _Product(nn.Module):
    """The parameters of a linear layer, sharded: a weight [out, in], or [in, out] of a Conv1D."""

    cast_parameters = ("weight", "bias")

    def __init__(
        self, plain: nn.Module, cut_: tuple[str, str], bias: ParamPlacement, place: Place,
        order: Tensor | None = None, pad: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.turned = is_conv1d(plain)
        weight: Any = plain.weight
        self.n_out, self.n_in = weight.shape[::-1] if self.turned else weight.shape
        self.weight: nn.Parameter = weight
        self.bias: nn.Parameter | None = plain.bias  # type: ignore[assignment]
        axes = cut_[::-1] if self.turned else cut_
        padding = (0, pad) if self.turned else (pad, 0)
        ordered = None if order is None else (int(self.turned), order)
        place(self, "weight", ParamPlacement(axes, pad=padding), ordered)
        if self.bias is not None:
            ordered = None if order is None else (0, order)
            place(self, "bias", replace(bias, pad=(pad,) if pad else ()), ordered)

    def weight_IO(self) -> Tensor:
        return self.weight if self.turned else transposed(self.weight)

    def extra_repr(self) -> str:
        return f"{self.n_in} -> {self.n_out}, here {list(self.weight.shape)}"


class Opening(_Product):
    """y [.., out/c] = x Wᵀ + b of whole tokens; the weight [out/c, in/r] is gathered down a column.

    With the role `head`, y is gathered: [.., out].
    """

    def __init__(
        self, plain: nn.Module, role: PlanRole, section: Openings, place: Place, axes: Axes
    ) -> None:
        bias = ParamPlacement(("col",), copies="row", partial=True)
        weight: Any = plain.weight
        n_out = weight.shape[1 if is_conv1d(plain) else 0]
        order, pad = None, axes.col.size if role.kind == "head" else 0
        self.widths = role.widths(n_out) if role.parts else ()
        self.n_blocks = math.gcd(*self.widths)
        if self.widths:
            order = order_of_parts(self.widths, self.n_blocks)
        super().__init__(plain, ("col", "row"), bias, place, order, pad)
        self.n_blocks //= axes.col.size
        self.gathered = Sharded(axes.col, -1) if role.kind == "head" else None
        self.section = section
        section.add(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.section(self, x)
        if self.widths:
            block = [width // math.gcd(*self.widths) for width in self.widths]
            parts = y.unflatten(-1, (self.n_blocks, sum(block))).split(block, -1)
            return torch.cat([part.flatten(-2) for part in parts], -1)
        return y if self.gathered is None else join(y, self.gathered)[..., : self.n_out]


class Openings:
    """The opening products of a module that read the same tensor, such as q, k and v.

    The first of them that is called enters the section for all. Where rows of devices shard their
    weights, it computes all of them, as one product.

    A tensor that is whole although activations are sharded over h, such as the output of an
    encoder, is entered as a replicated one.

    Args:
        boundary: How the section is entered; None if the module around it is entered.
    """

    def __init__(self, boundary: Replicated | None, axes: Axes) -> None:
        self.members: list[Opening] = []
        self.boundary, self.axes, self.joins = boundary, axes, axes.row.size > 1
        self._last: tuple[Tensor, object] | None = None
        self._results: dict[Opening, Tensor] = {}

    def add(self, member: Opening) -> None:
        if not self.members and self.joins:  # what is gathered ahead is the first one's
            self._ahead = summa.GatheredWeight(self.axes.row, keeps=False)
            self._ahead.block = self._block
            vars(member)["gathered_weight"] = self._ahead
        self.members.append(member)

    def __call__(self, member: Opening, x: Tensor) -> Tensor:
        if not self.joins and (self.boundary is None or self.axes.col.size == 1):
            return linear(x, member.weight_IO(), member.bias)
        state = torch.is_grad_enabled(), autograd.version_of(x)
        same = self._last is not None and self._last[0] is x and self._last[1] == state
        if not same or member not in self._results:
            self._results, self._last = self._compute(x, member.n_in), (x, state)
        result = self._results.pop(member)
        if not self._results:
            self._last = None  # frees what nobody reads any more
        return result if self.joins else linear(result, member.weight_IO(), member.bias)

    def _compute(self, x: Tensor, n_in: int) -> dict[Opening, Tensor]:
        """Returns what products read or, if rows shard their weights, their results."""
        members, axes = self.members, self.axes
        if self.boundary is None:
            axes = replace(axes, col=Axis("col"))
        boundary = Replicated(axes.col)
        if isinstance(self.boundary, Sharded) and x.shape[-1] < n_in:
            boundary = self.boundary
        if not self.joins:
            return dict.fromkeys(members, enter(x, boundary))
        biases = [member.bias for member in members if member.bias is not None]
        bias = side_by_side(biases, x.dtype) if len(biases) > 1 else (*biases, None)[0]
        schedule, weight = summa.Gathered(axes, boundary), self._weight(x.dtype)
        y = summa.product_ab(x, weight, schedule, bias, self._ahead, keep_input=True)
        return dict(zip(members, y.split([one.weight_IO().shape[1] for one in members], -1)))

    def _block(self) -> Tensor:
        weights = [materialized(member.weight) for member in self.members]
        return self._weight(weights[0].dtype)

    def _weight(self, dtype: torch.dtype) -> Tensor:
        weights = [member.weight_IO() for member in self.members]
        return side_by_side(weights, dtype) if len(weights) > 1 else weights[0]


class Closing(_Product):
    """y = x Wᵀ + b of x [.., in/c], left through the boundary; the weight is [out/r, in/c]."""

    def __init__(
        self,
        plain: nn.Module,
        role: PlanRole,
        boundary: Replicated,
        bias: ParamPlacement,
        place: Place,
        axes: Axes,
    ) -> None:
        super().__init__(plain, ("row", "col"), bias, place)
        self.boundary, self.split = boundary, Sharded(axes.col, -1) if role.split else None
        self.schedule = summa.Gathered(axes, boundary) if axes.row.size > 1 else None
        self.gathered_weight = None
        if self.schedule is not None:
            self.gathered_weight = summa.GatheredWeight(axes.row, keeps=False)
            self.gathered_weight.block = lambda: self._weight_OI(materialized(self.weight))

    def _weight_OI(self, weight: Tensor) -> Tensor:
        return transposed(weight) if self.turned else weight

    def forward(self, x: Tensor) -> Tensor:
        if self.split is not None:
            x = cut(x, self.split)
        if self.schedule is not None:
            weight_OI = self._weight_OI(self.weight)
            return summa.product_abt(x, weight_OI, self.schedule, self.bias, self.gathered_weight)
        y = leave(linear(x, self.weight_IO(), None), self.boundary)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks belong to a module, which then cannot be replaced."""
    ends = ("forward_hooks", "forward_pre_hooks")
    return any(hooks for key, hooks in vars(module).items() if key.endswith(ends))


class WholeLinear(nn.Module):
    """y = x Wᵀ + b, the same on every device."""

    cast_parameters = ("weight", "bias")

    def __init__(self, plain: nn.Linear, placement: ParamPlacement, place: Place) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        for name, _ in [*self.named_parameters()]:
            place(self, name, placement, None)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, transposed(self.weight), self.bias)


def order_of_parts(widths: tuple[int, ...], n: int) -> Tensor:
    """Returns the columns of parts that lie side by side in an order of n blocks.

    Block i, int64 [sum of widths / n], has its columns of every part. So contiguous blocks are what
    any number of devices that divides n gets, and the order does not depend on that number.
    """
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = [torch.arange(start, start + width).view(n, -1) for start, width in zip(starts, widths)]
    return torch.cat(parts, 1).flatten()


class Table(nn.Embedding):
    """Looks up tokens in a table [v/c, h/r]: [b, s, h] on every device of a row.

    Forward all-reduce of what each column of devices has, backward identity.
    """

    axes: Axes
    schedule: summa.Gathered

    def forward(self, tokens: Tensor) -> Tensor:
        x = summa.lookup(tokens, self.weight.t(), self.schedule, self.axes, False)
        if self.padding_idx is None:
            return x
        return torch.where((tokens == self.padding_idx).unsqueeze(-1), x.detach(), x)


@cache
def _table_of(kind: Any) -> Any:
    """Returns a class of embeddings whose own code gets what `Table` finds."""
    bases = (Table,) if kind is nn.Embedding else (kind, Table)
    return type(kind.__name__, bases, {"__module__": kind.__module__})


def shard_table(plain: nn.Embedding, place: Place, axes: Axes) -> nn.Embedding:
    """Shards the table of an embedding, in place."""
    table: Any = plain
    kind: Any = type(plain)
    table.__class__ = _table_of(kind)
    table.axes, table.schedule = axes, summa.Gathered(axes, Replicated(axes.col))
    place(table, "weight", ParamPlacement(("col", "row"), pad=(axes.col.size, 0)), None)
    return plain


class ReadCast(nn.Module):
    """Comes before the class of a module whose code reads parameters of its own, cast to the type
    of its input.

    Attributes:
        cast_parameters: Their names.
    """

    cast_parameters: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (*args, *kwargs.values())
        given = (x.dtype for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
        here, dtype = vars(self), next(given, None)
        for name in self.cast_parameters:
            parameter: Any = self._parameters[name]
            here[name] = self.read(name, parameter if dtype is None else _cast(parameter, dtype))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            for name in self.cast_parameters:
                here.pop(name, None)  # unless recomputation has called the module within this call

    def read(self, name: str, value: Tensor) -> Tensor:
        return value


class ShardedExperts(ReadCast):
    """Comes before the class of experts, whose matrices [experts, out, in], or transposed, are
    sharded.

    Every column of devices has a part of each expert, and computes a part of the sum; or columns
    have different experts, and each takes a part of the tokens, which all of them have. A matrix
    that rows of devices shard is gathered for each pass.

    Attributes:
        tokens: Brings tokens to the devices that have their experts.
        matrices: The roles of the matrices, and of biases [experts, out].
        alternating: Of how many parts the rows of a matrix alternate, if there are several.
        grouped: Whether the code that runs knows of `alternating`.
    """

    matrices: dict[str, PlanRole]
    alternating: dict[str, int]
    grouped: bool
    axes: Axes
    tokens: TokensOfGrid
    shared_by: tuple[str | None, str | None]  # rows and columns, unless they have different experts

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        whole, divided = Replicated(self.axes.col), self.tokens.lies == "whole"

        def entered(x: Any) -> Any:
            if divided and isinstance(x, Tensor):
                return self.tokens.enter(x)
            return enter(x, whole) if isinstance(x, Tensor) and x.is_floating_point() else x

        kwargs = {name: entered(x) for name, x in kwargs.items()}
        y = super().__call__(*map(entered, args), **kwargs)
        return self.tokens.leave(y, given[_first(given)]) if divided else leave(y, whole)

    def read(self, name: str, value: Tensor) -> Tensor:
        role, (rows, cols) = self.matrices[name], self.shared_by
        outside, inside = (2, 1) if (role.kind == "opening") != role.turned else (1, 2)
        if value.dim() == 2:  # what closes is a partial sum, to which one column adds the bias
            adds, inside = role.kind == "opening" or not cols or self.axes.col.index == 0, 1
            value = value if adds else value * 0.0
        elif rows is not None:
            value = enter(value, Sharded(self.axes.row, outside))
        if name in self.alternating and not self.grouped:
            parts = value.unflatten(inside, (-1, self.alternating[name]))
            value = parts.transpose(inside, inside + 1).flatten(inside, inside + 1)
        return value


def shard_experts(
    experts: nn.Module, matrices: dict[str, PlanRole], place: Place, axes: Axes, over: set[str]
) -> None:
    """Shards the matrices of experts, which have roles, and lets their code read its parts.

    Devices along the mesh axes `over` have different experts.
    """
    number = axes.further.get(AXIS, Axis(AXIS))
    first, replicas = AXIS if number.size > 1 else None, COPIES if "dp" in over else "dp"
    cols, rows = (None if axes[key].name in over else key for key in ("col", "row"))
    lies: Lies = "section" if cols or axes.col.size == 1 else "whole"
    n_experts = len(experts.get_parameter(next(iter(matrices))))
    tokens = TokensOfGrid(axes.col, lies, Replicated(axes.col), number, n_experts)
    alternating = {}
    for name, role in matrices.items():
        shape, opens = experts.get_parameter(name).shape, role.kind == "opening"
        widths, order = role.widths(shape[2 if role.turned else 1]), None
        if len(widths) > 1 and getattr(experts, "is_concatenated", True):  # else they alternate
            alternating[name] = len(widths)
            order = 2 if role.turned else 1, order_of_parts(widths, widths[0])
        cut_: tuple[str | None, ...]
        cut_ = (first, rows, cols) if opens == role.turned else (first, cols, rows)
        held = list[str]()  # the axes along which devices have the same
        if len(shape) == 2:
            cut_ = first, cols if opens else None
            along = rows, None if opens else cols
            held = [axes[key].name for key in along if key and axes[key].size > 1]
        copies = "grid" if len(held) > 1 else next(iter(held), None)
        place(experts, name, ParamPlacement(cut_, copies, copies is not None, replicas), order)
    config = getattr(experts, "config", None)
    grouped = getattr(config, "_experts_implementation", None) == "gridformer"
    read_cast(experts, (*matrices,), ShardedExperts)
    vars(experts).update(matrices=matrices, alternating=alternating, grouped=grouped, axes=axes)
    vars(experts).update(tokens=tokens, shared_by=(rows, cols))


def read_cast(module: nn.Module, names: tuple[str, ...], how: Any = ReadCast) -> None:
    """Lets a plain module's code read its parameters of these names as `how` says."""
    kind: Any = type(module)
    if kind.__module__ == __name__:
        return  # it is one of those above
    if not isinstance(module, ReadCast):
        module.__class__ = _read_by(kind, how)
    known = vars(module).get("cast_parameters", ())
    vars(module)["cast_parameters"] = (*dict.fromkeys((*known, *names)),)


@cache
def _read_by(kind: Any, how: Any) -> Any:
    return type(kind.__name__, (how, kind), {"__module__": kind.__module__})


def _cast(parameter: Any, dtype: torch.dtype) -> Tensor:
    value: Tensor = parameter if parameter.dtype == dtype else _Cast.apply(parameter, dtype)
    return value


class _Cast(torch.autograd.Function):
    """A parameter in the type of the computation."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = parameter.dtype
        value = cast(parameter, dtype)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


# --------------------------------------------------------------------------- norms


class Norm(nn.Module):
    """A norm over h, which columns may shard; its weight is `plus` more than the parameter.

    It is a LayerNorm if it is `centered`, else an RMSNorm. It returns the type of x, whatever that
    of the weight is. Without a weight, `width` is h.
    """

    def __init__(
        self,
        plain: nn.Module,
        known: tuple[float, float, bool],
        axis: Axis,
        placement: ParamPlacement,
        place: Place,
        width: int = 0,
    ) -> None:
        super().__init__()
        (self.eps, self.plus, self.centered), self.axis, self.width = known, axis, width
        self.weight: nn.Parameter | None = getattr(plain, "weight", None)
        self.bias: nn.Parameter | None = getattr(plain, "bias", None)
        for name, _ in [*self.named_parameters()]:
            place(self, name, placement, None)
        if axis.size == 1:  # code around it may read them
            said = vars(plain).items()
            vars(self).update({key: value for key, value in said if isinstance(value, float)})

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            if self.axis.size > 1 and x.shape[-1] * self.axis.size != self.width:
                raise ValueError(
                    f"a norm of {self.width} gets {[*x.shape]} on {self.axis.size} columns"
                )
            weight = x.new_ones(x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
        else:
            weight = self.weight + self.plus if self.plus else self.weight
        if self.axis.size > 1:
            centered = self.centered and self.bias is None
            bias = torch.zeros_like(weight) if centered else self.bias
            return grid_norm(x, weight, bias, self.eps, line_of(self.axis))
        if not self.centered:
            return rms_norm(x, weight, self.eps)
        wide = x.to(weight.dtype)
        return F.layer_norm(wide, wide.shape[-1:], weight, self.bias, self.eps).to(x.dtype)


def known_norm(norm: nn.Module) -> tuple[float, float, bool] | None:
    """Returns epsilon of a norm, what it adds to its weight, and whether it subtracts the mean.

    They are found by running a copy of the module with other weights, once for each class of them,
    as a record of a step has no values. None if it is no LayerNorm and no RMSNorm over the last
    dimension.
    """
    weight: Any = getattr(norm, "weight", None)
    has_bias = getattr(norm, "bias", None) is not None
    shape = getattr(norm, "normalized_shape", (8,)) if weight is None else weight.shape
    gated = len(inspect.signature(norm.forward).parameters) > 1
    vectors = {name for name in ("weight", "bias") if getattr(norm, name, None) is not None}
    if {name for name, _ in norm.named_parameters()} != vectors or len(shape) != 1 or gated:
        return None
    names = ("eps", "variance_epsilon", "epsilon")
    said = tuple(e for name in names if isinstance(e := getattr(norm, name, None), float))
    dtype = torch.get_default_dtype() if weight is None else weight.dtype
    key = type(norm), said, has_bias, dtype, weight is None
    if key not in _known:
        _known[key] = _probed(norm, shape, said, dtype)
    return _known[key]


_known: dict[Any, tuple[float, float, bool] | None] = {}


def _probed(
    norm: nn.Module, shape: tuple[int, ...], said: tuple[float, ...], dtype: torch.dtype
) -> tuple[float, float, bool] | None:
    probe: Any = copy.deepcopy(norm).to_empty(device="cpu")
    dtype = torch.promote_types(dtype, torch.float32)
    probe = probe.to(dtype)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, *shape, generator=draw, dtype=dtype)
    x = torch.cat((2 * x[:4] + 1, 1e-3 * x[4:]))  # in which epsilon counts little, and much
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.rand(shape, generator=draw) + 0.5)
        try:
            y, bias = probe(x), getattr(probe, "bias", None)
            weight = getattr(probe, "weight", None)
        except (TypeError, AttributeError, RuntimeError):  # it reads more than x, such as a gate
            return None
        for eps in said or [torch.finfo(dtype).eps, 1e-5, 1e-6]:
            for plus in (0.0, 1.0):
                w: Any = None if weight is None else weight + plus
                if torch.allclose(y, F.layer_norm(x, shape, w, bias, eps), rtol=1e-4):
                    return eps, plus, True
                if bias is None and torch.allclose(y, F.rms_norm(x, shape, w, eps), rtol=1e-4):
                    return eps, plus, False
    return None


# --------------------------------------------------------------------------- layers


_outside = TensorAttribute[bool]("outside")


class Beside:
    """Changes what modules get beside an activation of which a device has some samples, or tokens,
    or features.

    Of samples, masks and angles of positions become those of all branches. Another activation is
    changed as the first one if it comes from outside the layers, as an encoder's output does. Where
    tokens are sharded every device has all of such a one, and its gradients are summed; where
    features are, layers get a part of it.
    """

    def __init__(self, boundary: Sharded) -> None:
        self.boundary, self._whole = boundary, Replicated(boundary.col)
        self._gathered = WeakTensorKeyDictionary()  # layers read the same ones

    def __call__(self, value: Any, activation: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
        def changed(x: Tensor) -> Tensor:
            if self.boundary.dim:
                of_width = self.boundary.dim == -1
                return (self._of_width if of_width else self._of_tokens)(x, activation)
            alone = x.dim() < 3 and x.is_floating_point()  # [s, d] of all samples alike
            if x.dim() < 2 or alone or len(x) != len(activation):
                return x
            if not _outside.get(x) and (x.requires_grad or x.shape == activation.shape):
                return x
            if x.requires_grad:
                return change(x)
            if x not in self._gathered:
                self._gathered[x] = _whole(self.boundary, x)
            return self._gathered[x]

        return map_tensors(changed, value)

    def _of_width(self, x: Tensor, activation: Tensor) -> Tensor:
        width = activation.shape[-1] * self.boundary.col.size
        like = x.is_floating_point() and x.dim() == activation.dim() and x.shape[-1] == width
        return cut(x, self.boundary) if like and _outside.get(x) else x

    def _of_tokens(self, x: Tensor, activation: Tensor) -> Tensor:
        if not x.requires_grad or x.dim() != 3:
            return x
        if _outside.get(x):
            return enter(x, self._whole)
        if x.shape[1] != activation.shape[1]:
            raise ValueError(
                f"an activation {[*x.shape]} of all tokens, which layers make, is beside one "
                f"{[*activation.shape]} of which devices have some: use scheme=megatron without "
                "sequence_parallel"
            )
        return x


def note_outside(layer: nn.Module) -> None:
    """Notes that what a layer gets, the first of its list, comes from outside the layers."""

    def noted(x: Tensor) -> Tensor:
        _outside.set(x, True)
        return x

    change_input(layer, lambda x: x, lambda value, *_: map_tensors(noted, value))


def compute_whole(module: nn.Module, boundary: Sharded, beside: Beside | None) -> None:
    """Lets every device compute a module between sections whole, of all tokens and all of h."""
    change_input(module, lambda x: join(x, boundary), beside)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        shape = given[_first(given)].shape

        def part(x: Any, reads: bool) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            if x.dim() < len(shape) and x.shape == (shape[:-1].numel(), shape[-1]):
                return part(x.view(shape), reads).flatten(0, -2)
            if x.dim() >= min(len(shape), 3) and x.shape[boundary.dim] == shape[boundary.dim]:
                return cut(x, boundary)
            # Weights of streams, which code around it multiplies by a part of h.
            return enter(x, Replicated(boundary.col)) if reads else x

        several = out if isinstance(out, tuple) else (out,)
        reads = boundary.dim == -1 and several[0].shape[-1] != shape[-1]
        parts = tuple(part(x, reads) for x in several)
        return parts if isinstance(out, tuple) else parts[0]

    module.register_forward_hook(hook, with_kwargs=True)


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the first tensor that a module returns."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return change(out)
        return type(out)((change(out[0]), *out[1:]))

    module.register_forward_hook(hook)


def change_input(
    module: nn.Module,
    change: Callable[[Tensor], Tensor],
    beside: Callable[[Any, Tensor, Callable[[Tensor], Tensor]], Any] | None = None,
) -> None:
    """Changes the first floating-point tensor that a module is called with, and what is beside."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if (first := _first(given)) is None:
            return None
        x, new = given[first], change(given[first])
        others = {name: new if value is x else value for name, value in given.items()}
        if beside is not None:
            others = {n: v if v is new else beside(v, x, change) for n, v in others.items()}
        given = others
        return tuple(given[i] for i in range(len(args))), {name: given[name] for name in kwargs}

    # What is registered later is around what has been.
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def _first(given: dict[Any, Any]) -> Any:
    """Returns the key of the activation among arguments, by number or name."""
    names = sorted(given, key=lambda name: (isinstance(name, str), name != "hidden_states"))
    tensors = (name for name in names if isinstance(given[name], Tensor))
    return next((name for name in tensors if given[name].is_floating_point()), None)


def before_backward(module: nn.Module, hook: Callable[[Tensor], None]) -> None:
    """Calls a hook before the backward pass of a module, as `blocks.Recompute` does for layers."""

    def watch(_: nn.Module, __: Any, out: Any) -> None:
        first = out if isinstance(out, Tensor) else out[0]
        if first.requires_grad:
            first.register_hook(hook)

    module.register_forward_hook(watch)
