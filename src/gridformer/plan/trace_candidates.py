"""Traces some layouts of each kind that a search has estimated, as long as there is time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from gridformer.cluster.file import Cluster
from gridformer.config import RunConfig
from gridformer.plan.advice import advise
from gridformer.plan.predict import predict
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import MemoryKind, PlannedLayout, Search
from gridformer.record.fake import fast_fakes
from gridformer.utils.process import as_far_as, can_copy, n_cores, processor_s

OF_EACH = 5  # layouts of each kind are traced, if as many fit and may be listed
SURE = 2  # of each kind are traced in any case
UNSURE = 0.95  # of a prediction that follows from a kind's estimates may be the truth
MOST = 30  # layouts that fit are traced in all, unless more are to be listed
SPARE = 2  # for each of these, at most this many are traced
FIRST = 0.9  # of the time of a plan is for them, and the rest for what is advised for the best
TRIES = 4  # changes that are advised for one layout are traced at most

Predict = Callable[[RunConfig, Cluster], Prediction]


class Queue:
    """Layouts that wait for their traces.

    When a trace has shown that a layout needs more than its estimate, the estimates of similar
    layouts are assumed to be wrong by the same factor, and those of all others not to be too high.
    A layout that then does not fit is replaced by neighbors that do. So few layouts are traced in
    vain even for long sequences, for which estimates are least accurate.
    """

    def __init__(
        self, search: Search, waiting: Sequence[PlannedLayout], of_each: int = OF_EACH
    ) -> None:
        self.search, self.waiting, self.of_each = search, [*waiting], of_each
        self.passed_over: list[PlannedLayout] = []
        self._factors: dict[MemoryKind, float] = {}
        self._smaller: list[RunConfig] = []  # which stood in for others

    def next(
        self, traced: Counter[str], wanted: Callable[[PlannedLayout], bool] = lambda one: True
    ) -> PlannedLayout | None:
        """Removes the layout that is to be traced next and returns it; None if none may fit.

        Of those that are wanted, kinds take turns until some of each are traced, and of those with
        less than `of_each` the fastest by estimate comes first.
        """

        def turn(one: PlannedLayout) -> tuple[int, bool, float]:
            n = traced[one.kind]
            return min(n, SURE), n >= self.of_each, one.step_s

        while some := [*filter(wanted, self.waiting)]:
            one = min(some, key=turn)
            self.waiting.remove(one)
            factor = self._factors.get(one.memory_kind, 1.0 if self._factors else 0.0)
            if factor * one.estimate.peak_gib <= one.estimate.limit_gib:
                return one
            self.passed_over.append(one)
            self._put_smaller(one, factor)
        return None

    def refuse(self, one: PlannedLayout, factor: float) -> None:
        """Replaces a layout that needs `factor` times its estimate by a smaller neighbor."""
        self._factors[one.memory_kind] = max(factor, self._factors.get(one.memory_kind, 0.0))
        self._put_smaller(one, factor)

    def give_another_chance(self) -> None:
        """Puts back what was passed over, because nothing else fits."""
        self._factors.clear()
        self.waiting += self.passed_over
        self.passed_over.clear()

    def _put_smaller(self, one: PlannedLayout, factor: float) -> None:
        smaller = self.search.smaller(one, factor)
        if smaller is not None and smaller.run not in self._smaller:
            self._smaller.append(smaller.run)
            self.waiting.append(smaller)


class Tracing:
    """Traces layouts of a search in copies of this process.

    Args:
        search: The search.
        top: How many layouts to list.
        predictor: Traces a run; tests replace it.
        tell: Is told what happens.
        of_each: How many of each kind are traced, if as many fit.
    """

    def __init__(
        self,
        search: Search,
        top: int,
        predictor: Predict = predict,
        tell: Callable[[str], None] = lambda text: None,
        of_each: int = OF_EACH,
    ) -> None:
        self.began = processor_s()  # at which time of the processor
        self.search, self.top, self.predictor, self.tell = search, top, predictor, tell
        self.traced: list[PlannedLayout] = []
        tell("estimating layouts")
        ranked, self.result = search.ranked(copies=True)
        self.result.top = top
        self.queue = Queue(search, ranked, of_each)
        self._at_once = 1
        if predictor is predict and can_copy():
            self._at_once = 4 * n_cores()  # so that few cores wait for the last ones
            fast_fakes()  # loads what all copies of this process need

    def run(self, limit_s: float, also: Sequence[RunConfig] = ()) -> None:
        """Traces layouts, some in any case, and what is advised for the fastest of them.

        With the estimates it may take `limit_s` of the processor's time.
        """
        result, ends = self.result, self.began + limit_s
        chosen = [self.search.estimated(run) for run in also]
        given = [
            PlannedLayout(one.run, one.estimate, prediction, asked=True)
            for one, prediction in zip(chosen, self._predicted(chosen, inf))
        ]
        self.traced += given
        self.until(self.began + FIRST * limit_s)
        if result.layouts:
            self._trace_advice(ends)
        for one in given:
            some = result.layouts if one.traced.fits else result.refused
            some[:] = [*(other for other in some if other.run != one.run), one]
        result.layouts.sort(key=lambda one: one.step_s)

    def until(self, ends: float) -> None:
        """Traces layouts until a time of `processor_s`; may be called again with more time.

        It goes on until a layout has been found that fits.
        """
        result, queue = self.result, self.queue
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
        result.n_estimates = self.search.n_estimates
        result.seconds = processor_s() - self.began

    def _next(self, n: int) -> list[PlannedLayout]:
        """Takes what is to be traced next out of the queue, at most n layouts.

        These are two of each kind, more of those that may be listed by what traces of their kind
        have shown, and what may be faster than the fastest.
        """
        layouts, chosen = self.result.layouts, list[PlannedLayout]()
        kinds = Counter(one.kind for one in layouts)
        keys = {one.key for one in layouts}
        refused = [one.run for one in self.result.refused]
        fastest_s = layouts[0].step_s if layouts else 0.0
        listed_s = layouts[self.top - 1].step_s if len(layouts) >= self.top else inf
        factors = defaultdict[str, float](lambda: inf)  # between traces and estimates
        for own in layouts:
            factors[own.kind] = min(factors[own.kind], UNSURE * own.step_s / own.estimate.step_s)

        def wanted(one: PlannedLayout) -> bool:
            few = kinds[one.kind] < self.queue.of_each or kinds.total() < self.top
            few &= kinds[one.kind] < SURE or factors[one.kind] * one.step_s <= listed_s
            return few or one.step_s < fastest_s

        while len(chosen) < n and kinds.total() < max(MOST, self.top):
            if (one := self.queue.next(kinds, wanted)) is None:
                break
            if one.key not in keys and one.run not in refused:
                chosen.append(one)
                kinds[one.kind] += 1
        return chosen

    def _predicted(
        self, some: Sequence[PlannedLayout], left_s: float
    ) -> Sequence[Prediction | None]:
        work = [partial(self.predictor, one.run, self.search.cluster) for one in some]
        if self._at_once == 1:
            return [one() for one in work]
        # Ranks with many stages take longest: they begin first, so that no core waits for them.
        order = sorted(range(len(some)), key=lambda i: -some[i].run.layout.stages_per_rank)
        done = as_far_as([work[i] for i in order], left_s)
        return [done[order.index(i)] for i in range(len(some))]

    def _add(self, one: PlannedLayout, prediction: Prediction) -> None:
        """Adds a traced layout to those that fit, of each key the fastest, or to the others."""
        traced = PlannedLayout(one.run, one.estimate, prediction)
        self.traced.append(traced)
        if one.run.train.global_batch != self.search.run.train.global_batch:
            return
        if not prediction.fits:
            self.result.refused.append(traced)
            self.queue.refuse(one, traced.peak_gib / one.estimate.peak_gib)
            return
        of_key = {other.key: other for other in self.result.layouts}
        if traced.step_s < of_key.setdefault(traced.key, traced).step_s:
            of_key[traced.key] = traced
        self.result.layouts[:] = sorted(of_key.values(), key=lambda one: one.step_s)

    def _trace_advice(self, ends: float) -> None:
        """Traces changes that are advised for the best, until nothing is advised."""
        for _ in range(TRIES):
            change = advise(self.search, self.result.layouts[0], self.traced).best
            left_s = ends - processor_s()
            if change is None or change.traced or left_s <= 0:
                break
            one = self.search.estimated(change.run)
            [prediction] = self._predicted([one], left_s)
            if prediction is None:  # there was no time for it
                break
            self._add(one, prediction)
