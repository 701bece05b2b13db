"""Models with fewer layers, from whose times that of the whole model follows.

Everything about a step but the order in which sums of gradients end is linear in the number of
layers once each stage has some. So a long model is traced twice, with two and with three layers in
its shortest stage, and its times are extended from these along a line. Where messages of the first
gradients are still hidden by the third layer, it is traced twice more, with so many layers that
nothing is left to hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import link_names, stages_of, with_stages

KEPT = 2  # layers of the shortest stage of the shorter model; the other one has one more
_WORTH = 4  # if no more layers than these could be left out, the whole model is traced

T = TypeVar("T")
Stages = Sequence[range]


def removable(run: RunConfig, decisions: Decisions, kept: int = KEPT) -> int:
    """Returns how many layers of each stage may be left out; 0 if all are traced.

    Without a pipeline, this is the number for each stack of layers.

    Args:
        run: The run.
        decisions: The result of `decide_run`.
        kept: How many the shortest stage of the shorter model keeps.
    """
    model = run.model
    if run.layout.pp == 1:
        least = min([model.n_layers, *([model.n_decoder_layers] if model.two_stacks else [])])
    elif model.two_stacks:
        return 0
    else:
        stages = stages_of(model, run.layout.n_stages, decisions.choices.work)
        names = link_names(model)
        least = min(sum(_is_layer(names[i]) for i in stage) for stage in stages)
    return least - kept if least >= kept + _WORTH else 0


@contextmanager
def without_layers(run: RunConfig, decisions: Decisions, n: int) -> Iterator[RunConfig]:
    """Yields the run with n layers fewer in each stage, whose stages are cut so inside the context.

    Args:
        run: The run.
        decisions: The result of `decide_run(run)`.
        n: At most what `removable` returns.
    """
    model, layout = run.model, run.layout
    if not n:
        yield run
        return
    changes = {"n_layers": model.n_layers - n * layout.n_stages}
    if model.two_stacks:
        changes["n_decoder_layers"] = model.n_decoder_layers - n
    shorter = run.model_copy(update={"model": model.model_copy(update=changes)})
    if layout.pp == 1:
        yield shorter
        return
    stages = stages_of(model, layout.n_stages, decisions.choices.work)
    cuts = []
    begin = 0
    for stage in stages:
        cuts.append(range(begin, begin + len(stage) - n))
        begin += len(stage) - n
    with with_stages(shorter.model, cuts):
        yield shorter


def _is_layer(name: str) -> bool:
    return name.rstrip("0123456789") != name


def extended(one: T, other: T, more: float) -> T:
    """Extends times along a line: one + more * (one - other), in all numbers of a dataclass.

    Args:
        one: The times with more layers.
        other: The times with one layer fewer in each stage.
        more: How many layers each stage has besides those of `one`.
    """
    return _extended(one, other, more)


def _extended(one: Any, other: Any, more: float) -> Any:
    if isinstance(one, float) and isinstance(other, float):
        return max(0.0, one + more * (one - other))
    if isinstance(one, int) and isinstance(other, int):
        return one + round(more * (one - other))
    if isinstance(one, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return {key: _extended(one.get(key, 0.0), other.get(key, 0.0), more) for key in keys}
    if is_dataclass(one) and not isinstance(one, type):
        values = {
            f.name: _extended(getattr(one, f.name), getattr(other, f.name), more)
            for f in fields(one)
        }
        return replace(one, **values)
    return one
