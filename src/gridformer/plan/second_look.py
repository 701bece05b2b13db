"""Traces the change that is advised for the best layout, which an estimate alone may get wrong."""

from __future__ import annotations

import time
from functools import partial

from gridformer.plan.advice import advise
from gridformer.plan.changes import arrangement
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Predict, Result, Search
from gridformer.plan.tracing import Tracing
from gridformer.utils.beside import as_far_as, can_copy

SEARCH = 0.8  # of the time of a plan is for the first layouts, and the rest for this
TRIES = 4  # changes that are traced at most


def trace_in_time(tracing: Tracing, limit_s: float) -> list[Found]:
    """Traces the fastest layouts and what is advised for the best of them.

    Args:
        tracing: The layouts; its `result` is changed.
        limit_s: How many seconds it may take, with the estimates.

    Returns:
        All layouts that were traced.
    """
    ends = tracing.began + limit_s
    tracing.until(tracing.began + SEARCH * limit_s)
    result, best, traced = tracing.result, None, list[Found]()
    while result.layouts and result.layouts[0] is not best:
        traced += traced_with_advice(tracing.asked, result, tracing.top, ends, tracing.predictor)
        best = result.layouts[0]
        tracing.until(ends)  # with the time that is left
    return traced


def traced_with_advice(
    search: Search, result: Result, top: int, ends: float, predictor: Predict = predict
) -> list[Found]:
    """Traces changes that are advised for the best layout, until one proves right or none is left.

    Layouts with the same batch join those that were found. If one of them is faster than the best,
    the advice for it is looked at next.

    Args:
        search: The search.
        result: What it has found, at least one layout.
        top: How many layouts are listed at most.
        ends: When there is no more time, as `time.monotonic` tells it.
        predictor: Traces a run; tests replace it.

    Returns:
        All layouts that were traced.
    """
    traced = [*result.layouts, *result.refused]
    usual_s = result.seconds / len(traced)
    for _ in range(TRIES):
        best = result.layouts[0]
        change = advise(search, best, traced).best
        left_s = ends - time.monotonic()
        if change is None or change.traced or left_s <= 0:
            break
        prediction: Prediction | None = None
        if predictor is predict and can_copy():
            [prediction] = as_far_as([partial(predict, change.run, search.cluster)], left_s)
        elif usual_s <= left_s:
            prediction = predictor(change.run, search.cluster)
        if prediction is None:  # there was no time for it
            break
        found = Found(change.run, search.estimated(change.run).estimate, prediction)
        traced.append(found)
        if found.run.train.global_batch == best.run.train.global_batch:
            _join(result, found, top)
    return traced


def _join(result: Result, found: Found, top: int) -> None:
    """Adds a layout to those that were found, which list the fastest of each arrangement."""
    assert found.prediction is not None, "it was traced"
    here = arrangement(found.run.layout)
    result.untraced = [one for one in result.untraced if one.run != found.run]
    if not found.prediction.fits:
        result.refused.append(found)
        return
    alike = [one for one in result.layouts if arrangement(one.run.layout) == here]
    fastest = min([*alike, found], key=lambda one: one.step_s)
    others = [one for one in result.layouts if one not in alike]
    result.layouts = sorted([*others, fastest], key=lambda one: one.step_s)[:top]
