"""Models with fewer layers, from whose steps that of the whole model follows.

Everything about a step but the order in which sums of gradients end is linear in the number of
layers once each stage has some. So a long model is run twice, with a few layers in its shortest
stage and with one layer more in each. Times are extended from these along a line
(gridformer.plan.predict), and the memory of a step by what the last layer has added to it
(gridformer.trace.segments).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gridformer.config import ModelConfig, RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import link_names, stages_of, with_stages

_WORTH = 4  # if no more layers than these could be left out, the whole model is run


def removable(run: RunConfig, decisions: Decisions, kept: int) -> int:
    """Returns how many layers of each stage may be left out; 0 if the whole model is to be run.

    Without a pipeline, this is the number for each stack of layers.

    Args:
        run: The run.
        decisions: The result of `decide_run`.
        kept: How many layers the shortest stage of the shorter model keeps.
    """
    model = run.model
    if run.layout.pp == 1:
        least = min([model.n_layers, *([model.n_decoder_layers] if model.two_stacks else [])])
    else:
        stages = stages_of(model, run.layout.n_stages, decisions.choices.work)
        least = min(_longest(model, stage)[1] for stage in stages)
    return least - kept if least >= kept + _WORTH else 0


@contextmanager
def without_layers(run: RunConfig, decisions: Decisions, n: int) -> Iterator[RunConfig]:
    """Yields the run with n layers fewer in each stage, whose stages are cut so inside the context.

    A stage with layers of an encoder and of a decoder loses some of those that it has more of.

    Args:
        run: The run.
        decisions: The result of `decide_run(run)`.
        n: At most what `removable` returns.
    """
    model, layout = run.model, run.layout
    if not n:
        yield run
        return
    if layout.pp == 1:
        changes = {"n_layers": model.n_layers - n}
        if model.two_stacks:
            changes["n_decoder_layers"] = model.n_decoder_layers - n
        yield run.model_copy(update={"model": model.model_copy(update=changes)})
        return
    stages = stages_of(model, layout.n_stages, decisions.choices.work)
    stacks = [_longest(model, stage)[0] for stage in stages]
    decoders = sum(stack.startswith("decoder") for stack in stacks)
    changes = {"n_layers": model.n_layers - n * (len(stacks) - decoders)}
    if decoders:
        changes["n_decoder_layers"] = model.n_decoder_layers - n * decoders
    shorter = run.model_copy(update={"model": model.model_copy(update=changes)})
    ends = [0, *itertools.accumulate(len(stage) - n for stage in stages)]
    with with_stages(shorter.model, [range(a, b) for a, b in itertools.pairwise(ends)]):
        yield shorter


def _longest(model: ModelConfig, stage: Sequence[int]) -> tuple[str, int]:
    """Returns the stack of which a stage has the most layers, such as `decoder.layers.`, and them.

    The last one is taken of two with as many.
    """
    names = link_names(model)
    stacks = [names[i].rstrip("0123456789") for i in stage if names[i][-1].isdigit()]
    counts = [(stack, len([*same])) for stack, same in itertools.groupby(stacks)]
    return max(reversed(counts), key=lambda one: one[1], default=("", 0))
