"""Traces some layouts of each kind that a search has estimated, as long as there is time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from gridformer.config import RunConfig
from gridformer.plan.advice import advise
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Kind, Predict, Search, kind_of
from gridformer.record.fast_fake import fast_fakes
from gridformer.utils.fork_pool import as_far_as, can_copy, processor_s
from gridformer.utils.hardware import n_cores

OF_EACH = 5  # layouts of each kind are traced, if as many fit
MOST = 30  # layouts that fit are traced in all, unless more are to be listed
SPARE = 2  # for each of these, at most this many are traced
FIRST = 0.9  # of the time of a plan is for them, and the rest for what is advised for the best
TRIES = 4  # changes that are advised for one layout are traced at most


class Queue:
    """Layouts that wait for their traces.

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
        self.waiting = [*found]
        self._factors: dict[Kind, float] = {}
        self.passed_over: list[Found] = []
        self._smaller: list[RunConfig] = []  # which stood in for others

    def next(self, traced: Counter[str]) -> Found | None:
        """Removes the layout that is to be traced next and returns it; None if none may fit.

        Kinds take turns until OF_EACH of them are traced. The fastest by estimate comes first.
        """
        while self.waiting:
            one = min(self.waiting, key=lambda one: (min(traced[one.kind], OF_EACH), one.step_s))
            self.waiting.remove(one)
            factor = self._factors.get(kind_of(one), 1.0 if self._factors else 0.0)
            if factor * one.estimate.peak_gib <= one.estimate.limit_gib:
                return one
            self.passed_over.append(one)
            self._put_smaller(one, factor)
        return None

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
        self.waiting += self.passed_over
        self.passed_over.clear()

    def _put_smaller(self, one: Found, factor: float) -> None:
        smaller = self.search.smaller(one, factor)
        if smaller is not None and smaller.run not in self._smaller:
            self._smaller.append(smaller.run)
            self.waiting.append(smaller)


class Tracing:
    """Traces layouts of a search in copies of this process.

    Args:
        asked: The search.
        top: How many layouts to list.
        predictor: Traces a run; tests replace it.
        tell: Is told what happens.

    Attributes:
        began: When it began, as `processor_s` tells it.
        result: What has been found so far.
        traced: All layouts that were traced.
    """

    def __init__(
        self,
        asked: Search,
        top: int,
        predictor: Predict = predict,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.began = processor_s()
        self.asked, self.top, self.predictor, self.tell = asked, top, predictor, tell
        self.traced: list[Found] = []
        tell("estimating layouts")
        found, self.result = asked.ranked(copies=True)
        self.result.top = top
        self.result.n_estimates = asked.n_estimates
        self._queue = Queue(asked, found)
        self._at_once = 1
        if predictor is predict and can_copy():
            self._at_once = 6 * n_cores()  # so that few cores wait for the last ones
            fast_fakes()  # loads what all copies of this process need

    def run(self, limit_s: float, also: Sequence[RunConfig] = ()) -> None:
        """Traces layouts, and what is advised for the fastest of them.

        Args:
            limit_s: How much of the processor's time it may take, with the estimates.
            also: Layouts that are traced in any case.
        """
        ends = self.began + limit_s
        chosen = [self.asked.estimated(run) for run in also]
        given = [
            Found(one.run, one.estimate, prediction, asked=True)
            for one, prediction in zip(chosen, self._predicted(chosen, inf))
        ]
        self.traced += given
        self.until(self.began + FIRST * limit_s)
        if self.result.layouts:
            self._trace_advice(ends)
        result = self.result
        for one in given:
            some = result.layouts if one.prediction and one.prediction.fits else result.refused
            some[:] = [*(other for other in some if other.run != one.run), one]
        result.layouts.sort(key=lambda one: one.step_s)

    def until(self, ends: float) -> None:
        """Traces layouts; may be called again with more time.

        Args:
            ends: When time is over if a layout has been found, as `processor_s` tells it.
        """
        result, queue = self.result, self._queue
        while len(self.traced) < SPARE * max(MOST, self.top):
            left_s, n = ends - processor_s(), self._at_once
            if left_s <= 0:
                if result.layouts:
                    break
                left_s, n = inf, 1
            if not (some := self._next(n)):
                if result.layouts or not queue.passed_over:
                    break
                queue.give_another_chance()
                continue
            self.tell(f"tracing {some[0].name}: {len(self.traced)} are traced")
            for one, prediction in zip(some, self._predicted(some, left_s)):
                if prediction is None:  # there was no time for it
                    queue.waiting.append(one)
                else:
                    self._add(one, prediction)
        result.untraced = self._next(MOST)
        queue.waiting += result.untraced
        result.passed_over = queue.passed_over
        result.n_estimates = self.asked.n_estimates
        result.seconds = processor_s() - self.began

    def _next(self, n: int) -> list[Found]:
        """Takes what is to be traced next out of the queue, at most n layouts.

        That are OF_EACH of each kind, what is listed, and what may be faster than the fastest.
        """
        result, found = self.result, list[Found]()
        kinds = Counter(one.kind for one in result.layouts)
        while len(found) < n and (one := self._queue.next(kinds)):
            traces = kinds.total()
            wanted = kinds[one.kind] < OF_EACH or traces < self.top
            wanted |= one.step_s < min((other.step_s for other in result.layouts), default=0.0)
            if traces >= max(MOST, self.top) or not wanted:
                self._queue.waiting.append(one)
                break
            if not self._has(one):
                found.append(one)
                kinds[one.kind] += 1
        return found

    def _has(self, one: Found) -> bool:
        """Returns whether a layout was traced, or one with its name that fits."""
        names = [other.name for other in self.result.layouts]
        return one.name in names or one.run in [other.run for other in self.result.refused]

    def _predicted(self, some: Sequence[Found], left_s: float) -> Sequence[Prediction | None]:
        work = [partial(self.predictor, one.run, self.asked.cluster) for one in some]
        if self._at_once > 1:
            return as_far_as(work, left_s)
        return [one() for one in work]

    def _add(self, one: Found, prediction: Prediction) -> None:
        """Adds a traced layout to those that fit, of each name the fastest, or to the others."""
        found = Found(one.run, one.estimate, prediction)
        self.traced.append(found)
        assert prediction.peak_gib is not None, "predict estimates memory, too"
        if one.run.train.global_batch != self.asked.run.train.global_batch:
            return
        if not prediction.fits:
            self.result.refused.append(found)
            self._queue.refuse(one, prediction.peak_gib / one.estimate.peak_gib)
            return
        of_name = {other.name: other for other in self.result.layouts}
        if found.step_s < of_name.setdefault(found.name, found).step_s:
            of_name[found.name] = found
        self.result.layouts[:] = sorted(of_name.values(), key=lambda one: one.step_s)

    def _trace_advice(self, ends: float) -> None:
        """Traces changes that are advised for the best, until nothing is advised."""
        for _ in range(TRIES):
            change = advise(self.asked, self.result.layouts[0], self.traced).best
            left_s = ends - processor_s()
            if change is None or change.traced or left_s <= 0:
                break
            found = self.asked.estimated(change.run)
            [prediction] = self._predicted([found], left_s)
            if prediction is None:  # there was no time for it
                break
            self._add(found, prediction)
