"""FSDP: parameters are sharded over replicas and gathered layer by layer (`dp_mode: fsdp`).

This is ZeRO-3 (Rajbhandari et al. 2020) with the schedule of FSDP (Zhao et al. 2023): a layer is
gathered before its forward pass and before its backward pass, while the one before it computes, and
freed after each. All other parameters, L of which are in layers and R are not, are gathered once
and stay until the step ends. With m micro-batches and d replicas, a rank receives in a step

    (d-1)/d (2 m L + R)   elements of parameters, and sends    (d-1)/d (L + R)   of gradients.

With `reshard: step` layers stay, too, and 2 m is 1. In bfloat16 and float16 L elements travel in
that type, as copies of what products read (gridformer.models.blocks.cast). Freeing frees a storage
and keeps the tensor, so what autograd has saved of it is valid again once it is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes
from gridformer.models.blocks import Layer, copy_of
from gridformer.parallel.data.zero import FlatBucket, replica_part, unshard
from gridformer.parallel.sharding import info_of
from gridformer.utils.tensors import free_storage

LABEL = "parameters"


# Calls a function with the gradient of a module's output before its backward pass.
BeforeBackward = Callable[[nn.Module, Callable[[Tensor], None]], None]


class FSDPUnit:
    """Parameters that are gathered and freed together.

    Args:
        as_copies: Whether cast copies of the parameters are gathered instead of the parameters,
            where there are any.

    Attributes:
        after: The unit that the forward pass needs next; it is prefetched.
        before: The unit that the backward pass needs next; it is prefetched.
        reshards: Whether a layer frees them after its passes (`reshard: layer`), or they stay until
            the step ends.
        comes_again: Whether the backward pass begins with this layer: it is gathered again while
            the loss is computed, before the gradients of the head occupy the links.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], axes: Axes, as_copies: bool = False
    ) -> None:
        self.parameters = [p for p in parameters if replica_part(p) is not None]
        self.after: FSDPUnit | None = None
        self.before: FSDPUnit | None = None
        self.whole = False
        self.reshards = True
        self.comes_again = False
        self._in_backward = False
        self._missing: set[nn.Parameter] = set()
        self._coming: list[comm.Pending] | None = None
        groups: dict[tuple[str, bool], list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            info_of(parameter).group = self
            copied = as_copies and copy_of(parameter) is not None
            groups[info_of(parameter).shard.replicas or "", copied].append(parameter)
        self._messages = [
            _Message(FlatBucket(members, axes[name]), copied)
            for (name, copied), members in groups.items()
        ]

    def watch(self, layer: nn.Module, before_backward: BeforeBackward) -> None:
        """Makes a layer unshard and reshard these parameters when it runs."""
        layer.register_forward_pre_hook(self._before_forward)
        layer.register_forward_hook(self._after_forward)
        before_backward(layer, self._before_backward)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_done)

    def prefetch(self) -> None:
        """Starts to gather the parameters, unless they are materialized or in flight."""
        if not self.whole and self._coming is None:
            self._coming = [message.start(self.reshards) for message in self._messages]

    def unshard(self) -> None:
        """Materializes the parameters; waits for the gather, or starts it if it has not started."""
        if self.whole:
            return
        self.prefetch()
        assert self._coming is not None
        for message, pending in zip(self._messages, self._coming):
            message.unshard(pending.wait())
        self._coming, self.whole = None, True

    def reshard(self) -> None:
        """Frees the parameters; only this replica's part of each stays."""
        for pending in self._coming or ():  # its layer has not run
            pending.wait()
        self._coming, self.whole, self._in_backward = None, False, False
        for message in self._messages:
            message.reshard()

    def forget(self) -> None:
        """Frees cast copies of this replica's parts, which belong to the values of one step."""
        for message in self._messages:
            message.forget()

    def _before_forward(self, *_: Any) -> None:
        self.unshard()
        if self.after is not None and not self._in_backward:
            self.after.prefetch()

    def _after_forward(self, *_: Any) -> None:
        # If it was recomputed, its backward pass follows.
        if self.reshards and not self._in_backward:
            self.reshard()
            if self.comes_again and torch.is_grad_enabled():
                self.prefetch()

    def _before_backward(self, _: Tensor) -> None:
        self._in_backward, self._missing = True, set(self.parameters)
        # The last sum of a gradient of the layer after this one may still be on its way.
        if self.after is not None:
            self.after.end_backward()
        self.unshard()
        if self.before is not None:
            self.before.prefetch()

    def _gradient_done(self, parameter: nn.Parameter) -> None:
        """Frees the parameters when all have gradients: backward has then read their values."""
        self._missing.discard(parameter)
        if not self._missing:
            self.end_backward()

    def end_backward(self) -> None:
        """Frees the parameters if the layer runs backward, which has read their values."""
        if self.reshards and self._in_backward:
            self.reshard()


