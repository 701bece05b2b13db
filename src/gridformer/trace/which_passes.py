"""Which passes of a pipeline a trace runs, and of which ones it repeats the others.

Most micro-batches do in a stage what the second one does: in the first one weights are cast or
gathered that stay. Several stages of a rank with equal layers do the same, too. And the last
micro-batch does what the second one does, but the hooks of its parameters begin sums of gradients;
unless layers are updated in the backward pass. A single micro-batch is the first and the last one:
its pass is recorded with and without these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.schedules import Action
from gridformer.parallel.pipeline.stage_params import parameters_under

_REPEATED = ("forward", ""), ("backward", "first"), ("backward", "")
_SINGLE = (("backward", "alone"),)


class PassKind(NamedTuple):
    """The properties of a pass that decide what it does.

    Attributes:
        kind: `forward` or `backward`.
        stage: The number of its stage among those of this rank.
        which: `first` micro-batch, `last` if it completes gradients, else empty. `alone` is what
            the last one does without the sums of gradients that it begins, where it is the first.
    """

    kind: str
    stage: int
    which: str


@dataclass
class WhichPasses:
    """Which passes of a rank are run.

    Attributes:
        kinds: The kind of each action.
        run: The kinds that are run once.
        parameters: The parameters of each stage of the rank, in order, if some follow from others.
        like: The kinds that do what another kind does, and that one.
        completing: The stages whose last backward pass does what an earlier one does, and begins
            sums of gradients.
        contents: The content of each stage of the rank, equal for stages that do the same; empty if
            no stage follows from another.
        known: The stages whose passes are known beforehand.
        repeated: The passes that do the same in all stages with equal layers: their direction and
            `PassKind.which`.
        single: Whether there is one micro-batch.
    """

    kinds: dict[Action, PassKind]
    run: set[PassKind]
    parameters: list[list[nn.Parameter]] = field(default_factory=list)
    like: dict[PassKind, PassKind] = field(default_factory=dict)
    completing: set[int] = field(default_factory=set)
    contents: list[Hashable] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    repeated: tuple[tuple[str, str], ...] = _REPEATED
    single: bool = False

    @staticmethod
    def of(
        executor: Executor,
        few: bool,
        known: Callable[[int, Hashable], bool] | None = None,
        training: bool = True,
    ) -> WhichPasses:
        """Returns the passes that are run.

        Args:
            executor: Runs the passes.
            few: Whether stages with equal layers and last micro-batches may follow from others.
            known: Returns for the number of a stage among those of this rank, and its content,
                whether its passes are known beforehand.
            training: Whether there are backward passes; otherwise no stage follows from another.
        """
        pp, layout = executor.pp, executor.layout
        itinerary, complete = executor.itinerary(layout.micro_batches, training)
        kinds: dict[Action, PassKind] = {}
        for action in itinerary.actions:
            last = action._replace(kind="backward") in complete
            which = "last" if last else "first" if action.micro == 0 else ""
            kinds[action] = PassKind(action.kind, action.stage // pp.size, which)
        found = WhichPasses(kinds, set(kinds.values()))
        # Where layers are updated in the backward pass, stages and micro-batches do other things.
        if few and training and executor.sums.around_last is nullcontext:
            stages = range(pp.index, layout.n_stages, pp.size)
            found.parameters = [_parameters(executor, stage) for stage in stages]
            if layout.micro_batches == 1:
                found.single, found.repeated = True, _SINGLE
                found.completing = {kind.stage for kind in found.run}
            else:
                found._complete()
            later: set[nn.Parameter] = set()
            for stage, parameters in reversed([*zip(stages, found.parameters)]):
                found.contents.insert(0, _content(executor, stage, parameters, later))
                later |= {*parameters}
            if known is not None:
                found.known = {
                    stage for stage in found.completing if known(stage, found.contents[stage])
                }
            if layout.dp_mode != "fsdp":  # which gathers the first layer of all before its pass
                found.repeated += (("forward", "last" if found.single else "first"),)
            found._share()
        return found

    def _complete(self) -> None:
        """Lets last micro-batches follow from earlier ones, if these come first in each way."""
        order = [*self.kinds.values()]
        for stage in {kind.stage for kind in order}:
            numbers = {
                (kind, which): order.index(one)
                for kind in ("forward", "backward")
                for which in ("first", "", "last")
                if (one := PassKind(kind, stage, which)) in self.run
            }
            if len(numbers) == 6 and all(
                numbers[kind, "first"] < numbers[kind, ""] < numbers[kind, "last"]
                for kind in ("forward", "backward")
            ):
                self.completing.add(stage)
                for kind in ("forward", "backward"):
                    last = PassKind(kind, stage, "last")
                    self.like[last] = last._replace(which="")
                    self.run.remove(last)

    def _share(self) -> None:
        """Lets stages with equal layers follow from one of them, or from what is known of them.

        Forward passes come to the first of them first, and backward passes to the last. So the
        first one runs forward, and the last one both ways.
        """
        alike: dict[Hashable, list[int]] = {}
        for stage, content in enumerate(self.contents):
            if stage in self.known:
                for kind, which in self.repeated:
                    self._leave_out(PassKind(kind, stage, which))
            elif stage in self.completing:
                alike.setdefault(content, []).append(stage)
        for first, *others in alike.values():
            if not others:
                continue
            last = others[-1]
            for kind, which in self.repeated:
                forward = kind == "forward"
                for stage in others[:-1] if forward else (first, *others[:-1]):
                    self._follows(PassKind(kind, stage, which), first if forward else last)

    def _follows(self, kind: PassKind, stage: int) -> None:
        self._leave_out(kind)
        self.like[kind] = kind._replace(stage=stage)

    def _leave_out(self, kind: PassKind) -> None:
        """Notes that a pass is not run."""
        if kind.which == "alone":
            last = kind._replace(which="last")
            self.like[last] = kind
            kind = last
        self.run.remove(kind)

    def source(self, kind: PassKind) -> PassKind:
        """Returns the kind that is run, of which a kind does the same."""
        while kind in self.like:
            kind = self.like[kind]
        return kind

    def actions(self) -> set[Action]:
        """Returns the passes that are run: those of each kind with the first micro-batch of it."""
        found: set[Action] = set()
        seen: set[PassKind] = set()
        for action in self.kinds:
            back = action._replace(kind="backward")
            mine = {self.kinds[one] for one in (action, back) if one in self.kinds} & self.run
            if action.kind == "forward" and not mine <= seen:
                found.add(action)
                if self.kinds.get(back) in mine:
                    found.add(back)
                seen |= mine
        return found


def _parameters(executor: Executor, stage: int) -> list[nn.Parameter]:
    """Returns the parameters of a stage, in the order of its links."""
    model, links = executor.model, executor.links
    found = [
        parameter
        for i in model.stages[stage]
        for path in links[i].modules
        for parameter in parameters_under(model, path)
    ]
    return [*dict.fromkeys(found)]


def _content(
    executor: Executor, stage: int, parameters: list[nn.Parameter], later: set[nn.Parameter]
) -> Hashable:
    """Returns what is equal for stages that do the same.

    Args:
        executor: Runs the passes.
        stage: The stage.
        parameters: Its parameters.
        later: Those of later stages of this rank, which run backward before. Where a parameter is
            among them, its gradient is there already.
    """
    names = tuple(executor.links[i].name.rstrip("0123456789") for i in executor.model.stages[stage])
    shapes = tuple((p.shape, p.stride(), p.dtype, p in later) for p in parameters)
    last = stage == executor.layout.n_stages - 1
    leaving = () if last else tuple(executor.stage_io.names(stage + 1))
    entering = tuple(executor.stage_io.names(stage)) if stage else ()
    return names, shapes, entering, leaving, last
