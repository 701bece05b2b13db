"""Parameters that lie cut over replicas, gathered layer by layer (dp_mode fsdp).

A layer's parameters are gathered before its forward pass and let go of after it, and again for its
backward pass, where all its gradients are there; meanwhile the next layer's are on their way. All
others, the tied table among them, which both ends read, are gathered once and stay until the step
ends. So a rank receives, of L parameters in layers and R others, in m micro-batches over d replicas

    (d-1)/d (2 m L + R)     and sends gradients of    (d-1)/d (L + R)

ZeRO-3 (Rajbhandari et al. 2020), and the schedule of FSDP (Zhao et al. 2023). A parameter that is
let go of keeps its tensor and loses its memory, so what autograd has saved of it is valid again
when it is gathered for the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.models import Model
from gridformer.models.blocks import Layer, Recompute
from gridformer.parallel.data.zero import FlatBucket, free_storage, replica_part, unshard
from gridformer.parallel.sharding import info_of

LABEL = "parameters"


class FSDPUnit:
    """Parameters that are gathered and let go of together.

    after, before: the units that are needed next, forward and backward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], axes: Axes) -> None:
        self.parameters = [p for p in parameters if replica_part(p) is not None]
        self.after: FSDPUnit | None = None
        self.before: FSDPUnit | None = None
        self.whole = False
        self._in_backward = False
        self._missing: set[nn.Parameter] = set()
        self._coming: list[comm.Pending] | None = None
        groups: dict[tuple[str, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            info_of(parameter).group = self
            groups[info_of(parameter).shard.replicas or "", parameter.dtype].append(parameter)
        self._buckets = [FlatBucket(members, axes[name]) for (name, _), members in groups.items()]

    def watch(self, layer: nn.Module, recompute: Recompute) -> None:
        """Gather and let go as this layer is run."""
        layer.register_forward_pre_hook(self._before_forward)
        layer.register_forward_hook(self._after_forward)
        recompute.before_backward(layer, self._before_backward)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_done)

    def prefetch(self) -> None:
        """Send the parts on their way, unless they are here or on their way."""
        if not self.whole and self._coming is None:
            self._coming = [_start(flat_bucket) for flat_bucket in self._buckets]

    def unshard(self) -> None:
        """Have the parameters whole."""
        if self.whole:
            return
        self.prefetch()
        assert self._coming is not None
        for flat_bucket, pending in zip(self._buckets, self._coming):
            unshard(flat_bucket, pending.wait())
        self._coming, self.whole = None, True

    def reshard(self) -> None:
        self._coming, self.whole, self._in_backward = None, False, False
        for parameter in self.parameters:
            free_storage(parameter)

    def _before_forward(self, *_: Any) -> None:
        self.unshard()
        if self.after is not None and not self._in_backward:
            self.after.prefetch()

    def _after_forward(self, *_: Any) -> None:
        if not self._in_backward:  # else computed again, for the backward pass about to come
            self.reshard()

    def _before_backward(self, _: Tensor) -> None:
        self._in_backward, self._missing = True, set(self.parameters)
        self.unshard()
        if self.before is not None:
            self.before.prefetch()

    def _gradient_done(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is the last that is made of its value."""
        self._missing.discard(parameter)
        if self._in_backward and not self._missing:
            self.reshard()


class Gathering:
    """The units of a model: its layers, and one of all else."""

    def __init__(self, model: Model, axes: Axes) -> None:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        self.layers = [FSDPUnit(layer.parameters(), axes) for layer in layers]
        for layer, unit in zip(layers, self.layers):
            unit.watch(layer, model.recompute)
        for unit, after in pairwise(self.layers):
            unit.after, after.before = after, unit
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        self.rest = FSDPUnit([p for p in model.parameters() if p not in inside], axes)
        mine = set(self.rest.parameters)
        self._open = False
        for module in model.modules():
            if isinstance(module, Layer) or not mine.isdisjoint(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._check, prepend=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """While parameters are read and do not change."""
        self._open = True
        try:
            self.rest.unshard()
            yield
        finally:
            self._open = False
            for unit in (self.rest, *self.layers):
                unit.reshard()

    def _check(self, *_: Any) -> None:
        if not self._open:
            raise RuntimeError(
                "parameters lie cut over replicas (dp_mode=fsdp): run the model inside "
                "`with gridformer.parallel.tensor.linear.weights_kept(model):`"
            )


def install(model: Model, axes: Axes) -> None:
    """Have a model whose parameters are cut (gridformer.parallel.data.zero) gather them itself."""
    model.gathering = Gathering(model, axes)  # type: ignore[assignment]


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Around forward and backward passes; does nothing for a model of another dp_mode."""
    gathering = getattr(model, "gathering", None)
    if not isinstance(gathering, Gathering):
        yield
        return
    with gathering.open():
        yield


def materialized(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that is about to be read outside its layer's turn, with its memory filled."""
    group = info_of(parameter).group
    if group is not None:
        group.unshard()
    return parameter


def _start(flat_bucket: FlatBucket) -> comm.Pending:
    axis: Axis = flat_bucket.axis
    return comm.start_all_gather(flat_bucket.join_parts().unsqueeze(0), axis, 0, LABEL)
