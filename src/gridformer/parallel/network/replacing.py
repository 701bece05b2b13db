"""Replaces the modules of a network by their parallel forms, as roles and a layout say."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import models
from gridformer.config import LayoutConfig, ModelConfig, factory
from gridformer.mesh import Axes, Axis
from gridformer.models.network_calls import group_experts, rotate_in
from gridformer.parallel.network import modules as parts
from gridformer.parallel.network.plan import PlanRole, Roles, holder_of, roles_of
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import expert_axes
from gridformer.parallel.sharding import ParamPlacement, is_sharded, shard_parameter
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import VECTOR
from gridformer.parallel.tensor.partitioned_activations import PartitionedActivations
from gridformer.parallel.tensor.summa import Replicated, Sharded, boundary_of


class Sharding:
    """Replaces modules of a network by their parallel forms, without allocating parameters.

    Args:
        n_layers: How many layers a list of them has; 0 for those that are here.
        ends: Whether the first layer is in one stage with what is before it, and the last one with
            what is behind it.

    Attributes:
        layers: The layers that are here.
        orders: For the names of parameters in whose global tensors rows or columns have another
            order than in the network, the dimension and the order.
    """

    def __init__(
        self,
        module: nn.Module,
        roles: Roles,
        layout: LayoutConfig,
        axes: Axes,
        n_layers: int = 0,
        ends: tuple[bool, bool] = (True, True),
    ) -> None:
        boundary = spec_of(layout).boundary(layout)
        self.branched = boundary.activation_layout == "b"
        if self.branched:  # a grid of one row
            roles, axes = roles.for_samples(), replace(axes, col=axes.branch)
        self.axes = axes
        self.boundary = boundary_of(boundary, axes)
        self.experts_over = expert_axes(layout)
        self.whole = Replicated(axes.col)
        sharded: Any = self.boundary if isinstance(self.boundary, Sharded) else None
        self._beside = parts.Beside(sharded) if sharded else None
        # Gradients of what all devices of a row compute alike are equal there; rows have other
        # samples. They are summed over the grid with those of column 0 alone.
        self.equal = ParamPlacement((), copies="grid", partial=axes.row.size > 1)
        self.summed = ParamPlacement((), copies="grid", partial=True)
        if self.branched:  # what is common computes other samples on every device
            self.equal = ParamPlacement((), replicas="dp_branch")
            self.summed = ParamPlacement((), copies="branch", partial=True)
        # In whole modules every device of a row computes whole activations.
        self.whole_here = ParamPlacement((), copies="branch") if self.branched else self.equal
        self._placed: dict[nn.Parameter, nn.Parameter] = {}
        self._orders: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._equal: set[nn.Parameter] = set()
        network = getattr(module, "module", module)
        experts = any(role.kind == "experts" for role in roles.modules.values())
        if experts and hasattr(network, "set_experts_implementation"):
            group_experts(network)
        rotate_in(network)
        self._replace(module, roles, boundary.activation_layout)
        for name in roles.whole if sharded else ():
            beside = self._beside if self.branched else None
            parts.compute_whole(module.get_submodule(name), sharded, beside)
        for name, role in roles.parameters.items():
            parent, _, leaf = name.rpartition(".")
            owner = module.get_submodule(parent)
            if role.kind in ("opening", "closing"):
                continue  # a matrix of experts
            if role.kind == "local":
                cut = ("col", *[None] * (owner.get_parameter(leaf).dim() - 1))
                self._place(owner, leaf, ParamPlacement(cut, copies="row", partial=True))
                parts.read_cast(owner, (leaf,))
                continue
            placement = self.whole_here if roles.in_whole(name) else self.equal
            placement = self.summed if role.kind == "summed" else placement
            if leaf != "weight":
                self._place(owner, leaf, placement)
                parts.read_cast(owner, (leaf,))
            elif (local := self._local(owner, placement)) is not owner:
                above, _, last = parent.rpartition(".")
                setattr(module.get_submodule(above), last, local)
        for name, role in roles.heads.items():
            owner = module.get_submodule(name)
            for attribute in role.attributes:
                setattr(owner, attribute, getattr(owner, attribute) // self.axes.col.size)
        lists = [module.get_submodule(name) for name in roles.lists]
        self.layers = [layer for several in lists for layer in several.children()]
        for several in lists if sharded else ():
            here = dict(several.named_children())
            for layer in here.values() if boundary.activation_layout == "h" else ():
                parts.change_input(layer, lambda x: x, self._beside)
            if "0" in here and ends[0] and not self.branched:
                parts.change_input(here["0"], partial(parts.cut, boundary=sharded))
            if "0" in here:
                parts.note_outside(here["0"])
            if (last := str((n_layers or len(here)) - 1)) in here and ends[1] and not self.branched:
                parts.change_output(here[last], partial(parts.join, boundary=sharded))
        names = dict(module.named_parameters())
        self.orders = {n: self._orders[p] for n, p in names.items() if p in self._orders}
        self._dropped = [n for n, p in names.items() if p in self._equal and axes.col.index]

    def finish(self, module: nn.Module) -> None:
        """Drops the gradients of allocated parameters that column 0 of the devices has, too."""
        for name in self._dropped if self.equal.partial else ():
            if (parameter := module.get_parameter(name)).requires_grad:
                parameter.register_hook(torch.zeros_like)

    def _replace(self, module: nn.Module, roles: Roles, between: str) -> None:
        modules = dict(module.named_modules(remove_duplicate=False))
        sections: dict[tuple[Any, ...], parts.Openings] = {}
        made: dict[nn.Module, nn.Module] = {}
        holders: dict[str, Replicated] = {}
        last: tuple[str, summa.GatheredWeight] | None = None
        for name in (name for name in modules if name in roles.modules):  # in the network's order
            role, plain, whole_here = roles.modules[name], modules[name], roles.in_whole(name)
            inside = roles.in_layers(name) and not whole_here
            holder = holder_of(name, modules)
            opens = role.kind in ("opening", "head")
            latent = holder in roles.latent and (inside or whole_here)
            if opens and (latent or (inside and between in ("s", "b"))):
                holders[holder] = self.boundary if inside else self.whole
            if role.kind == "experts":
                leaves = [leaf for leaf, _ in plain.named_parameters(recurse=False)]
                matrices = {leaf: roles.parameters[f"{name}.{leaf}"] for leaf in leaves}
                parts.shard_experts(plain, matrices, self._place, self.axes, self.experts_over)
                made[plain] = plain
            if plain not in made:
                key: tuple[Any, ...] = (holder, inside)
                if self.axes.row.size > 1:  # they become one product
                    alone = role.kind == "head" or holder in roles.latent
                    key += name if alone else "", getattr(plain, "bias", None) is None
                boundary = self.boundary if inside else self.whole
                section = parts.Openings(None if holder in holders else boundary, self.axes)
                section = sections.setdefault(key, section) if opens else section
                made[plain] = self._parallel(plain, role, inside, whole_here, section)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, made[plain])
            weight = vars(made[plain]).get("gathered_weight")
            if weight is not None and roles.in_layers(name):
                if last is not None:
                    last[1].after, weight.before = weight, last[1]
                    last[1].ends_block = last[0] != roles.layer_of(name)
                last = roles.layer_of(name), weight
        for name, boundary in holders.items():
            beside = self._beside if boundary is self.boundary else None
            parts.change_input(modules[name], partial(parts.enter, boundary=boundary), beside)

    def _parallel(
        self,
        plain: nn.Module,
        role: PlanRole,
        inside: bool,
        whole_here: bool,
        section: parts.Openings,
    ) -> nn.Module:
        if self.branched and not inside and not whole_here:
            return self._local(plain, self.equal)
        if role.kind == "norm" and role.split:
            return self._local(plain, VECTOR, self.axes.col)
        if role.kind in ("opening", "head"):
            return parts.Opening(plain, role, section, self._place, self.axes)
        sharded = inside and isinstance(self.boundary, Sharded)
        by_width = sharded and self.boundary.dim == -1  # type: ignore[attr-defined]
        summed = sharded and not self.branched
        vector = VECTOR if by_width else self.summed if summed else self.equal
        vector = self.whole_here if whole_here else vector
        if role.kind == "closing":
            boundary = self.boundary if inside else self.whole
            return parts.Closing(plain, role, boundary, vector, self._place, self.axes)
        if role.kind == "embedding":
            assert isinstance(plain, nn.Embedding)
            return parts.shard_table(plain, self._place, self.axes)
        return self._local(plain, vector, self.axes.col if by_width else None, sum(role.parts))

    def _local(
        self, plain: nn.Module, placement: ParamPlacement, axis: Axis | None = None, width: int = 0
    ) -> nn.Module:
        """Returns the form of a module that sends nothing, except for a norm over an axis."""
        if type(plain) is nn.Linear and not parts.has_hooks(plain):
            return parts.WholeLinear(plain, placement, self._place)
        known = parts.known_norm(plain)
        if known is not None:
            return parts.Norm(plain, known, axis or Axis("col"), placement, self._place, width)
        assert axis is None, "the check of a layout has looked at it"
        names = tuple(name for name, _ in plain.named_parameters(recurse=False))
        for name in names:
            self._place(plain, name, placement)
        parts.read_cast(plain, names)
        return plain

    def _place(
        self,
        owner: nn.Module,
        name: str,
        placement: ParamPlacement,
        order: tuple[int, Tensor] | None = None,
    ) -> None:
        """Replaces a whole parameter by this device's block of it; see `parts.Place`."""
        whole = owner.get_parameter(name)
        if whole in self._placed:  # several modules share it
            setattr(owner, name, self._placed[whole])
        if whole in self._placed or is_sharded(whole):
            return
        equal = placement is self.equal
        if not placement.cut:
            placement = replace(placement, cut=(None,) * whole.dim())
        shard_parameter(owner, name, placement, self.axes)
        local = owner.get_parameter(name)
        local.requires_grad = whole.requires_grad
        self._placed[whole] = local
        if order is not None:
            self._orders[local] = order
        if equal:
            self._equal.add(local)


