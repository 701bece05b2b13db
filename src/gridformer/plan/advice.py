"""Says where the time of a layout goes, what limits it, and which single change would help most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig
from gridformer.plan.changes import arrangement, single_changes
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Search
from gridformer.utils.units import format_setting

WORTH = 0.01  # gains below this fraction of a step are not worth a change
UNSURE = 0.05  # gains by estimate below this are as small as the errors of estimates
SHOWN = 0.005  # fractions of a step below this are not put into sentences
LEAST_S = 1e-6  # what takes less than a microsecond of a step is rounding

# What travels over an axis, in words.
TRAVELS = {
    "col": "activations, along the rows of the grid",
    "row": "weights, down the columns of the grid",
    "branch": "activations, between the sub-grids",
    "dp": "gradients and parameters, between replicas",
    "pp": "activations, between pipeline stages",
}
_LIMITS = {
    "products": "matrix products: the devices multiply most of the time",
    "attention": "attention: the fused products of queries, keys and values",
    "memory-bound": "kernels bound by memory bandwidth, such as norms, residuals and the loss",
    "launches": "the host: devices wait for kernels to be launched, so their work is too small",
    "update": "the update of parameters",
    "bubble": "the pipeline: stages wait for each other",
    "other": "work that no other kind covers",
}


@dataclass(frozen=True)
class Change:
    """A change of one setting, and what it would do.

    Attributes:
        settings: The changed values by dotted key.
        gain: The fraction of the time per sequence that it saves.
        peak_gib: The memory of the fullest device with it.
        fits: Whether that fits.
        run: The changed run.
        traced: Whether the changed layout was traced, too; otherwise it is estimated.
    """

    settings: Mapping[str, Any]
    gain: float
    peak_gib: float
    fits: bool
    run: RunConfig
    traced: bool = False

    @property
    def words(self) -> str:
        """The settings as they are written on a command line."""
        return " ".join(format_setting(key, value) for key, value in self.settings.items())


@dataclass(frozen=True)
class Advice:
    """Why a layout takes as long as it does.

    Attributes:
        shares: Fraction of the step by kind: kernels by kind, exposed messages by axis, waiting.
        hidden: Fraction of the step in which messages travel while the device computes, by axis.
        limit: What limits it, a sentence.
        best: The change that would help most; None if none is worth it.
        too_large: A faster change that does not fit; None if there is none.
    """

    shares: dict[str, float]
    hidden: dict[str, float]
    limit: str
    best: Change | None
    too_large: Change | None

    @property
    def sentences(self) -> list[str]:
        """All of it in sentences."""
        found = [f"Time goes to {_listed(self.shares)}."]
        if hidden := _listed(self.hidden):
            found.append(f"Hidden behind computation, and not part of this: {hidden}.")
        found.append(self.limit)
        if self.best:
            how = "in its own trace" if self.best.traced else "by estimate"
            found.append(
                f"The change that would help most is {self.best.words}: about "
                f"{self.best.gain:.0%} less time per sequence {how}, with "
                f"{self.best.peak_gib:.1f} GiB."
            )
        else:
            found.append(
                f"No single change of a setting saves {WORTH:.0%} in its own trace, or "
                f"{UNSURE:.0%} by estimate."
            )
        if self.too_large:
            found.append(
                f"{self.too_large.words} would save {self.too_large.gain:.0%}, but needs about "
                f"{self.too_large.peak_gib:.1f} GiB."
            )
        return found


def advise(search: Search, found: Found, traced: Sequence[Found] = ()) -> Advice:
    """Returns the advice for a layout that was traced.

    Args:
        search: The search that found it, which estimates its neighbors.
        found: The layout.
        traced: All layouts that were traced. A change into one of them is judged by its trace,
            since estimates are less right.
    """
    assert found.prediction is not None, "only traced layouts are listed"
    shares = shares_of(found.prediction)
    hidden = {
        f"messages over {axis}": seconds / found.prediction.step_s
        for axis, seconds in found.prediction.parts.hidden.items()
        if seconds >= LEAST_S
    }
    best: Change | None = None
    too_large: Change | None = None
    for settings, other in single_changes(found.run):
        change = _judged(settings, found, search.estimated(other), traced)
        if change.gain < (WORTH if change.traced else UNSURE):
            continue
        if change.fits and (best is None or change.gain > best.gain):
            best = change
        if not change.fits and (too_large is None or change.gain > too_large.gain):
            too_large = change
    if too_large and best and too_large.gain <= best.gain:
        too_large = None
    return Advice(shares, hidden, limit_of(found.prediction), best, too_large)


def _judged(
    settings: Mapping[str, Any], found: Found, other: Found, traced: Sequence[Found]
) -> Change:
    """Compares two layouts by their traces, or by an estimate if one was not traced.

    An estimate is corrected by the trace of another layout with the same arrangement of devices,
    if there is one.
    """
    assert found.prediction is not None, "only traced layouts are listed"
    batches = found.run.train.global_batch / other.run.train.global_batch
    for one in traced:
        if (one.run.layout, one.run.train) == (other.run.layout, other.run.train):
            gib, fits = _memory(one)
            gain = 1 - batches * one.step_s / found.prediction.step_s
            return Change(settings, gain, gib, fits, other.run, traced=True)
    here = arrangement(other.run.layout)
    like = next((one for one in (found, *traced) if arrangement(one.run.layout) == here), None)
    ours, theirs, gib = found.estimate.step_s, other.estimate.step_s, other.estimate.peak_gib
    if like is not None:
        ours = found.prediction.step_s
        theirs *= like.step_s / like.estimate.step_s
        gib *= _memory(like)[0] / like.estimate.peak_gib
    fits = gib <= other.estimate.limit_gib
    return Change(settings, 1 - batches * theirs / ours, gib, fits, other.run)


def _memory(traced: Found) -> tuple[float, bool]:
    assert traced.prediction is not None, "only what was traced is compared"
    assert traced.prediction.peak_gib is not None, "predict estimates memory, too"
    return traced.prediction.peak_gib, bool(traced.prediction.fits)


def shares_of(prediction: Prediction) -> dict[str, float]:
    """Returns the fractions of a step by kind; see `seconds_of`."""
    whole = prediction.step_s
    return {kind: seconds / whole for kind, seconds in seconds_of(prediction).items()}


def seconds_of(prediction: Prediction) -> dict[str, float]:
    """Returns the seconds of a step by kind; `other` is what no kind explains."""
    parts = prediction.parts
    seconds = {
        "products": parts.products,
        "attention": parts.attention,
        "memory-bound": parts.memory_bound,
        "update": parts.update,
        **{f"messages over {axis}": s for axis, s in parts.exposed.items()},
        "launches": parts.launches,
        "bubble": parts.bubble,
    }
    found = {kind: s for kind, s in seconds.items() if s >= LEAST_S}
    rest = prediction.step_s - sum(found.values())
    if rest > 0.005 * prediction.step_s:
        found["other"] = rest
    return found


def _listed(shares: Mapping[str, float]) -> str:
    """Returns the larger ones of some fractions in words, the largest first."""
    return ", ".join(
        f"{kind} {share:.0%}"
        for kind, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= SHOWN
    )


def limit_of(prediction: Prediction) -> str:
    """Returns a sentence on what takes most of the time."""
    seconds = seconds_of(prediction)
    kind = max(seconds, key=lambda name: seconds[name])
    axis = kind.removeprefix("messages over ")
    if axis != kind:
        travels = TRAVELS.get(axis, "sums over all devices")
        text = f"messages over {axis} ({travels}), which no computation hides"
    else:
        text = _LIMITS[kind]
    return f"What limits it most is {text}."
