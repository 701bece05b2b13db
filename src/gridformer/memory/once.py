"""The repeated parts of a step that an estimate runs only once, if its result stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from gridformer.config import RunConfig
from gridformer.memory.blocks_once import blocks_once
from gridformer.memory.breakdown import Once
from gridformer.memory.fewer_chunks import fewer_chunks
from gridformer.memory.fills_once import fills_once
from gridformer.memory.passes_once import passes_once
from gridformer.memory.products_once import products_once
from gridformer.memory.tracker import MemoryTracker
from gridformer.models import Model
from gridformer.models.blocks import JoinedParts
from gridformer.parallel.auto.decisions import Decisions
from gridformer.train.forward_backward import Pipeline
from gridformer.train.step import Stepper


def ways_of(run: RunConfig, decisions: Decisions) -> list[Once]:
    """Returns ways to repeat parts of a step in the log, the fastest first.

    A way that does not fit a run raises NotRepeatableError. Then the next one is to be tried, and
    at last the complete step.

    Args:
        run: The run.
        decisions: The result of `decide_run(run)`.
    """
    layout = run.layout
    if layout.pp == 1:
        return [within_passes]
    last_runs = run.train.update == "in_backward"  # layers are updated in its backward pass
    by_second = partial(_repeated, by_first=False, last_runs=last_runs)
    # The first micro-batch gathers weights that are kept, and under FSDP it finds some gathered.
    keeps = any(choice.keep_weight for choice in decisions.choices.products.values())
    if layout.dp_mode == "fsdp" or (keeps and layout.rows > 1):
        return [by_second, within_passes]
    return [partial(_repeated, by_first=True, last_runs=last_runs), by_second, within_passes]


@contextmanager
def within_passes(stepper: Stepper, tracker: MemoryTracker) -> Iterator[None]:
    """Runs all passes, but what one pass repeats only once."""
    with blocks_once(), fewer_chunks(), products_once(tracker):
        yield


def _joins_weights(model: Model) -> bool:
    """Whether a model joins weights for its products in each pass.

    Torch frees parts of the gradient of joined weights before or after it calls hooks of
    parameters, depending on whether it adds or copies them. So a micro-batch that has hooks does
    not do what the first one does.
    """
    parameters = any(isinstance(module, JoinedParts) for module in model.modules())
    return parameters and model.compute_dtype in (torch.float32, torch.float64)


@contextmanager
def _repeated(
    stepper: Stepper, tracker: MemoryTracker, by_first: bool, last_runs: bool
) -> Iterator[None]:
    assert isinstance(stepper.passes, Pipeline)
    executor, n = stepper.passes.executor, stepper.micro_batches
    last_runs = last_runs or (by_first and _joins_weights(stepper.model))
    with (
        within_passes(stepper, tracker),
        fills_once(executor.stage_io, tracker),
        passes_once(executor, tracker, n, by_first, last_runs),
    ):
        yield
