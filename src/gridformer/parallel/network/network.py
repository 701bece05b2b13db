"""`parallelize` for any network, and the part of it that one process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm.autograd import one_thread
from gridformer.config import LayoutConfig
from gridformer.parallel.axes import build_axes
from gridformer.parallel.build import initialize
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.copies import differing, share_copies, share_parts
from gridformer.parallel.data.gradients import (
    GradientSums,
    clear_gradients,
    counted_square,
    owned,
    reduce_gradients,
)
from gridformer.parallel.data.zero import FlatBucket, cut_over_replicas, replica_part, stored
from gridformer.parallel.network import modules as parts
from gridformer.parallel.network.refusals import check
from gridformer.parallel.network.replacing import Sharding
from gridformer.parallel.registry import describe_layout
from gridformer.parallel.sharding import ParamInfo, info_of
from gridformer.utils.tensors import map_tensors

LABEL = "network"


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
    values = {name: p.data for name, p in module.named_parameters()}
    sharding = Sharding(module, roles, layout, axes)

    def value(name: str) -> Tensor:
        order = sharding.orders.get(name)
        if order is None:
            return values[name]
        return values[name].index_select(order[0], order[1].to(device))

    initialize(module, 0, device, None, values=value)
    sharding.finish(module)
    return Network(module, layout, sharding, device)


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

    def __init__(
        self, module: nn.Module, layout: LayoutConfig, sharding: Sharding, device: torch.device
    ) -> None:
        self.module, self.layout, self.axes, self.device = module, layout, sharding.axes, device
        self._orders = {module.get_parameter(n): order for n, order in sharding.orders.items()}
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
            more = self.layout.reshard != "step", sharding.layers, parts.before_backward
            self._gathering = fsdp.Gathering(self.module, axes, *more)
        self._is_open = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the network on this process's samples."""
        if self._gathering is not None and not self._is_open:
            self._scope.enter_context(self._gathering.open())
            self._is_open = True
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
        index = self.axes.dp.index * self.axes.batch.size + self.axes.batch.index

        def mine(x: Tensor) -> Tensor:
            if len(x) % self.n_parts:
                raise ValueError(
                    f"a batch of {len(x)} samples does not divide into {self.n_parts} equal parts"
                )
            return x.chunk(self.n_parts)[index].to(self.device)

        return map_tensors(mine, batch)

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
        held = {parameter: stored(parameter) for parameter in self.module.parameters()}
        whole = {p: self._whole(p, mine.data, mine is not p) for p, mine in held.items()}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
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
            held = parameter if part is None else part
            here = torch.tensor(float(held.grad is not None), device=self.device)
            grads[name] = None
            if float(comm.all_reduce(here, self.axes.world, "max", LABEL)):
                grad = torch.zeros_like(held) if held.grad is None else held.grad
                grads[name] = self._whole(parameter, grad, part is not None)
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
            bucket = FlatBucket([parameter], axes[shard.replicas or ""])
            share, whole = mine.new_zeros(bucket.share), mine.new_empty(parameter.shape)
            bucket.parts(share)[0].copy_(mine)
            bucket.part(comm.all_gather(share.unsqueeze(0), bucket.axis, 0, LABEL), [whole])
            mine = whole
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

    def _close(self) -> None:
        self._scope.close()
        self._is_open = False
