"""`parallelize` for any network, and the part of it that one process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm.autograd import one_thread
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.copies import differing, share_copies, share_parts
from gridformer.parallel.data.gradients import (
    GradientSums,
    clear_gradients,
    counted_square,
    owned,
    reduce_gradients,
)
from gridformer.parallel.data.zero import cut_over_replicas, replica_part, stored
from gridformer.parallel.network import modules as parts
from gridformer.parallel.network.plan import PlanRole, Roles, described, is_conv1d, roles_of
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.parallel.sharding import (
    ParamInfo,
    ParamPlacement,
    info_of,
    set_info,
    shard_parameter,
)
from gridformer.parallel.tensor.summa import Replicated, Sharded, boundary_of
from gridformer.parallel.validation import layout_problems
from gridformer.utils.errors import ConfigError

LABEL = "network"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def parallelize(
    module: nn.Module,
    layout: LayoutConfig | Mapping[str, Any],
    plan: Mapping[str, str] | None = None,
) -> Network:
    """Shards a network over the processes of the default process group, as a layout says.

    Args:
        module: The whole network with its weights, equal on every process and on that process's
            device. It is modified in place.
        layout: The layout, such as `{"scheme": "megatron", "cols": 2}`.
        plan: Roles by patterns of names (gridformer.parallel.network.plan). None for the plan that
            a transformers model carries.

    Returns:
        This process's part of the network.

    Raises:
        ConfigError: The layout is not one for networks of others, or the plan leaves something
            open or does not fit. Nothing is changed then.
        RuntimeError: There are not as many processes as the layout has, or their weights differ.
    """
    if not isinstance(layout, LayoutConfig):
        layout = LayoutConfig.model_validate({**layout})
    roles = check(module, layout, plan)
    n = dist.get_world_size() if dist.is_initialized() else 1
    if n != layout.n_processes:
        raise RuntimeError(
            f"{describe_layout(layout)} needs {layout.n_processes} processes and the default "
            f"process group has {n}: start them with torchrun --nproc-per-node "
            f"{layout.n_processes}, and call torch.distributed.init_process_group"
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    axes = build_axes(layout, device.type)
    if wrong := differing([*module.named_parameters()], axes.world):
        raise RuntimeError(
            f"the processes' weights differ: {', '.join(wrong[:3])}; call torch.manual_seed with "
            "the same seed on every process before the network is built"
        )
    return _Build(module, roles, layout, axes, device).network()


# --------------------------------------------------------------------------- refusals


def check(module: nn.Module, layout: LayoutConfig, plan: Mapping[str, str] | None = None) -> Roles:
    """Returns the roles of a network's parts; for arguments and errors see `parallelize`."""
    roles = roles_of(module, plan)
    if problems := [*_unsupported(layout), *_problems(module, roles, layout)]:
        raise ConfigError(*problems)
    return roles


def _unsupported(layout: LayoutConfig) -> Iterator[str]:
    yield from layout_problems(layout)
    refused: dict[str, tuple[object, str]] = {
        "pp": (layout.pp > 1, "pipelines need a chain of gridformer's own links: use pp=1"),
        "branches": (
            "branches" in spec_of(layout).axes,
            "subgraph needs branches (gridformer.parallel.branches): use megatron, megatron_2d or "
            "optimus",
        ),
        "rows_over": (layout.rows_over == "sequence", "use rows_over=batch"),
        "stationary": (layout.stationary != "auto", "use stationary=auto"),
        "schedule": (layout.schedule not in ("auto", "gather"), "use schedule=gather"),
        "keep_gathered": (layout.keep_gathered not in ("auto", "none"), "use keep_gathered=none"),
        "cluster": (layout.cluster, "nothing is decided by its times: leave it out"),
    }
    for key, (wrong, remedy) in refused.items():
        if wrong:
            value = getattr(layout, key)
            yield f"layout.{key}={value} is not for networks of others yet: {remedy}"


