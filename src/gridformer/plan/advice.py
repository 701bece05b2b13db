"""Says where the time of a layout goes, what limits it, and which single change would help most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import LayoutAxis
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import Found, Search
from gridformer.plan.settings import changed, neighbors
from gridformer.utils.units import format_setting

WORTH = 0.01  # gains below this fraction of a step are not worth a change
AXES: tuple[LayoutAxis, ...] = ("rows", "cols", "branches")

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
        traced: Whether the changed layout was traced, too; otherwise it is estimated.
    """

    settings: Mapping[str, Any]
    gain: float
    peak_gib: float
    fits: bool
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
        limit: What limits it, a sentence.
        best: The change that would help most; None if none is worth it.
        too_large: A faster change that does not fit; None if there is none.
    """

    shares: dict[str, float]
    limit: str
    best: Change | None
    too_large: Change | None

    @property
    def sentences(self) -> list[str]:
        """All of it in sentences."""
        where = ", ".join(
            f"{kind} {share:.0%}"
            for kind, share in sorted(self.shares.items(), key=lambda item: -item[1])
            if share >= 0.005
        )
        found = [f"Time goes to {where}.", self.limit]
        if self.best:
            how = "in its own trace" if self.best.traced else "by estimate"
            found.append(
                f"The change that would help most is {self.best.words}: about "
                f"{self.best.gain:.0%} less time per sequence {how}, with "
                f"{self.best.peak_gib:.1f} GiB."
            )
        else:
            found.append("No single change of a setting is estimated to help.")
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
    best: Change | None = None
    too_large: Change | None = None
    known = [(one.run.layout, one.run.train, one.prediction) for one in traced]
    for settings, other in _changes(found.run):
        there = next((p for *run, p in known if run == [other.layout, other.train]), None)
        change = _judged(settings, found, search.estimated(other), there)
        if change.gain < WORTH:
            continue
        if change.fits and (best is None or change.gain > best.gain):
            best = change
        if not change.fits and (too_large is None or change.gain > too_large.gain):
            too_large = change
    if too_large and best and too_large.gain <= best.gain:
        too_large = None
    return Advice(shares, _limit(shares), best, too_large)


def _judged(
    settings: Mapping[str, Any], found: Found, other: Found, traced: Prediction | None
) -> Change:
    """Compares two layouts by their traces, or by their estimates if one was not traced."""
    batches = found.run.train.global_batch / other.run.train.global_batch
    if traced is not None and found.prediction is not None:
        assert traced.peak_gib is not None, "predict estimates memory, too"
        gain = 1 - batches * traced.step_s / found.prediction.step_s
        return Change(settings, gain, traced.peak_gib, bool(traced.fits), traced=True)
    gain = 1 - batches * other.estimate.step_s / found.estimate.step_s
    return Change(settings, gain, other.estimate.peak_gib, other.estimate.fits)


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
    found = {kind: s for kind, s in seconds.items() if s > 0}
    rest = prediction.step_s - sum(found.values())
    if rest > 0.005 * prediction.step_s:
        found["other"] = rest
    return found


def _limit(shares: Mapping[str, float]) -> str:
    kind = max(shares, key=lambda name: shares[name])
    axis = kind.removeprefix("messages over ")
    if axis != kind:
        travels = TRAVELS.get(axis, "sums over all devices")
        text = f"messages over {axis} ({travels}), which no computation hides"
    else:
        text = _LIMITS[kind]
    return f"What limits it most is {text}."


def _changes(run: RunConfig) -> Iterator[tuple[Mapping[str, Any], RunConfig]]:
    """Yields single changes: settings, a larger batch, and devices moved between two axes."""
    yield from neighbors(run)
    batch = run.train.global_batch * 2
    for settings in (
        {"train.global_batch": batch},
        {"train.global_batch": batch, "layout.micro_batches": run.layout.micro_batches * 2},
    ):
        other = changed(run, settings)
        if other is not None:
            yield settings, other
    axes = (*spec_of(run.layout).axes, "dp", "pp")
    for more in axes:
        for less in axes:
            size = getattr(run.layout, less)
            if more == less or size % 2:
                continue
            moved = {
                f"layout.{more}": getattr(run.layout, more) * 2,
                f"layout.{less}": size // 2,
            }
            if moved.get("layout.dp") == 1 and run.layout.dp_mode != "replicate":
                moved |= {"layout.dp_mode": "replicate", "layout.reshard": "layer"}
            if moved.get("layout.pp") == 1:
                moved["layout.stages_per_rank"] = 1
            other = changed(run, moved)
            if other is not None:
                yield moved, other
