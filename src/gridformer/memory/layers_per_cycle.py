"""After how many layers the buckets in which gradients are summed begin at the same place again.

Gradients of several small layers lie in one bucket, and those of one layer may lie in two. So a
step does not always repeat what it did for the layer before, but what it did a few layers before:
that many layers make a cycle.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from gridformer.config import RunConfig
from gridformer.models.blocks import Layer
from gridformer.parallel import data
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.data.buckets import buckets, n_bytes
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.parallel.sharding import replica_axis
from gridformer.train.step import Stepper

_MOST = 16  # layers of a cycle
_WORTH = 0.8  # of the layers: if the models with few layers have more together, all are run

Stack = tuple[int, str]  # the number of a stage, and the layers in it, such as `decoder.layers.`


class Gradient(NamedTuple):
    """A gradient that is summed over replicas in a bucket.

    Attributes:
        layer: The number of its layer among those of the rank; None outside layers.
        axis: The axis over which it is summed.
        n_bytes: Its size.
    """

    layer: int | None
    axis: str
    n_bytes: int


class LeftOut(NamedTuple):
    """How many layers of each stage are left out of a model, so that the others stand for them.

    Attributes:
        layers: Those that the shortest model does not have; 0 if all layers must be run.
        cycle: The next longer model has this many layers more in each stage.
    """

    layers: int
    cycle: int


def gradients_of(stepper: Stepper) -> list[Gradient]:
    """Returns the gradients of a rank that are summed in buckets, in the order of its model.

    If layers are updated in the backward pass, none shares a bucket with another layer's.
    """
    model, updates = stepper.model, stepper.updates
    if updates.in_backward:
        return []
    layers = (module for module in model.modules() if isinstance(module, Layer))
    number = {p: i for i, layer in enumerate(layers) for p in layer.parameters()}
    summed = updates.sums.parameters
    return [
        Gradient(number.get(p), replica_axis(p), n_bytes(p))
        for p in model.parameters()
        if p in summed
    ]


def layer_bytes(stepper: Stepper) -> int:
    """Returns the bytes of the parameters of a rank's layers."""
    layers = (module for module in stepper.model.modules() if isinstance(module, Layer))
    return sum(n_bytes(parameter) for layer in layers for parameter in layer.parameters())


def stacks_of(run: RunConfig, rank: int, decisions: Decisions) -> dict[Stack, int]:
    """Returns the number of layers of each stack in each stage of a rank, in the model's order."""
    names, layout = link_names(run.model), run.layout
    mine = [range(len(names))]
    if layout.pp > 1:
        stages = stages_of(run.model, layout.n_stages, decisions.choices.work)
        places = mesh_ranks(layout, decisions.block).flatten(1)
        (place,) = (places == rank).any(1).nonzero().flatten().tolist()
        mine = list(stages[place :: layout.pp])
    found: dict[Stack, int] = {}
    for stage, links in enumerate(mine):
        for name in (names[i] for i in links):
            if name[-1].isdigit():
                stack = stage, name.rstrip("0123456789")
                found[stack] = found.get(stack, 0) + 1
    return found