def _problems(module: nn.Module, roles: Roles, layout: LayoutConfig) -> Iterator[str]:
    """Yields a sentence for everything that keeps a network from running on a layout."""
    yield from roles.problems
    yield from described(roles)
    if roles.problems:
        return
    modules = dict(module.named_modules(remove_duplicate=False))
    between = spec_of(layout).boundary(layout).activation_layout
    if between != "replicated" and not roles.lists:
        yield (
            "activations between sections are sharded on this layout, from the first layer to the "
            "last: the network needs a ModuleList of layers that have opening and closing products"
        )
    if between == "s" and len(roles.lists) > 1:
        yield (
            f"{' and '.join(roles.lists)}: tokens of two stacks cannot be sharded, since one reads "
            "the other's: use scheme=megatron without sequence_parallel, or optimus"
        )
    for name, role in roles.modules.items():
        yield from _of_module(name, modules[name], role, roles, layout, between)
        if role.kind == "opening":
            yield from _of_heads(name, modules, role, layout)
    if between == "s":
        yield from _of_tokens(modules, roles)
    yield from _of_shared(module, roles, layout)
    for name, role in roles.heads.items():
        for attribute in role.attributes:
            value = getattr(modules[name], attribute, None)
            if not isinstance(value, int) or value % layout.cols:
                yield (
                    f"{name}.{attribute}={value}: heads of {name} must be a number that "
                    f"layout.cols={layout.cols} divides"
                )
    for name, role in roles.parameters.items():
        size = module.get_parameter(name).shape
        if role.kind == "local" and (not size or size[0] % layout.cols):
            yield f"{name} {list(size)}: dimension 0 does not divide by layout.cols={layout.cols}"
        if role.kind == "replicated" and between != "replicated" and roles.in_layers(name):
            yield (
                f"{name}: replicated parameters inside layers need whole activations between "
                "sections: use scheme=megatron without sequence_parallel"
            )
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if isinstance(heads, int) and heads % layout.cols:
        yield f"config.num_attention_heads={heads} does not divide by layout.cols={layout.cols}"
    yield from _random_or_mixing(modules, layout)


def _of_heads(
    name: str, modules: Mapping[str, nn.Module], role: PlanRole, layout: LayoutConfig
) -> Iterator[str]:
    """Heads must be whole on a device, as far as an attention module says how wide they are."""
    product = modules[name]
    head = _head_width(modules[_holder(name, modules)])
    weight: Any = product.weight
    for width in dict.fromkeys(role.widths(weight.shape[1 if is_conv1d(product) else 0])):
        if width % layout.cols == 0 and width // layout.cols % head:
            yield (
                f"{name}: its {width // head} heads of width {head} do not divide by "
                f"layout.cols={layout.cols}"
            )


def _of_tokens(modules: Mapping[str, nn.Module], roles: Roles) -> Iterator[str]:
    """Where tokens are sharded, code with heads must see whole ones, and norms must not."""
    for name, role in roles.modules.items():
        if role.kind not in ("opening", "head") or not roles.in_layers(name):
            continue
        holder = _holder(name, modules)
        norms = [n for n, r in roles.modules.items() if r.kind == "norm"]
        if _is_layer(holder, roles) or any(n.startswith(f"{holder}.") for n in norms):
            yield (
                f"{name}: tokens are sharded between sections, and {holder} also computes what is "
                "between them: put the section into a module of its own, or use scheme=megatron "
                "without sequence_parallel, or optimus"
            )


def _of_shared(module: nn.Module, roles: Roles, layout: LayoutConfig) -> Iterator[str]:
    """Modules that share a parameter must have it in the same place."""
    users: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        role = roles.modules.get(path) or roles.parameters.get(name)
        if role is not None:
            kind = "a table" if role.kind in ("embedding", "head") else role.kind
            users.setdefault(parameter, []).append((name, kind))
        if not parameter.dim() and layout.dp_mode != "replicate":
            yield f"{name}: a scalar has no rows that replicas can shard: use dp_mode=replicate"
    for several in users.values():
        if len({kind for _, kind in several}) > 1:
            (first, one), (second, other) = (
                several[0],
                next(u for u in several if u[1] != several[0][1]),
            )
            yield (
                f"{first} and {second} are one parameter, and their roles are {one} and {other}: "
                "give both the same, or embedding and head"
            )


