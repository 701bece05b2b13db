"""Traces the fastest layouts that a search has estimated, as long as there is time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan.changes import arrangement
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Kind, Predict, Result, Search, kind_of
from gridformer.trace.fast_fake import fast_fakes
from gridformer.utils.beside import as_far_as, can_copy
from gridformer.utils.hardware import n_cores

FEWEST = 2  # this many layouts are traced even if that takes longer than asked
SPARE = 3  # for each layout that is listed, at most this many are traced


class Queue:
    """Layouts that wait for their traces, the fastest by estimate first.

    When a trace has shown that a layout needs more than its estimate, the estimates of similar
    layouts are assumed to be wrong by the same factor, and those of all others not to be too high.
    A layout that then does not fit is replaced by neighbors that do. So few layouts are traced in
    vain even for long sequences, for which estimates are least accurate.

    Args:
        search: The search, which finds smaller neighbors.
        found: The layouts.

    Attributes:
        passed_over: See `Result`.
    """

    def __init__(self, search: Search, found: Sequence[Found]) -> None:
        self.search = search
        self._number = itertools.count()
        self._waiting: list[tuple[float, int, Found]] = []
        self._factors: dict[Kind, float] = {}
        self.passed_over: list[Found] = []
        self._smaller: list[RunConfig] = []  # which stood in for others
        for one in found:
            self.put(one)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, one: Found) -> None:
        """Adds a layout, which waits for its turn by its `step_s`."""
        heapq.heappush(self._waiting, (one.step_s, next(self._number), one))

    def next(self, n: int) -> list[Found]:
        """Removes the fastest layouts that may fit and returns them, at most n."""
        found: list[Found] = []
        while self._waiting and len(found) < n:
            one = heapq.heappop(self._waiting)[2]
            factor = self._factors.get(kind_of(one), 1.0 if self._factors else 0.0)
            if factor * one.estimate.peak_gib > one.estimate.limit_gib:
                self.passed_over.append(one)
                self._put_smaller(one, factor)
            else:
                found.append(one)
        return found

    def refuse(self, one: Found, factor: float) -> None:
        """Replaces a layout whose trace does not fit by a neighbor that may.

        Args:
            one: The layout.
            factor: How many times as large as its estimate its traced memory is.
        """
        kind = kind_of(one)
        self._factors[kind] = max(factor, self._factors.get(kind, 0.0))
        self._put_smaller(one, factor)

    def give_another_chance(self) -> None:
        """Puts back what was passed over, because nothing else fits."""
        self._factors.clear()
        for one in self.passed_over:
            self.put(one)
        self.passed_over.clear()

    def rest(self) -> list[Found]:
        """Returns what still waits, the fastest first."""
        return [one for _, _, one in sorted(self._waiting)]

    def _put_smaller(self, one: Found, factor: float) -> None:
        smaller = self.search.smaller(one, factor)
        if smaller is not None and smaller.run not in self._smaller:
            self._smaller.append(smaller.run)
            self.put(smaller)


class Tracing:
    """Traces layouts of a search, the fastest by estimate first, one on each core.

    Args:
        asked: The search.
        top: How many layouts to trace and list.
        predictor: Traces a run; tests replace it.
        tell: Is told what happens.

    Attributes:
        began: When it began, as `time.monotonic` tells it.
        result: What has been found so far.
    """

    def __init__(
        self,
        asked: Search,
        top: int,
        predictor: Predict = predict,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.began = time.monotonic()
        self.asked, self.top, self.predictor, self.tell = asked, top, predictor, tell
        tell("estimating layouts")
        found, self.result = asked.ranked(copies=True)
        self.result.n_estimates = asked.n_estimates
        self._queue = Queue(asked, found)
        self._last_s, self._traces = 0.0, 0
        self._at_once = 1
        if predictor is predict and can_copy():
            self._at_once = n_cores()
            fast_fakes()  # loads what all copies of this process need

    def until(self, ends: float) -> None:
        """Traces layouts; may be called again with more time.

        Args:
            ends: If a few layouts have been found, no trace is begun that would end later than
                this if it takes as long as the one before it. After this time one layout is
                enough, and traces on other cores are stopped. As `time.monotonic` tells it.
        """
        result, queue, top = self.result, self._queue, self.top
        while queue and len(result.layouts) < top and self._traces < top * SPARE:
            here = time.monotonic()
            fewest = min(top, FEWEST) if here <= ends else 1
            if len(result.layouts) >= fewest and here + self._last_s > ends:
                break
            some = self._next(min(self._at_once, top - len(result.layouts)))
            if some:
                names = " and ".join(one.name for one in some)
                self.tell(f"tracing {names}: {len(result.layouts) + 1} of {top}")
                predictions = self._predicted(some, ends - here)
                self._last_s = time.monotonic() - here
                for one, prediction in zip(some, predictions):
                    if prediction is None:  # there was no time for it
                        queue.put(one)
                    else:
                        self._add(one, prediction)
            if not queue and not result.layouts:
                queue.give_another_chance()
        result.layouts.sort(key=lambda one: one.step_s)
        result.passed_over = queue.passed_over
        waiting = [one for one in queue.rest() if not self._has(one)]
        result.untraced = waiting[: top - len(result.layouts)]
        result.n_estimates = self.asked.n_estimates
        result.seconds = time.monotonic() - self.began

    def _next(self, n: int) -> list[Found]:
        """Takes the fastest layouts out of the queue that were not found otherwise, at most n."""
        found: list[Found] = []
        while len(found) < n and (some := self._queue.next(n - len(found))):
            found += [one for one in some if not self._has(one)]
        return found

    def _has(self, one: Found) -> bool:
        """Returns whether a layout was traced, or one with its arrangement that fits.

        Layouts that advice has found may also wait here.
        """
        fits = [arrangement(other.run.layout) for other in self.result.layouts]
        refused = [other.run for other in self.result.refused]
        return arrangement(one.run.layout) in fits or one.run in refused

    def _predicted(self, some: Sequence[Found], left_s: float) -> Sequence[Prediction | None]:
        work = [partial(self.predictor, one.run, self.asked.cluster) for one in some]
        if self._at_once > 1:
            return as_far_as(work, left_s, 0 if self.result.layouts else 1)
        return [one() for one in work]

    def _add(self, one: Found, prediction: Prediction) -> None:
        """Adds a traced layout to those that fit or to those that do not."""
        self._traces += 1
        traced = Found(one.run, one.estimate, prediction)
        assert prediction.peak_gib is not None, "predict estimates memory, too"
        if prediction.fits:
            self.result.layouts.append(traced)
            return
        self.result.refused.append(traced)
        self._queue.refuse(one, prediction.peak_gib / one.estimate.peak_gib)


def search(
    run: RunConfig,
    cluster: Cluster,
    n_devices: int,
    top: int = 10,
    limit_s: float = float("inf"),
    predictor: Predict = predict,
    tell: Callable[[str], None] = lambda text: None,
    named: str = "",
) -> Result:
    """Returns the fastest layouts of a run on some devices of a cluster.

    Args:
        run: Model, data and training settings; see `Search`.
        cluster: The machine.
        n_devices: The number of devices.
        top: How many layouts to trace and list.
        limit_s: How many seconds it may take; see `Tracing.until`.
        predictor: Traces a run; tests replace it.
        tell: Is told what happens.
        named: The cluster as `layout.cluster` takes it; see `Search`.
    """
    tracing = Tracing(Search(run, cluster, n_devices, named=named), top, predictor, tell)
    tracing.until(tracing.began + limit_s)
    return tracing.result
