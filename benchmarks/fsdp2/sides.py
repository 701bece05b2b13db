"""Models of gridformer under `fully_shard`, on every layout: how FSDP2 is put around each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from benchmarks.fsdp2.problem import LENGTH, SEED, Method
from benchmarks.fsdp2.trained import Trained
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Activations, Model
from gridformer.models.blocks import Attention, CrossAttention, Layer, Linear
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.sharding import shard_of
from gridformer.utils.batch import Batch

CPU = torch.device("cpu")


def one_device(config: ModelConfig, method: Method) -> Trained:
    """Returns the reference: the same model without FSDP2 or any other process."""
    model = build_parallel(config, LayoutConfig(), Axes(), SEED, CPU, method.dtype)
    return Trained(model, Axes(), method)


def on_layout(
    config: ModelConfig, layout: LayoutConfig, method: Method, contiguous: bool = True
) -> Trained:
    """Returns a model on a layout whose replicas FSDP2 shards.

    Parameters of a grid are local blocks, plain tensors of which FSDP2 knows nothing more.

    Args:
        config: The model.
        layout: The layout, without a `dp_mode`.
        method: How it is trained.
        contiguous: Whether blocks that gridformer stores by columns are stored by rows instead.
    """
    axes = build_axes(layout, "cpu")
    dtype = "float32" if method.dtype == "bfloat16" else method.dtype
    model = build_parallel(config, layout, axes, SEED, CPU, dtype)
    model.compute_dtype = getattr(torch, method.dtype)
    shards = {name: shard_of(parameter) for name, parameter in model.named_parameters()}
    if contiguous:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    pipeline = layout.pp > 1
    if pipeline:
        _add_part(model, axes)
    of_axis = {name: _mesh_of(axes[name]) for name in {s.replicas or "" for s in shards.values()}}

    several = {"shard_placement_fn": _places(of_axis)} if len(of_axis) > 1 else {}
    _fully_shard(model, of_axis["dp"], method, "part" if pipeline else "losses", **several)
    if pipeline or axes.world.size > axes.dp.size:
        names = {parameter: name for name, parameter in model.named_parameters()}

        def once(parameter: nn.Parameter) -> bool:
            shard = shards[names[parameter]]
            return shard.owned and (not shard.stages or axes.pp.index == shard.stages[0])

        return (Pipelined if pipeline else Trained)(model, axes, method, shards, once)
    return Trained(model, axes, method)


def _places(of_axis: dict[str, DeviceMesh]) -> Callable[[nn.Parameter], Any]:
    """Returns a function that tells torch over which mesh a parameter is sharded.

    Raises:
        ImportError: This version of torch has one mesh for all parameters of a module, as 2.11 has.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

    infos = {name: fsdp.FSDPMeshInfo(mesh, shard_mesh_dim=0) for name, mesh in of_axis.items()}
    placement = getattr(fsdp, "ShardPlacementResult", None)
    if placement is None:
        raise ImportError(f"torch {torch.__version__} has one mesh for all parameters of a module")

    def place(parameter: nn.Parameter) -> Any:
        return placement(None, infos[shard_of(parameter).replicas or ""])

    return place


def _mesh_of(axis: Axis) -> DeviceMesh:
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(axis.group or dist.group.WORLD, "cpu")


def _fully_shard(model: Model, mesh: DeviceMesh, method: Method, runs: str, **how: Any) -> None:
    """Puts FSDP2 around each layer and the rest, as gridformer's own FSDP has its units."""
    if method.dtype == "bfloat16":
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if not method.reshards:
        how["reshard_after_forward"] = False
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the global count. gloo has no reduction but the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, runs)


# --------------------------------------------------------------------------- DTensor