def _random_or_mixing(modules: Mapping[str, nn.Module], layout: LayoutConfig) -> Iterator[str]:
    for name, module in modules.items():
        if isinstance(module, _BATCH_NORMS) and layout.n_processes > 1:
            yield f"{name}: {type(module).__name__} mixes samples, of which a process has a part"
        rates = {k: v for k, v in vars(module).items() if "dropout" in k and isinstance(v, float)}
        if isinstance(module, _DROPOUTS):
            rates["p"] = float(module.p)
        for key, rate in rates.items():
            if rate > 0:
                yield (
                    f"{name}.{key}={rate}: torch's dropout draws other masks on every process, "
                    "also where they must be equal: set it to 0 before the network is built"
                )


def _of_module(
    name: str, module: nn.Module, role: PlanRole, roles: Roles, layout: LayoutConfig, between: str
) -> Iterator[str]:
    """Yields what keeps a module from having its role."""
    cols, rows = layout.cols, layout.rows
    ends = ("forward_hooks", "forward_pre_hooks")
    hooked = any(hooks for key, hooks in vars(module).items() if key.endswith(ends))
    if role.kind == "norm":
        if between == "h" and roles.in_layers(name) and parts.known_norm(module) is None:
            yield (
                f"{name}: {type(module).__name__} is neither a LayerNorm with a bias nor an "
                "RMSNorm, whose statistics columns of devices can sum: use megatron_2d"
            )
        return
    if role.kind == "embedding":
        plain = type(module) is nn.Embedding and not (
            module.max_norm or module.scale_grad_by_freq or module.sparse
        )
        if not plain or hooked:
            yield f"{name}: only a plain torch.nn.Embedding can be an embedding; use replicated"
        elif module.embedding_dim % rows:  # type: ignore[operator]
            yield f"{name}: its width {module.embedding_dim} does not divide by layout.rows={rows}"
        return
    if (type(module) is not nn.Linear and not is_conv1d(module)) or hooked:
        yield (
            f"{name}: {role.kind} needs a plain torch.nn.Linear or transformers' Conv1D, and this "
            f"is a {type(module).__name__}{' with hooks' if hooked else ''}"
        )
        return
    weight: Any = module.weight
    n_out, n_in = weight.shape[::-1] if is_conv1d(module) else weight.shape
    if role.kind == "closing":
        sizes = [("inputs", n_in, "cols", cols), ("outputs", n_out, "rows", rows)]
        if between == "h" and roles.in_layers(name):
            sizes.append(("outputs", n_out, "cols", cols))
    else:
        sizes = [("inputs", n_in, "rows", rows)]
        widths = role.widths(n_out)
        if sum(widths) != n_out:
            yield f"{name}: parts {role.parts} do not add up to its {n_out} outputs"
        if role.kind == "opening":
            sizes += [("outputs", width, "cols", cols) for width in dict.fromkeys(widths)]
        if between == "h" and roles.in_layers(name):
            sizes.append(("inputs", n_in, "cols", cols))
    for what, size, key, n in sizes:
        if size % n:
            yield f"{name}: {size} {what} do not divide by layout.{key}={n}"


def _head_width(module: nn.Module) -> int:
    """Returns the width of a head of an attention module that says it, otherwise 1."""
    names = ("head_dim", "head_size", "attention_head_size")
    widths = [getattr(module, name, None) for name in names]
    return next((width for width in widths if isinstance(width, int) and width), 1)