def orders_of(config: ModelConfig) -> dict[str, tuple[int, Tensor]]:
    """Returns `NetworkModel.orders`, which are the same on all layouts."""
    with torch.device("meta"):
        model = models.NetworkModel(config)
    shard_model(model, LayoutConfig(), Axes())
    return model.orders


def shard_model(model: models.NetworkModel, layout: LayoutConfig, axes: Axes) -> Sharding:
    """Shards a network that is one of gridformer's families, whose parameters are not allocated.

    Its loss then reads logits whose vocabulary is sharded over columns.
    """
    config = model.config
    whole = model
    if model.stages:  # in one without layers, norms have no products that tell their width
        with torch.device("meta"):
            whole = models.NetworkModel(config)
    roles = roles_of(whole.module, config.plan or None).held_by(model.module)
    last = len(model.links()) - 1
    stages = model.stages or (range(last + 1),)
    first, final = ({*pair} for pair in ((0, 1), (last - 1, last)))
    ends = any(first <= {*s} for s in stages), any(final <= {*s} for s in stages)
    sharding = Sharding(model, roles, layout, axes, config.n_layers, ends)
    model.orders, boundary = sharding.orders, sharding.boundary
    if isinstance(boundary, Sharded) and not sharding.branched:
        model.beside_layers = {
            "embedding": lambda x: parts.cut(x, boundary),
            "head": lambda x: parts.join(x, boundary),
        }
    head = None
    with suppress(AttributeError):  # another stage has it
        if model.reads_embeddings:
            head = model.module.get_output_embeddings()
        # Other code may change what the head returns, and needs all of it.
        elif name := factory.probed(config.factory, 2)[2]:
            head = model.module.get_submodule(name)
    in_script = config.factory in factory.given  # whose loss reads whole logits
    if axes.col.size > 1 and isinstance(head, parts.Opening) and not in_script:
        head.gathered = None
        v, smoothing = config.vocab_size, config.label_smoothing
        model.loss = VocabParallelCrossEntropy(axes.col, v, smoothing)  # type: ignore[assignment]
    if not isinstance(sharding.boundary, Sharded) and axes.col.size > 1:
        model.recompute.partition = PartitionedActivations(axes.col)
    return sharding