def by_styles(config: ModelConfig, layout: LayoutConfig, method: Method) -> Trained:
    """Returns a plain model that torch's own tensor-parallel styles cut over columns."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = _plain(config, layout, method)
    for module in model.modules():
        if isinstance(module, Linear):
            style = ColwiseParallel() if module.role.opens else RowwiseParallel()
            parallelize_module(module, mesh["col"], style)
    return _dtensor(model, mesh, layout, method, by_torch=True)


def by_dtensor(
    config: ModelConfig, layout: LayoutConfig, method: Method, by_torch: bool
) -> Trained:
    """Returns a plain model whose products hold DTensors that are cut over columns.

    It is what torch's styles do, written for products with weights [in, out].
    """
    model, mesh = _plain(config, layout, method)
    for module in model.modules():
        if isinstance(module, Linear):
            _cut(module, mesh["col"])
        if isinstance(module, Attention | CrossAttention):
            module.head_block = mesh.get_local_rank("col")
    return _dtensor(model, mesh, layout, method, by_torch)


def _plain(config: ModelConfig, layout: LayoutConfig, method: Method) -> tuple[Model, DeviceMesh]:
    mesh = init_device_mesh("cpu", (layout.dp, layout.cols), mesh_dim_names=("dp", "col"))
    return build_parallel(config, LayoutConfig(), Axes(), SEED, CPU, method.dtype), mesh


def _cut(module: Linear, mesh: DeviceMesh) -> None:
    opens = module.role.opens
    of_input: Placement = Replicate() if opens else Shard(-1)

    def place(_: str, linear: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(linear, Linear)
        weight = distribute_tensor(linear.weight.detach(), mesh, [Shard(1 if opens else 0)])
        linear.weight = nn.Parameter(weight)
        if linear.bias is not None:
            placement = Shard(0) if opens else Replicate()
            linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [placement]))

    def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [of_input], run_check=False)

    def leave(_: nn.Module, out: DTensor, mesh: DeviceMesh) -> Tensor:
        return (out if opens else out.redistribute(placements=[Replicate()])).to_local()

    distribute_module(module, mesh, place, enter, leave)  # type: ignore[arg-type]


def _dtensor(
    model: Model, mesh: DeviceMesh, layout: LayoutConfig, method: Method, by_torch: bool
) -> Trained:
    _fully_shard(model, mesh["dp"], method, "losses")
    first = mesh.get_local_rank("col") == 0

    def once(parameter: nn.Parameter) -> bool:
        """Whole parameters have a copy on every column; DTensors on a 2-D mesh are cut over it."""
        assert isinstance(parameter, DTensor)
        cut = any(p.is_shard() for p in parameter.placements[1:])
        return first or cut

    return Trained(model, build_axes(layout, "cpu"), method, None, None if by_torch else once)


# --------------------------------------------------------------------------- weights gathered early


class Prefetching(Trained):
    """A grid whose products keep weights and gather those of the next product early."""

    def gradients(self, batch: Batch, count: Tensor) -> Tensor:
        from gridformer.parallel.tensor.summa import gathered_weights_scope

        with gathered_weights_scope(self.model):
            return super().gradients(batch, count)


# --------------------------------------------------------------------------- pipelines


def _add_part(model: Model, axes: Axes) -> None:
    """Gives a stage the method `part(hidden, batch)`, which returns hidden states or the loss."""
    links = model.links()
    mine: Collection[str] = [links[i].name for i in model.stages[axes.pp.index]]

    def part(self: Model, hidden: Tensor | None, batch: Batch) -> Tensor:
        out = self.run(batch, None if hidden is None else Activations(hidden), mine).hidden
        assert out is not None
        if axes.pp.index < axes.pp.size - 1:
            return out
        return torch.stack([*self.losses_of(out, batch).values()]).sum()

    model.part = MethodType(part, model)  # type: ignore[assignment]


class Pipelined(Trained):
    """Two stages: the forward passes of all micro-batches, then their backward passes."""

    def gradients(self, batch: Batch, count: Tensor) -> Tensor:
        part: Callable[..., Tensor] = self.model.part  # type: ignore[assignment]
        first, other = self.axes.pp.index == 0, self.axes.pp.ranks[1 - self.axes.pp.index]
        total = torch.zeros((), dtype=torch.float64)
        done: list[tuple[Tensor | None, Tensor]] = []
        for micro in range(self.method.micro_batches):
            rows = self.split.rows(micro)
            self.model.dropout_rng.at(rows)
            here = {key: value[rows] for key, value in batch.items()}
            entered = None
            if not first:
                shape = (rows.stop - rows.start, LENGTH, self.model.config.hidden_size)
                entered = torch.empty(shape, dtype=torch.float64)
                dist.recv(entered, other)
                entered.requires_grad_()
            out = part(entered, here)
            if first:
                dist.send(out.detach(), other)
            else:
                total += out.detach()
            done.append((entered, out))
        for micro, (entered, out) in enumerate(done):
            self.sums_now(micro == len(done) - 1)
            if entered is None:
                grad = torch.empty_like(out)
                dist.recv(grad, other)
                out.backward(grad)
            else:
                (out / count).backward()
                assert entered.grad is not None
                dist.send(entered.grad, other)
        return total