def _holder(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Returns the name of the module with code that calls a product: no mere list of modules."""
    path = name.rpartition(".")[0]
    while path and isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return path


def _is_layer(path: str, roles: Roles) -> bool:
    return path.rpartition(".")[0] in roles.lists and path.rpartition(".")[2].isdecimal()


# --------------------------------------------------------------------------- building


class _Build:
    """Replaces the modules of a network by their parallel forms."""

    def __init__(
        self,
        module: nn.Module,
        roles: Roles,
        layout: LayoutConfig,
        axes: Axes,
        device: torch.device,
    ) -> None:
        self.module, self.roles, self.layout = module, roles, layout
        self.axes, self.device = axes, device
        self.boundary = boundary_of(spec_of(layout).boundary(layout), axes)
        self.whole = Replicated(axes.col)
        # Gradients of what all devices of a row compute alike are equal there; rows have other
        # samples. They are summed over the grid with those of column 0 alone.
        self.equal = ParamPlacement((), copies="grid", partial=axes.row.size > 1)
        self.summed = ParamPlacement((), copies="grid", partial=True)
        self.first_column: list[nn.Parameter] = []
        self.orders: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._placed: dict[nn.Parameter, nn.Parameter] = {}

    def network(self) -> Network:
        module, roles = self.module, self.roles
        modules = dict(module.named_modules(remove_duplicate=False))
        between = spec_of(self.layout).boundary(self.layout).activation_layout
        enterings: dict[tuple[str, bool], parts.Entering] = {}
        made: dict[nn.Module, nn.Module] = {}
        for name, role in roles.modules.items():
            plain, inside = modules[name], roles.in_layers(name)
            if plain not in made:
                boundary = self.boundary if inside else self.whole
                entering = None
                if role.kind in ("opening", "head") and (between != "s" or not inside):
                    key = _holder(name, modules), inside
                    entering = enterings.setdefault(key, parts.Entering(boundary))
                    entering.n_readers += 1
                made[plain] = self._parallel(plain, role, inside, boundary, entering)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, made[plain])
        for name, role in roles.parameters.items():
            parent, _, leaf = name.rpartition(".")
            owner = module.get_submodule(parent)
            if role.kind == "local":
                axes = ("col", *[None] * (owner.get_parameter(leaf).dim() - 1))
                self._place(owner, leaf, ParamPlacement(axes, copies="row", partial=True))
            else:
                self._place(owner, leaf, self.summed if role.kind == "summed" else self.equal)
        for name, role in roles.heads.items():
            for attribute in role.attributes:
                owner = modules[name]
                setattr(owner, attribute, getattr(owner, attribute) // self.layout.cols)
        layers = [module.get_submodule(name) for name in roles.lists]
        if isinstance(self.boundary, Sharded):
            for several in layers:
                first, *_, last = *several.children(), *several.children()
                parts.cut_at_first(first, self.boundary)
                parts.join_at_last(last, self.boundary)
            holders = {
                _holder(name, modules)
                for name, role in roles.modules.items()
                if role.kind in ("opening", "head") and roles.in_layers(name)
            }
            for name in sorted(holders) if between == "s" else ():
                parts.enter_inside(modules[name], self.boundary)
        return Network(self, [layer for several in layers for layer in several.children()])

    def _parallel(
        self,
        plain: nn.Module,
        role: PlanRole,
        inside: bool,
        boundary: Replicated,
        entering: parts.Entering | None,
    ) -> nn.Module:
        if role.kind in ("opening", "head"):
            return parts.Opening(plain, role, entering, self._place, self.axes)
        sharded = inside and isinstance(self.boundary, Sharded)
        by_width = sharded and self.boundary.dim == -1  # type: ignore[attr-defined]
        vector = parts.VECTOR if by_width else self.summed if sharded else self.equal
        if role.kind == "closing":
            return parts.Closing(plain, role, boundary, vector, self._place, self.axes)
        if role.kind == "embedding":
            assert isinstance(plain, nn.Embedding)
            return parts.TableEmbedding(plain, self._place, self.axes)
        if by_width:
            known = parts.known_norm(plain)
            assert known is not None, "_problems has looked at it"
            return parts.ShardedNorm(*known, self._place, self.axes)
        for name, _ in [*plain.named_parameters()]:
            self._place(plain, name, vector)
        return plain

    def _place(
        self,
        owner: nn.Module,
        name: str,
        placement: ParamPlacement,
        order: Tensor | None = None,
    ) -> None:
        """Replaces a whole parameter by this device's block of it; see `parts.Place`."""
        whole = owner.get_parameter(name)
        if whole in self._placed:  # several modules share it
            setattr(owner, name, self._placed[whole])
            return
        equal = placement is self.equal
        if not placement.cut:
            placement = replace(placement, cut=(None,) * whole.dim())
        shard_parameter(owner, name, placement, self.axes)
        local = owner.get_parameter(name)
        values = whole.data
        if order is not None:
            dim = placement.cut.index("col")
            values = values.index_select(dim, order.to(values.device))
        info = info_of(local)
        block = info.shard.block_of(values, local.shape)
        ours = set_info(nn.Parameter(block, requires_grad=whole.requires_grad), info)
        setattr(owner, name, ours)
        self._placed[whole] = ours
        if order is not None:
            self.orders[ours] = dim, order
        if equal and placement.partial and self.axes.col.index:
            self.first_column.append(ours)


# --------------------------------------------------------------------------- the network


class Network:
    """One process's part of a network on a layout.

        net = gridformer.parallelize(module, {"scheme": "megatron", "cols": 2})
        optimizer = net.optimizer(torch.optim.AdamW, lr=1e-3)
        for tokens in batches:                     # whole batches, equal on every process
            loss = loss_of(net(net.local(tokens)))  # the mean over this process's samples
            net.backward(loss)
            optimizer.step()

    Attributes:
        module: The network, whose code and names are unchanged.
        axes: The axes of the layout.
        n_parts: Into how many parts of equal size a batch is divided.
    """

    def __init__(self, build: _Build, layers: list[nn.Module]) -> None:
        self.module, self.layout, self.axes = build.module, build.layout, build.axes
        self.device, self._orders = build.device, build.orders
        self._first_column = build.first_column
        axes, mode = self.axes, self.layout.dp_mode
        self.n_parts = axes.dp.size * axes.batch.size
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in self._trained:
            cut_over_replicas(parameter, axes, mode)
        self._reached: set[nn.Parameter] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._reached.add)
        by_axis: dict[str, list[nn.Parameter]] = {}
        for parameter in self._trained:
            shard = info_of(parameter).shard
            if shard.owned and not shard.partial:
                by_axis.setdefault(shard.replicas or "", []).append(parameter)
        summed = [(axes[name], members) for name, members in by_axis.items()]
        self._sums = GradientSums(summed, [*self.module.parameters()])
        self._sums.every_pass = self.layout.gradient_sync == "micro_batch"
        self._scope = ExitStack()  # in which parameters are gathered (fsdp)
        self._gathering: fsdp.Gathering | None = None
        if mode == "fsdp":
            reshards = self.layout.reshard != "step"
            hooks = parts.OutputHooks()
            self._gathering = fsdp.Gathering(self.module, axes, reshards, layers, hooks)
        self._is_open = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the network on this process's samples."""
        self._open()
        return self.module(*args, **kwargs)

    def local(self, batch: Any) -> Any:
        """Returns this process's samples of a batch that is equal on every process.

        Args:
            batch: A tensor [B, ...], or a dict, list or tuple of them; B must divide by `n_parts`.

        Returns:
            The same with tensors [B / n_parts, ...] on this process's device.

        Raises:
            ValueError: B does not divide.
        """
        if isinstance(batch, Mapping):
            return {key: self.local(value) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)(map(self.local, batch))
        if not isinstance(batch, Tensor):
            return batch
        if len(batch) % self.n_parts:
            raise ValueError(
                f"a batch of {len(batch)} samples does not divide into {self.n_parts} equal parts"
            )
        index = self.axes.dp.index * self.axes.batch.size + self.axes.batch.index
        return batch.chunk(self.n_parts)[index].to(self.device)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Runs the backward pass; afterward gradients are those of the mean over all processes.

        Args:
            loss: The mean over this process's samples, as with DistributedDataParallel.
            last: False for all but the last of several batches whose gradients accumulate.
                Gradients are summed over processes during the last one.
        """
        with one_thread(), self._sums.backward(last):
            (loss / self.n_parts).backward()
        if not last:
            return
        for parameter in self._first_column:
            parameter.grad = None
        reduce_gradients(self._trained, self.axes, self._sums)
        for parameter in self._trained:
            if parameter not in self._reached:  # an optimizer leaves it alone, as in one process
                clear_gradients([parameter])
        self._reached.clear()
        self._close()

    def total(self, value: Tensor) -> float:
        """Returns the mean over processes of a value such as the loss; call it on every process."""
        mine = value.detach().double() / self.axes.world.size
        return float(comm.all_reduce(mine.clone(), self.axes.world, label="metrics"))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters that an optimizer on this process updates, by name.

        With dp_mode zero1 and fsdp they are this replica's rows of them.
        """
        return [(name, p) for name, p in owned(self.module) if p.requires_grad]

    def optimizer(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        parameters: Iterable[Any] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """Returns an optimizer after whose steps all copies of parameters are equal.

        Args:
            kind: The class, such as torch.optim.AdamW. It must update each element by itself.
            parameters: Groups of what `named_parameters` returns; None for all of it.
            options: Options of the class.
        """
        mine = [p for _, p in self.named_parameters()] if parameters is None else parameters
        optimizer = kind(mine, **options)
        optimizer.register_step_post_hook(lambda *_: self.share())
        return optimizer

    def share(self) -> None:
        """Sends updated parameters to the processes with copies; `optimizer` does it by itself."""
        self._close()
        share_parts([self._trained], self.axes)
        share_copies(self._trained, self.axes)

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        clear_gradients(self.module.parameters())

    def clip_gradients(self, max_norm: float) -> float:
        """Scales the gradients so that their global norm is at most `max_norm`.

        Call it on every process, after `backward`.

        Returns:
            The norm before scaling, over all parameters of all processes.
        """
        mine = [p for _, p in self.named_parameters()]
        square = counted_square(mine, self.axes)
        norm = math.sqrt(float(comm.all_reduce(square, self.axes.world, label="metrics")))
        grads = [p.grad for p in mine if p.grad is not None]
        if grads and norm > max_norm:
            torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Returns whole parameters and buffers, under the names that the module had.

        Call it on every process; each gets all of it, which is what the unchanged module loads.
        """
        self._close()
        whole: dict[nn.Parameter, Tensor] = {}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for parameter in parameters.values():
            if parameter not in whole:
                held = stored(parameter)
                whole[parameter] = self._whole(parameter, held.data, held is not parameter)
        state = self.module.state_dict()
        return {
            name: whole[parameters[name]] if name in parameters else value.clone()
            for name, value in state.items()
        }

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns whole gradients of the parameters, by name; call it on every process."""
        grads: dict[str, Tensor | None] = {}
        for name, parameter in self.module.named_parameters():
            part = replica_part(parameter)
            grad = (parameter if part is None else part).grad
            here = torch.tensor(float(grad is not None), device=self.device)
            if float(comm.all_reduce(here, self.axes.world, "max", LABEL)):
                held = parameter if part is None else part
                grad = torch.zeros_like(held) if grad is None else grad
                grads[name] = self._whole(parameter, grad, part is not None)
            else:
                grads[name] = None
        return grads

    @torch.no_grad()
    def _whole(self, parameter: nn.Parameter, mine: Tensor, has_part: bool) -> Tensor:
        """Returns the whole tensor, given what this process has of a parameter or its gradient.

        That is its replica's rows if it `has_part`.

        Owners gather the rows of their replicas, if those have parts. Copies get what owners have.
        """
        info: ParamInfo = info_of(parameter)
        shard, axes = info.shard, self.axes
        if has_part:
            axis = axes[shard.replicas or ""]
            each = -(-len(parameter) // axis.size)
            padded = mine.new_zeros(each, *mine.shape[1:])
            padded[: len(mine)] = mine
            mine = comm.all_gather(padded, axis, 0, LABEL)[: len(parameter)]
        mine = mine.contiguous().clone()
        if shard.copies:
            mine = comm.broadcast(mine, axes[shard.copies], 0, LABEL)
        for dim, name in enumerate(info.cut):
            if name is not None:
                mine = comm.all_gather(mine, axes[name], dim, LABEL)
                mine = mine.narrow(dim, 0, shard.size[dim])
        if parameter in self._orders:
            dim, order = self._orders[parameter]
            mine = torch.empty_like(mine).index_copy_(dim, order.to(mine.device), mine)
        return mine

    # ------------------------------------------------------------------ fsdp

    def _open(self) -> None:
        if self._gathering is not None and not self._is_open:
            self._scope.enter_context(self._gathering.open())
            self._is_open = True

    def _close(self) -> None:
        self._scope.close()
        self._is_open = False
