"""What a run does about a step that is not finite: why it is not, and `train.on_divergence`.

The decisions depend on steps and checkpoints alone, and each checkpoint contains the decisions
before it. So they are the same on every layout, and a run that is killed and resumed makes them
again. None of this runs while all steps are finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.checkpoint import find
from gridformer.checkpoint.checkpoint import shards_of
from gridformer.checkpoint.copies import give_up, set_aside
from gridformer.checkpoint.manifest import Divergences
from gridformer.comm.agree import first_text
from gridformer.config import TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.train.forward_backward import ReadRows
from gridformer.train.step import Stepper
from gridformer.utils.batch import IGNORE, Batch
from gridformer.utils.errors import DivergedError
from gridformer.utils.units import counted

_DATA, _WEIGHTS, _OUTPUT, _LOSS, _GRADIENT, _MOMENT = range(6)  # in the order of blame
_MOST = 1 << 40  # more than any position
_HEADS = 1 << 30  # the position of the heads, which come after all layers
_Bad = list[tuple[int, int, str]]  # what is not finite: its kind, its position, its name


# How a run goes on: a sentence about it, and the step and the folder of the checkpoint to go back
# to, which are None if the step is left out.
Decision = tuple[str, int | None, Path | None]


class Recovery:
    """Decides how a run goes on, and counts what it has decided.

    Attributes:
        done: The decisions so far.
    """

    def __init__(self, train: TrainConfig, run_dir: Path, axes: Axes, data_start: int = 0) -> None:
        self.train, self.run_dir, self.axes = train, run_dir, axes
        self.data_start = data_start  # where the order of samples began; it cannot go back further
        self.done = Divergences()

    @property
    def present(self) -> TrainConfig:
        """The training config with the learning rate that rollbacks have left."""
        if self.done.lr_factor == 1.0:
            return self.train
        return self.train.model_copy(update={"lr": self.train.lr * self.done.lr_factor})

    def succeeded(self) -> None:
        """Notes that a step was finite."""
        if self.done.in_a_row:
            self.done = self.done.model_copy(update={"in_a_row": 0})

    def decide(self, error: DivergedError, diagnosis: Diagnosis) -> Decision:
        """Returns how the run goes on. All ranks call it together.

        Raises:
            DivergedError: The run ends.
        """
        what = str(error).split(". Lower ")[0]
        why = f"{what}; {diagnosis.cause}"
        kind, limit = self.train.on_divergence, self.train.divergences
        if kind == "stop" or (kind == "skip" and error.done):
            others = "rollback" if error.done else "skip or rollback"
            raise DivergedError(
                f"{why}. {diagnosis.advice}; train.on_divergence={others} goes on by itself"
            )
        if kind == "skip":
            in_a_row = self.done.in_a_row + 1
            if in_a_row > limit:
                raise DivergedError(
                    f"{why}. Left out before it: {counted(limit, 'step')} "
                    f"(train.divergences={limit}). {diagnosis.advice}"
                )
            self.done = self.done.model_copy(update={"in_a_row": in_a_row})
            return f"{why}; left out, as train.on_divergence=skip says", None, None
        return self._back(why, diagnosis.advice, limit)

    def _back(self, why: str, advice: str, limit: int) -> Decision:
        if self.done.rollbacks >= limit:
            raise DivergedError(
                f"{why}. The run has gone back {counted(limit, 'time')} "
                f"(train.divergences={limit}). {advice}"
            )
        steps: list[int] = []
        if self.axes.world.index == 0:  # the others might see the folder of a moment before
            steps = [int(path.name.split("-")[1]) for path in find.complete(self.run_dir)]
            steps = [step for step in steps if step >= self.data_start]
        wanted = self.train.rollback_checkpoints
        chosen = str(steps[-wanted] if wanted <= len(steps) else steps[0]) if steps else ""
        step = first_text(chosen, self.axes.world)
        if not step:
            raise DivergedError(
                f"{why}. There is no checkpoint yet to go back to: lower train.save_every. {advice}"
            )
        folder = self.run_dir / "checkpoints" / f"step-{int(step):08d}"
        later = [f"step-{number:08d}" for number in steps if number > int(step)]
        for name in later:
            set_aside(folder.with_name(name), "rolled-back")
        trouble = give_up(self.train.checkpoint_to, later)
        factor = self.done.lr_factor * self.train.rollback_lr
        self.done = Divergences(rollbacks=self.done.rollbacks + 1, lr_factor=factor)
        told = (
            f"{why}; going back to step {step} with {factor:g} of the learning rate, as "
            f"train.on_divergence=rollback says{trouble}"
        )
        return told, int(step), folder


@dataclass(frozen=True)
class Diagnosis:
    """The result of a diagnosis."""

    cause: str  # what is not finite and where, as a part of a sentence
    advice: str  # what to do, as a sentence without its period
    tokens: int  # how many tokens the step read


def diagnose(stepper: Stepper, step: int, read: ReadRows) -> Diagnosis:
    """Repeats a step without an update and finds what is not finite first.

    All ranks look at their own parts, and agree on the first cause in this order: data, weights,
    outputs of layers, the loss, gradients, and moments.
    """
    bad: _Bad = []
    model, train, axes = stepper.model, stepper.train, stepper.axes
    for name, parameter in model.named_parameters():
        if _is_bad(stored(parameter)):
            bad.append((_WEIGHTS, _position(name), name))
    with _watched(model, bad, compiled=train.compile is True):
        batch, losses, tokens = stepper.repeat(step, read)
    bad += [(_DATA, 0, text) for text in _of_data(batch, model)]
    bad += [(_LOSS, 0, name) for name, loss in losses.items() if _is_bad(loss)]
    # The backward pass begins at the end of the model.
    gradients = [name for name, parameter in owned(model) if _is_bad(parameter.grad)]
    bad += [(_GRADIENT, _MOST - _position(name), name) for name in reversed(gradients)]
    if name := not_finite(stepper):
        bad.append((_MOMENT, 0, name))
    # The first of those in the same layer.
    kind, position, name = min(bad, default=(_MOMENT + 1, 0, ""), key=lambda each: each[:2])
    where = f"rank {axes.world.index}"
    if axes.pp.size > 1:
        where += f" (stage {axes.pp.index})"
    text = f"{kind}|{name}|{where}" if bad else ""
    agreed = first_text(text, axes.world, key=kind * 2 * _MOST + position)
    cause, advice = _told(stepper, agreed)
    return Diagnosis(cause, advice, tokens)


def not_finite(stepper: Stepper) -> str:
    """Returns the first of this rank's parameters and moments that is not finite, or nothing."""
    shards = shards_of(stepper.model, stepper.updates)
    return next((name for name, (tensor, _) in shards.items() if _is_bad(tensor)), "")


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
    calm, clip = calmer[0].upper() + calmer[1:], f"train.clip_norm ({train.clip_norm:g})"
    gradients = (
        f"the loss is finite, but gradients are not, beginning with '{name}' on {where}",
        f"{calm}, or lower {clip}",
    )
    if stepper.updates.in_backward:
        gradients = ("the loss is finite, but gradients are not", calm)
    return {
        _DATA: (
            f"its batch on {where} has {name}",
            "Write the data again with `gridformer prepare`",
        ),
        _WEIGHTS: (
            f"weights were not finite before this step, first '{name}' on {where}",
            "Resume from an older checkpoint (`gridformer verify RUNDIR --finite` says which are "
            f"finite), and {calmer}",
        ),
        _OUTPUT: (
            "the weights are finite, but the output of the forward pass is not, first after "
            f"'{name}' on {where}",
            calm,
        ),
        _LOSS: (
            f"the output of the layers is finite, but the loss is not ({name}, on {where})",
            calm,
        ),
        _GRADIENT: gradients,
        _MOMENT: (
            f"'{name}' of the optimizer is not finite on {where}, as the squares of gradients were "
            "too large, or a device computed wrong",
            f"{calm}, or set {clip}",
        ),
    }[int(kind)]


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
def _watched(model: nn.Module, bad: _Bad, compiled: bool) -> Iterator[None]:
    """Notes the first module of each name whose output is not finite, inside the context."""
    handles = []
    if not compiled:  # a hook would be compiled, too
        for name, module in model.named_modules():
            if name:
                handles.append(module.register_forward_hook(partial(_look, bad, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(bad: _Bad, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    if not any(kind == _OUTPUT for kind, _, _ in bad) and any(map(_is_bad, _tensors(output))):
        bad.append((_OUTPUT, _position(name), name))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in the output of a module."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif is_dataclass(value):
        yield from _tensors([*vars(value).values()])


def _is_bad(tensor: Tensor | None) -> bool:
    """Returns whether a tensor has values that are not finite."""
    if tensor is None or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return False
    return not torch.stack(tensor.detach().aminmax()).isfinite().all()


def _position(name: str) -> int:
    """Returns a number that sorts layers in the order of the forward pass."""
    layer = re.search(r"\.(\d+)(\.|$)", name)
    if layer:
        return (1 + int(layer[1])) << 12
    return _HEADS if re.match(r"(head|norm|final|classifier|pair)", name) else 0
