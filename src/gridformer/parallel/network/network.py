"""`parallelize` for any network, and the part of it that one process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gridformer import comm, models
from gridformer.comm.autograd import one_thread
from gridformer.config import LayoutConfig, factory
from gridformer.mesh import Axes
from gridformer.models.blocks import SequenceRows
from gridformer.parallel.axes import build_axes
from gridformer.parallel.build import build_parallel, initialize
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.copies import differing, share_copies, share_parts
from gridformer.parallel.data.gradients import (
    GradientSums,
    clear_gradients,
    clip,
    counted_square,
    owned,
    reduce_gradients,
)
from gridformer.parallel.data.zero import FlatBucket, cut_over_replicas, own_part, stored
from gridformer.parallel.network import modules as parts
from gridformer.parallel.network.refusals import check, run_of, runs_as_a_family
from gridformer.parallel.network.replacing import Sharding
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.parallel.sharding import ParamInfo, info_of
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.utils.batch import MicroBatch
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
            device. It is modified in place; with stages, or rows over the sequence, it is left
            without weights.
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
    run = run_of(module, layout, plan) if runs_as_a_family(layout) else None
    roles = None if run else check(module, layout, plan)
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
    if run:
        model: Any = build_parallel(run.model, layout, axes, 0, device, run.train.dtype)
        module.to("meta")  # this process's part has its weights
        return Network(model, layout, axes, model.orders, device)
    assert roles is not None
    values = {name: p.data for name, p in module.named_parameters()}
    sharding = Sharding(module, roles, layout, axes)

    def value(name: str) -> Tensor:
        order = sharding.orders.get(name)
        if order is None:
            return values[name]
        return values[name].index_select(order[0], order[1].to(device))

    cut = partial(cut_over_replicas, axes=axes, mode=layout.dp_mode)
    initialize(module, 0, device, None, cut, values=value)
    sharding.finish(module)
    network = Network(module, layout, axes, sharding.orders, device)
    if layout.dp_mode == "fsdp":
        more = layout.reshard != "step", sharding.layers, parts.before_backward
        network.gathering = fsdp.Gathering(module, axes, *more)
    return network


class Network:
    """One process's part of a network on a layout.

        net = gridformer.parallelize(module, {"scheme": "megatron", "cols": 2})
        optimizer = net.optimizer(torch.optim.AdamW, lr=1e-3)
        for tokens in batches:                     # whole batches, equal on every process
            loss = loss_of(net(net.local(tokens)))  # the mean over this process's samples
            net.backward(loss)
            optimizer.step()

    With a pipeline, `train_batch` takes the place of the call, `loss_of` and `backward`.

    Attributes:
        module: The network, whose code and names are unchanged; in a pipeline this process's part.
        axes: The axes of the layout.
        n_parts: Into how many parts of equal size a batch is divided.
        gathering: What gathers parameters (fsdp), unless the module itself does.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: LayoutConfig,
        axes: Axes,
        orders: Mapping[str, tuple[int, Tensor]],
        device: torch.device,
    ) -> None:
        self.module, self.layout, self.axes, self.device = module, layout, axes, device
        self._model = module if isinstance(module, models.NetworkModel) else None
        named = dict(module.named_parameters())
        self._orders = {named[name]: order for name, order in orders.items() if name in named}
        self.n_parts = axes.dp.size * axes.batch.size * axes.sequence.size
        self._trained = [p for p in named.values() if p.requires_grad]
        self._reached: set[nn.Parameter] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._reached.add)
        self._sums = GradientSums.of(module, axes)
        self._sums.every_pass = layout.gradient_sync == "micro_batch"
        self._scope = ExitStack()  # in which parameters are gathered
        self.gathering: fsdp.Gathering | None = None
        self._is_open = False
        self._executor: Executor | None = None
        self._every = module  # with the names of all stages
        if self._model is not None and axes.pp.size > 1:
            self._executor = Executor(self._model, layout, axes, self._sums)
            self._every = factory.on_meta(self._model.config.factory).module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the network on this process's samples, or its tokens of them.

        Raises:
            RuntimeError: Other processes have some of its layers.
        """
        if self._executor is not None:
            raise RuntimeError("other processes have some of the layers: call train_batch")
        self._open()
        if self._model is None:
            return self.module(*args, **kwargs)
        return self._model.hidden({"tokens": args[0]})

    def train_batch(
        self, batch: Mapping[str, Any], loss_of: Callable[[Any, Mapping[str, Any]], Tensor]
    ) -> float:
        """Runs forward and backward passes of `layout.micro_batches` equal parts of a batch.

        Call it on every process; gradients are then as after `backward`.

        Args:
            batch: `tokens` [B, s], which the network reads, and what the loss reads beside its
                results, tensors [B, ...]. It is equal on every process.
            loss_of: Returns the mean loss over some samples, given the network's result and these
                samples of the batch. In a pipeline only the last stage calls it.

        Returns:
            The mean loss of the batch.

        Raises:
            ValueError: There are no tokens, or B, or s where rows divide it, does not divide.
        """
        if "tokens" not in batch:
            raise ValueError(f"a batch has {', '.join(batch)}, and no tokens [B, s]")
        m, here = self.layout.micro_batches, self.local(batch)
        size, rest = divmod(len(here["tokens"]), m)
        if rest:
            raise ValueError(f"{size * m + rest} samples here do not divide into {m} micro-batches")
        rows = [slice(i * size, (i + 1) * size) for i in range(m)]
        work = [{key: x[row] for key, x in here.items()} for row in rows]
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def finish(result: Any, part: Mapping[str, Any]) -> Tensor:
            loss = loss_of(result, part)
            total.add_(loss.detach())
            return loss / m

        if self._executor is None:
            for i, part in enumerate(work):
                self.backward(finish(self(part["tokens"]), part), last=i == m - 1)
        else:
            self._open()
            with one_thread():
                self._executor.train(
                    [MicroBatch(row, part) for row, part in zip(rows, work)],
                    lambda result, part: finish(result, part) / self.n_parts,
                )
            self._reduce()
        return self.total(total / m) * self.axes.pp.size  # others than the last stage have 0

    def local(self, batch: Any) -> Any:
        """Returns this process's samples of a batch that is equal on every process.

        Args:
            batch: A tensor [B, ...], or a dict, list or tuple of them. Where rows divide sequences,
                each tensor [B, s, ...] has one entry for each token, in the order of `tokens`.

        Returns:
            The same with tensors [B / n, ...] on this process's device, or [B / n, s / rows, ...].

        Raises:
            ValueError: B, or s where rows divide it, does not divide.
        """
        axes, sequence = self.axes, self._model.sequence if self._model else SequenceRows()
        n = axes.dp.size * axes.batch.size
        index = axes.dp.index * axes.batch.size + axes.batch.index
        parts = spec_of(self.layout).sequence_parts(self.layout)

        def mine(x: Tensor) -> Tensor:
            if len(x) % n:
                raise ValueError(
                    f"a batch of {len(x)} samples does not divide into {n} equal parts"
                )
            x = x.chunk(n)[index].to(self.device)
            if sequence.n == 1 or x.dim() < 2:
                return x
            if x.shape[1] % parts:
                raise ValueError(f"{x.shape[1]} tokens do not divide into {parts} equal parts")
            return torch.cat([x[:, tokens] for tokens in sequence.segments(x.shape[1])], 1)

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
        if last:
            self._reduce()

    def _reduce(self) -> None:
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
        grads = [p.grad for p in mine if p.grad is not None]
        return clip(grads, counted_square(mine, self.axes), self.axes.world, max_norm)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns whole parameters and buffers, under the names that the module had.

        Call it on every process; each gets all of it, which is what the unchanged module loads.
        """
        self._close()
        whole = dict[nn.Parameter, Tensor]()
        for parameter in self.module.parameters():
            mine = stored(parameter)
            whole[parameter] = self._whole(parameter, mine.data, mine is not parameter)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        state = self.module.state_dict()
        return self._of_all_stages(
            {n: whole[parameters[n]] if n in parameters else x.clone() for n, x in state.items()}
        )

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns whole gradients of the parameters, by name; call it on every process."""
        here = dict(self.module.named_parameters(remove_duplicate=False))
        names = [name for name, _ in self._every.named_parameters()]
        held = {name: own_part(here[name]) for name in names if name in here}
        there = [name in held and held[name].grad is not None for name in names]
        reached = torch.tensor(there, device=self.device).float()
        reached = comm.all_reduce(reached, self.axes.world, "max", LABEL)
        grads = dict[str, Tensor]()
        for name in (name for name, one in zip(names, reached.tolist()) if one and name in held):
            grad = held[name].grad
            grad = torch.zeros_like(held[name]) if grad is None else grad
            grads[name] = self._whole(here[name], grad, held[name] is not here[name])
        grads = self._of_all_stages(grads)
        return {name: grads.get(name) for name in names}

    def _of_all_stages(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gives every stage the tensors that the first one with each of them has."""
        if self._executor is None:
            return mine
        like, pp, every = self._every.state_dict(), self.axes.pp, dict[str, Tensor]()
        there = torch.tensor([[name in mine for name in like]], device=self.device).float()
        of_stage = comm.all_gather(there, pp, 0, LABEL).T
        for (name, empty), has in zip(like.items(), of_stage.tolist()):
            if any(has):
                x = mine[name] if name in mine else torch.empty_like(empty, device=self.device)
                every[name] = comm.broadcast(x.contiguous(), pp, has.index(1.0), LABEL)
        return every

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

    def _open(self) -> None:
        if not self._is_open and self._model is not None:
            self._scope.enter_context(gathered_weights_scope(self._model))
        elif not self._is_open and self.gathering is not None:
            self._scope.enter_context(self.gathering.open())
        self._is_open = True

    def _close(self) -> None:
        self._scope.close()
        self._is_open = False