def layers_left_out(
    gradients: Sequence[Gradient],
    few: Mapping[Stack, int],
    whole: Mapping[Stack, int],
    kept: int,
    in_flight: int,
    both_ways: bool = False,
    negligible: int = 0,
) -> LeftOut:
    """Returns how many layers may be left out so that the others repeat whole cycles.

    Args:
        gradients: Those of a model with few layers; see `gradients_of`.
        few: The layers of this model; see `stacks_of`.
        whole: Those of the model with all layers, which has as many more in some stacks.
        kept: The least number of layers that a stack keeps.
        in_flight: How many layers' sums are in flight, or wait for those of others.
        both_ways: Whether parameters travel in buckets from the beginning of the model, too.
        negligible: Bytes that make no difference. An axis with fewer of them in layers, which are
            vectors then, has no cycles.
    """
    longer = _longer(few, whole)
    every = _with_all_layers(gradients, few, whole, negligible)
    ways = [_starts(reversed(every), quarter=True)]
    if both_ways:
        ways.append(_starts(every, quarter=False))
    possible = min(whole[stack] - few[stack] for stack in longer)
    possible = min(possible, _with_same_limits(every, longer))
    best, least = LeftOut(0, 1), _WORTH
    for cycle in range(1, _MOST + 1):
        most = possible
        for stack in longer:
            settled = max(_settled(way, stack, whole[stack], cycle) for way in ways)
            settled += cycle + in_flight if every else 0
            most = min(most, whole[stack] - max(kept, settled + cycle))
        found = LeftOut(most // cycle * cycle, cycle)
        if found.layers > cycle and (work := work_of(found, few, whole)) < least:
            best, least = found, work
    return best


def work_of(left_out: LeftOut, few: Mapping[Stack, int], whole: Mapping[Stack, int]) -> float:
    """Returns how much of the work for all layers the two models with few layers are.

    Args:
        left_out: The layers that are left out of them.
        few, whole: See `layers_left_out`.
    """
    n, longer = sum(whole.values()), len(_longer(few, whole))
    return (2 * (n - left_out.layers * longer) + left_out.cycle * longer) / n


def is_worth_it(most: int, few: Mapping[Stack, int], whole: Mapping[Stack, int]) -> bool:
    """Whether it may be worth it to leave layers out; see `layers_left_out`.

    Args:
        most: The most layers that can be left out.
        few, whole: See `layers_left_out`.
    """
    return work_of(LeftOut(most, 1), few, whole) < _WORTH


def _longer(few: Mapping[Stack, int], whole: Mapping[Stack, int]) -> list[Stack]:
    """Returns the stacks of which the model with all layers has more."""
    return [stack for stack in whole if few[stack] < whole[stack]]


class _Placed(NamedTuple):
    """A gradient of the model with all layers; `buckets` takes it for a tensor.

    Attributes:
        axis: The axis over which it is summed.
        n_bytes: Its size.
        layer: Its stack, and the number of its layer in it; None outside layers.
        number: Its number among the gradients of its layer.
    """

    axis: str
    n_bytes: int
    layer: tuple[Stack, int] | None
    number: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def numel(self) -> int:
        return self.n_bytes

    def element_size(self) -> int:
        return 1


def _with_all_layers(
    gradients: Sequence[Gradient],
    few: Mapping[Stack, int],
    whole: Mapping[Stack, int],
    negligible: int,
) -> list[_Placed]:
    """Returns the gradients of the model with all layers, those that follow being like the last."""
    layers = [(stack, number) for stack, n in few.items() for number in range(n)]
    found: list[_Placed] = []
    for at, same in itertools.groupby(gradients, lambda one: one.layer):
        mine = [*same]
        if at is None:
            found += [_Placed(one.axis, one.n_bytes, None, 0) for one in mine]
            continue
        stack, number = layers[at]
        last = number == few[stack] - 1
        for each in range(number, whole[stack] if last else number + 1):
            place = stack, each
            found += [_Placed(one.axis, one.n_bytes, place, i) for i, one in enumerate(mine)]
    in_layers = _by_axis(one for one in found if one.layer is not None)
    return [one for one in found if in_layers[one.axis] > negligible]


def _starts(every: Iterable[_Placed], quarter: bool) -> dict[tuple[Stack, int], tuple[int, ...]]:
    """Returns for each layer those of its gradients with which buckets begin.

    Layers are counted in the order in which they come first.

    Args:
        every: The gradients in the order in which they fill buckets.
        quarter: Whether a bucket holds at most a quarter of an axis' gradients.
    """
    by_axis: dict[str, list[_Placed]] = defaultdict(list)
    seen: dict[tuple[Stack, int], tuple[Stack, int]] = {}
    met: dict[Stack, int] = defaultdict(int)
    for one in every:
        by_axis[one.axis].append(one)
        if one.layer is not None and one.layer not in seen:
            stack = one.layer[0]
            seen[one.layer] = stack, met[stack]
            met[stack] += 1
    found: dict[tuple[Stack, int], tuple[int, ...]] = dict.fromkeys(seen.values(), ())
    for gradients in by_axis.values():
        limit = sum(one.n_bytes for one in gradients) // 4 if quarter else None
        for first, *_ in buckets(gradients, limit):
            if first.layer is not None:
                found[seen[first.layer]] += (first.number,)
    return found


def _settled(
    starts: Mapping[tuple[Stack, int], tuple[int, ...]], stack: Stack, n: int, cycle: int
) -> int:
    """Returns after how many layers of a stack the buckets of a layer repeat those of a cycle."""
    at = max(0, n - cycle)
    while at and starts.get((stack, at - 1)) == starts.get((stack, at - 1 + cycle)):
        at -= 1
    return at


def _with_same_limits(every: Sequence[_Placed], longer: Sequence[Stack]) -> int:
    """Returns how many layers of some stacks may be left out so that buckets stay as large."""
    total = _by_axis(every)
    firsts = [(stack, 0) for stack in longer]
    of_layers = _by_axis(one for one in every if one.layer in firsts)
    most = 4 * data.buckets.BUCKET_BYTES
    left_out = [max(0, total[axis] - most) // n for axis, n in of_layers.items()]
    return min(left_out, default=sys.maxsize)


def _by_axis(gradients: Iterable[_Placed]) -> dict[str, int]:
    """Returns the bytes of gradients that are summed over each axis."""
    found: dict[str, int] = defaultdict(int)
    for one in gradients:
        found[one.axis] += one.n_bytes
    return found
