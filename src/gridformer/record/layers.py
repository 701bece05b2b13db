"""A step with many layers, from the records of two steps with few.

The longer of the two has a layer more of each kind. Its record must be that of the shorter one
with something inserted, and what is inserted must be what stands before it, because the layer
before did the same. Each further layer then inserts it once more. The size of a single event may
differ as well, such as that of a list of norms; it grows along a line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gridformer.config import ModelConfig, RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import link_names, stages_of, with_stages
from gridformer.record.events import Held, Kernel, Place
from gridformer.record.step import StepRecord

_WORTH = 4  # two short steps take less time than one if so many layers are left out

Ids = NDArray[np.int64]


class NotPeriodicError(Exception):
    """A step with one layer more does not repeat what the last layer did."""


# --------------------------------------------------------------------------- models with few layers


class Fewer(NamedTuple):
    """How many layers of each stage are left out: some that are recomputed, and others."""

    recomputed: int
    others: int


def removable(run: RunConfig, decisions: Decisions, kept: int, worth: int | None = None) -> Fewer:
    """Returns how many layers of each stage may be left out; 0 if the whole model is to be run.

    Without a pipeline, this is the number for each stack of layers. The shortest stage of the
    shorter model keeps `kept` layers of both kinds, or all. If less than `worth` layers could be
    left out, all are run. With `train.recompute_layers: 0` there are no recomputed ones.
    """
    worth = _WORTH if worth is None else worth
    model = run.model
    if run.layout.pp == 1:
        least = min([model.n_layers, *([model.n_decoder_layers] if model.two_stacks else [])])
        least -= model.dense_layers  # which are unlike the others, and come first
    else:
        stages = stages_of(model, run.layout.n_stages, decisions.choices.work)
        least = min(
            _longest(model, stage)[1] - sum(1 <= i <= model.dense_layers for i in stage)
            for stage in stages
        )
    # A stage with an encoder and a decoder may have fewer recomputed layers of one of them.
    first = min(least, run.train.recompute_layers)
    recomputed = 0 if model.two_stacks and run.layout.pp > 1 else max(0, first - kept)
    fewer = Fewer(recomputed, max(0, least - first - kept))
    return fewer if sum(fewer) >= worth else Fewer(0, 0)


@contextmanager
def without_layers(
    run: RunConfig, decisions: Decisions, fewer: Fewer
) -> Iterator[tuple[RunConfig, list[str]]]:
    """Yields the run with fewer layers in each stage, whose stages are cut so inside the context.

    It also yields the links of the last layers, which are like those that are left out. A stage
    with layers of an encoder and of a decoder loses some of those that it has more of.
    """
    model, layout, n = run.model, run.layout, sum(fewer)
    if not n:
        yield run, []
        return
    first = {"recompute_layers": run.train.recompute_layers - fewer.recomputed}
    run = run.model_copy(update={"train": run.train.model_copy(update=first)})
    if layout.pp == 1:
        changes = {"n_layers": model.n_layers - n}
        if model.two_stacks:
            changes["n_decoder_layers"] = model.n_decoder_layers - n
        shorter = run.model_copy(update={"model": model.model_copy(update=changes)})
        each = (name for name in link_names(shorter.model) if name[-1].isdigit())
        yield shorter, [*{name.rstrip("0123456789"): name for name in each}.values()]
        return
    stages = stages_of(model, layout.n_stages, decisions.choices.work)
    stacks = [_longest(model, stage)[0] for stage in stages]
    decoders = sum(stack.startswith("decoder") for stack in stacks)
    changes = {"n_layers": model.n_layers - n * (len(stacks) - decoders)}
    if decoders:
        changes["n_decoder_layers"] = model.n_decoder_layers - n * decoders
    shorter = run.model_copy(update={"model": model.model_copy(update=changes)})
    ends = [0, *itertools.accumulate(len(stage) - n for stage in stages)]
    stages = tuple(range(a, b) for a, b in itertools.pairwise(ends))
    names = link_names(shorter.model)
    last = [
        [names[i] for i in stage if names[i].startswith(stack)][-1]
        for stack, stage in zip(stacks, stages)
    ]
    with with_stages(shorter.model, stages):
        yield shorter, last


def _longest(model: ModelConfig, stage: Sequence[int]) -> tuple[str, int]:
    """Returns the stack of which a stage has the most layers, such as `decoder.layers.`, and them.

    The last one is taken of two with as many.
    """
    names = link_names(model)
    stacks = [names[i].rstrip("0123456789") for i in stage if names[i][-1].isdigit()]
    counts = [(stack, len([*same])) for stack, same in itertools.groupby(stacks)]
    return max(reversed(counts), key=lambda one: one[1], default=("", 0))


# --------------------------------------------------------------------------- steps with more layers


def with_layers(shorter: StepRecord, longer: StepRecord, more: int) -> StepRecord:
    """Returns the record of a step with more layers.

    Args:
        shorter: That of a step with few layers.
        longer: That with a layer more in each stage.
        more: How many layers each stage has besides those of the longer one.

    Raises:
        NotPeriodicError: It does not follow from these two.
    """
    if [part.kind for part in shorter.parts] != [part.kind for part in longer.parts]:
        raise NotPeriodicError("the parts of the step depend on the number of layers")
    numbers = _Numbers()
    between = {kind: n + more * (n - shorter.between[kind]) for kind, n in longer.between.items()}
    return replace(
        longer,
        parts=[
            part._replace(events=tuple(_extended(before.events, part.events, more, numbers)))
            for before, part in zip(shorter.parts, longer.parts)
        ],
        between=between,
        host=longer.host + more * (longer.host - shorter.host),
        saved=longer.saved + more * (longer.saved - shorter.saved),
        composed=True,
    )


def _extended(
    shorter: tuple[Any, ...], longer: tuple[Any, ...], more: int, numbers: _Numbers
) -> list[Any]:
    """Returns the events of a part of a step with more layers; see `with_layers`."""
    places = _insertions(
        *(numbers.of(shorter), numbers.of(longer)),
        lambda i, j: _may_grow(shorter[i], longer[j]),
    )
    if places is None:
        raise NotPeriodicError("a step with more layers does not repeat what the last one did")
    events: list[Any] = []
    begin = behind = 0
    for at, inserted in places:
        events += longer[begin:at]
        if inserted:  # each further layer inserts it once more
            events += longer[at : at + inserted] * (1 + more)
            begin, behind = at + inserted, behind + inserted
        else:
            events.append(_grown(shorter[at - behind], longer[at], more))
            begin = at + 1
    return [*events, *longer[begin:]]


def _insertions(
    shorter: Ids, longer: Ids, may_grow: Callable[[int, int], bool]
) -> list[tuple[int, int]] | None:
    """Finds what a layer inserts into a record.

    Args:
        shorter: The numbers of the events with fewer layers, which are equal for equal events.
        longer: Those with a layer more.
        may_grow: Whether an event of the longer one is that of the shorter one, but for its size.

    Returns:
        Places in the longer record, in order, and how many events are inserted there, which are
        those that stand before the place; 0 where a single event has another size. None if the
        longer record is not the shorter one with insertions.
    """
    failed: set[tuple[int, int]] = set()

    def search(i: int, j: int) -> list[tuple[int, int]] | None:
        """Compares from the places i and j on."""
        same = min(len(shorter) - i, len(longer) - j)
        differ = np.flatnonzero(shorter[i : i + same] != longer[j : j + same])
        step = int(differ[0]) if len(differ) else same
        i, j = i + step, j + step
        excess = (len(longer) - j) - (len(shorter) - i)
        if i == len(shorter) and not excess:
            return []
        if excess < 0 or (i, j) in failed:
            return None
        for n in range(min(excess, j), 0, -1):
            if longer[j - 1] != longer[j + n - 1] or longer[j - n] != longer[j]:
                continue
            if np.array_equal(longer[j - n : j], longer[j : j + n]):
                rest = search(i, j + n)
                if rest is not None:
                    return [(j, n), *rest]
        if i < len(shorter) and j < len(longer) and may_grow(i, j):
            rest = search(i + 1, j + 1)
            if rest is not None:
                return [(j, 0), *rest]
        failed.add((i, j))
        return None

    return search(0, 0)


def _may_grow(shorter: Any, longer: Any) -> bool:
    """Whether an event is that of the shorter step with the sizes of a layer more.

    A layer adds at most half to a size if there were two layers before.
    """
    if isinstance(longer, int) and not isinstance(longer, bool):
        return 0 <= 2 * (longer - shorter) * (1 if longer > 0 else -1) <= abs(shorter)
    if isinstance(longer, Place):
        return longer.backward == shorter.backward and longer.function == shorter.function
    if isinstance(longer, tuple):
        return (
            type(shorter) is type(longer)
            and len(shorter) == len(longer)
            and all(map(_may_grow, shorter, longer))
        )
    return shorter == longer


def _grown(shorter: Any, longer: Any, more: int) -> Any:
    """Returns an event whose sizes grow with each layer."""
    if shorter == longer or isinstance(longer, str | Place):
        return longer
    if isinstance(longer, int):
        return longer + more * (longer - shorter)
    values = [_grown(a, b, more) for a, b in zip(shorter, longer)]
    return longer._make(values) if hasattr(longer, "_make") else tuple(values)


class _Numbers:
    """Numbers of events, which are equal for those that do the same in different layers."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._names: dict[str, str] = {}
        self._kernels: dict[int, tuple[int, Kernel]] = {}  # one object stands for many kernels

    def of(self, events: Sequence[Any]) -> Ids:
        """Returns the numbers of events."""
        return np.array([self._number(event) for event in events], dtype=np.int64)

    def _number(self, event: Any) -> int:
        if (known := self._kernels.get(id(event))) is not None:
            return known[0]
        key = (type(event), *(self._plain(x) for x in event))
        if isinstance(event, Held):
            key = key[:-1]  # it says what runs, with the number of the layer
        number = self._numbers.setdefault(key, len(self._numbers))
        if isinstance(event, Kernel):
            self._kernels[id(event)] = number, event
        return number

    def _plain(self, x: Any) -> Hashable:
        """Returns a place without the number of its layer and its line."""
        if not isinstance(x, Place):
            return x
        if x.module not in self._names:
            self._names[x.module] = "".join(c for c in x.module if not c.isdigit())
        return self._names[x.module], x.backward
