"""Why the loss or the gradients of a step are not finite, found by computing the step once more.

None of this runs while all steps are finite. All ranks look at their own parts, and agree on the
first cause in this order: data, weights, outputs of layers, the loss, gradients, and moments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.checkpoint.checkpoint import shards_of
from gridformer.comm.agree import first_text
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch

_DATA, _WEIGHTS, _OUTPUT, _LOSS, _GRADIENT, _MOMENT = range(6)
_MOST = 1 << 40  # more than any position
_HEADS = 1 << 30  # the position of what comes after all layers


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis.

    Attributes:
        cause: What is not finite and where, as a part of a sentence.
        advice: What to do, as a sentence without its period.
        tokens: How many tokens the step read.
    """

    cause: str
    advice: str
    tokens: int


def diagnose(stepper: Stepper, step: int, read: ReadRows) -> Diagnosis:
    """Repeats a step without an update and finds what is not finite first.

    All ranks call it together and get the same result.

    Args:
        stepper: The stepper, whose step was not finite.
        step: The number of the step, counted from 0.
        read: Reads the rows of the step's batch anew.
    """
    found: list[tuple[int, int, str]] = []
    model, train, axes = stepper.model, stepper.train, stepper.axes
    places = _places([name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if _bad(stored(parameter)):
            found.append((_WEIGHTS, places[name], name))
    with _watched(model, found, compiled=train.compile):
        again = stepper.repeat(step, read)
    found += [(_DATA, 0, text) for text in _of_data(again.batch, model)]
    found += [(_LOSS, 0, name) for name, loss in again.losses.items() if _bad(loss)]
    # The backward pass begins at the end of the model.
    found += [(_GRADIENT, _MOST - places[name], name) for name, p in owned(model) if _bad(p.grad)]
    if name := not_finite(stepper):
        found.append((_MOMENT, 0, name))
    kind, place, name = min(found, default=(_MOMENT + 1, 0, ""))
    where = f"rank {axes.world.index}"
    if axes.pp.size > 1:
        where += f" (stage {axes.pp.index})"
    text = f"{kind}|{name}|{where}" if found else ""
    agreed = first_text(text, axes.world, key=kind * 2 * _MOST + place)
    cause, advice = _told(stepper, agreed)
    return Diagnosis(cause, advice, again.tokens)


def not_finite(stepper: Stepper) -> str:
    """Returns the first of this rank's parameters and moments that is not finite, or nothing."""
    shards = shards_of(stepper.model, stepper.updates)
    return next((name for name, (tensor, _) in shards.items() if _bad(tensor)), "")


def _told(stepper: Stepper, agreed: str) -> tuple[str, str]:
    """Returns the cause and the advice."""
    train = stepper.train
    calmer = f"lower train.lr ({train.lr:g}) or raise train.warmup_steps ({train.warmup_steps})"
    if train.dtype == "float16":
        calmer = f"use train.dtype=bfloat16, {calmer}"
    if not agreed:
        return (
            "but the same step computed once more is finite",
            "That points to a device or a kernel that does not compute the same twice: run "
            "`gridformer doctor`, and try train.deterministic=true",
        )
    kind, name, where = agreed.split("|")
    match int(kind):
        case 0:
            return (
                f"its batch on {where} has {name}",
                "Write the data again with `gridformer prepare`",
            )
        case 1:
            return (
                f"weights were not finite before this step, first '{name}' on {where}",
                "Resume from an older checkpoint (`gridformer verify RUNDIR --finite` says which "
                f"are finite), and {calmer}",
            )
        case 2:
            return (
                "the weights are finite, but the output of the forward pass is not, first after "
                f"'{name}' on {where}",
                calmer[0].upper() + calmer[1:],
            )
        case 3:
            return (
                f"the output of the layers is finite, but the loss is not ({name}, on {where})",
                calmer[0].upper() + calmer[1:],
            )
        case 5:
            return (
                f"'{name}' of the optimizer is not finite on {where}, as the squares of gradients "
                "were too large, or a device computed wrong",
                f"{calmer[0].upper()}{calmer[1:]}, or set train.clip_norm ({train.clip_norm:g})",
            )
        case _:
            if stepper.updates.in_backward:
                return "the loss is finite, but gradients are not", calmer[0].upper() + calmer[1:]
            return (
                f"the loss is finite, but gradients are not, beginning with '{name}' on {where}",
                f"{calmer[0].upper()}{calmer[1:]}, or lower train.clip_norm ({train.clip_norm:g})",
            )


def _of_data(batch: Batch, model: Any) -> Iterator[str]:
    """Yields phrases that describe invalid values of a batch."""
    config = model.config
    limits = {
        "tokens": config.vocab_size,
        "targets": config.vocab_size,
        "source": config.vocab_size,
        "labels": config.n_labels,
    }
    for key, limit in limits.items():
        values = batch.get(key)
        if values is None or not values.numel() or values.is_floating_point():
            continue
        real = values[values != IGNORE]
        if real.numel() and (int(real.min()) < 0 or int(real.max()) >= limit):
            yield f"{key} from {int(real.min())} to {int(real.max())}, outside of 0 to {limit - 1}"


@contextmanager
def _watched(model: nn.Module, found: list[tuple[int, int, str]], compiled: bool) -> Iterator[None]:
    """Notes the first module of each name whose output is not finite, inside the context."""
    handles = []
    if not compiled:  # a hook would be compiled, too
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(partial(_look, found, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(
    found: list[tuple[int, int, str]], name: str, module: nn.Module, inputs: Any, output: Any
) -> None:
    if not any(kind == _OUTPUT for kind, _, _ in found) and any(map(_bad, _tensors(output))):
        found.append((_OUTPUT, _place(name), name))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in the output of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif is_dataclass(value):
        yield from _tensors([*vars(value).values()])


def _bad(tensor: Tensor | None) -> bool:
    """Returns whether a tensor has values that are not finite."""
    if tensor is None or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return False
    return not torch.stack(tensor.detach().aminmax()).isfinite().all()


def _places(names: Iterable[str]) -> dict[str, int]:
    """Returns a number for each parameter that sorts them in the order of the forward pass."""
    found: dict[str, int] = {}
    same: Counter[int] = Counter()
    for name in names:
        layer = _place(name)
        found[name] = layer + same[layer]
        same[layer] += 1
    return found


def _place(name: str) -> int:
    """Returns a number that sorts layers in the order of the forward pass."""
    layer = re.search(r"\.(\d+)(\.|$)", name)
    if layer:
        return (1 + int(layer[1])) << 12
    return _HEADS if re.match(r"(head|norm|final|classifier|pair)", name) else 0