class _Message:
    """Parameters of a unit that travel together, as they are or as cast copies."""

    def __init__(self, flat_bucket: FlatBucket, copied: bool) -> None:
        self.bucket = flat_bucket
        self._copies = [c for p in flat_bucket.parameters if copied and (c := copy_of(p))]
        self._share: Tensor | None = None

    def start(self, again: bool) -> comm.Pending:
        """Starts to gather the message."""
        share = self._share
        if share is None:
            share = self.bucket.join_parts(self._copies[0].dtype if self._copies else None)
            if again and any(copy.held for copy in self._copies):
                self._share = share  # the parts are cast once a step
        return comm.start_all_gather(share.unsqueeze(0), self.bucket.axis, 0, LABEL)

    def unshard(self, shares: Tensor) -> None:
        if not self._copies:
            unshard(self.bucket, shares)
            return
        both = zip(self.bucket.parameters, self._copies)
        self.bucket.part(shares, [copy.allocate(parameter) for parameter, copy in both])

    def reshard(self) -> None:
        for copy in self._copies:
            copy.drop()
        if not self._copies:
            for parameter in self.bucket.parameters:
                free_storage(parameter)

    def forget(self) -> None:
        self._share = None


class Gathering:
    """The units of a model: one for each layer, in the model's order, and one for the `rest`.

    Another network says which its `layers` are, and has no `Recompute` that calls their hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        axes: Axes,
        reshards: bool = True,
        layers: Sequence[nn.Module] | None = None,
        before_backward: BeforeBackward | None = None,
    ) -> None:
        if layers is None:
            layers = [module for module in model.modules() if isinstance(module, Layer)]
        of_layer = [[*layer.parameters()] for layer in layers]
        if getattr(model, "compute_dtype", None) not in (None, torch.float32, torch.float64):
            # One message for each layer, so what is read in float32 is gathered with the rest.
            of_layer = [[p for p in each if copy_of(p) is not None] for each in of_layer]
        self.layers = [FSDPUnit(each, axes, as_copies=True) for each in of_layer]
        for layer, unit in zip(layers, self.layers):
            unit.reshards = reshards
            watch: Any = before_backward or model.recompute.before_backward  # type: ignore[union-attr]
            unit.watch(layer, watch)
        if self.layers:
            self.layers[-1].comes_again = axes.pp.size == 1
        for unit, after in pairwise(self.layers):
            unit.after, after.before = after, unit
        inside = {parameter for each in of_layer for parameter in each}
        self.rest = FSDPUnit([p for p in model.parameters() if p not in inside], axes)
        mine = set(self.rest.parameters)
        self._in_pipeline = axes.pp.size > 1
        self._open = False
        for module in model.modules():
            if module in layers or not mine.isdisjoint(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._check, prepend=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allows the model to run inside this context, in which parameters must not change.

        `rest` is materialized at its start, and everything is resharded at its end.
        """
        self._open = True
        try:
            self.rest.prefetch()
            for unit in self.layers:
                unit.prefetch()
                if unit.reshards or not self._in_pipeline:  # other layers follow one by one
                    break
            self.rest.unshard()
            yield
        finally:
            self._open = False
            for unit in (self.rest, *self.layers):
                unit.reshard()
                unit.forget()

    def _check(self, *_: Any) -> None:
        if not self._open:
            raise RuntimeError(
                "the parameters are sharded over replicas (dp_mode=fsdp): run the model inside "
                "`with gridformer.parallel.tensor.summa.gathered_weights_scope(model):`"
            )


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Lets a model with `dp_mode: fsdp` run inside this context; does nothing for others.

    It contains the forward and backward passes of a step. Parameters must not change inside it.
    """
    gathering = getattr(model, "gathering", None)
    if not isinstance(gathering, Gathering):
        yield
        return
    with gathering.open():
        yield


def reshard_layers(model: nn.Module) -> None:
    """Frees the parameters of layers that have run backward, but lack gradients of weights."""
    gathering = getattr(model, "gathering", None)
    for unit in gathering.layers if isinstance(gathering, Gathering) else ():
        unit.end_backward()


def materialized(parameter: nn.Parameter) -> nn.Parameter:
    """Materializes a parameter, for a caller that reads it outside its layer, and returns it."""
    group = info_of(parameter).group
    if group is not None:
        group.unshard()
    return parameter


def drop_copies(parameter: nn.Parameter) -> None:
    """Frees the cast copies of a parameter that has been updated."""
    copy = copy_of(parameter)
    if copy is not None:
        copy.drop()
    group = info_of(parameter).group
    if group is not None:
        group.forget()
