"""Says what limits a layout, which change would help most, and what would fit if none does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.config import RunConfig
from gridformer.plan.prediction import Prediction
from gridformer.plan.search import PlannedLayout, Search
from gridformer.plan.settings import Settings, arrangement, changed, single_changes
from gridformer.utils.units import counted, format_setting

WORTH = 0.01  # gains below this fraction of a step are not worth a change
UNSURE = 0.05  # gains by estimate below this are as small as the errors of estimates
SHOWN = 0.005  # fractions of a step below this are not put into sentences
MOST_DOUBLINGS = 7  # of the number of devices, where nothing fits

# What travels over an axis, in words.
TRAVELS = {
    "col": "activations, along the rows of the grid",
    "row": "weights, down the columns of the grid",
    "branch": "activations, between the sub-grids",
    "dp": "gradients and parameters, between replicas",
    "dp_shard": "gradients and parameters, between replicas that share them",
    "dp_replicate": "gradients, between groups of replicas",
    "experts": "tokens, to their experts and back",
    "experts_replicate": "gradients, between groups of replicas that have the same experts",
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

    settings: Settings
    gain: float
    peak_gib: float
    fits: bool
    run: RunConfig
    traced: bool = False

    @property
    def words(self) -> str:
        """The settings as they are written on a command line."""
        return in_words(self.settings)


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
        sentences = [f"Time goes to {_listed(self.shares)}."]
        if hidden := _listed(self.hidden):
            sentences.append(f"Hidden behind computation, and not part of this: {hidden}.")
        sentences.append(self.limit)
        if best := self.best:
            sentences.append(
                f"The change that would help most is {best.words}: about {best.gain:.0%} less time "
                f"per sequence {'in its own trace' if best.traced else 'by estimate'}, with "
                f"{best.peak_gib:.1f} GiB."
            )
        else:
            sentences.append(
                f"No single change that fits saves {WORTH:.0%} in its own trace, or "
                f"{UNSURE:.0%} by estimate."
            )
        if large := self.too_large:
            sentences.append(
                f"{large.words} would save {large.gain:.0%}, but needs about "
                f"{large.peak_gib:.1f} GiB."
            )
        return sentences


def in_words(settings: Settings) -> str:
    """Returns settings as overrides: `layout.rows=2 layout.cols=4`."""
    return " ".join(format_setting(key, value) for key, value in settings.items())


def advise(search: Search, asked: PlannedLayout, traced: Sequence[PlannedLayout] = ()) -> Advice:
    """Returns the advice for a layout that was traced, by estimates of its neighbors.

    A change into a layout that was `traced`, too, is judged by its trace.
    """
    prediction = asked.traced
    best: Change | None = None
    too_large: Change | None = None
    for settings, run in single_changes(asked.run):
        change = _judged(settings, asked, search.estimated(run), traced)
        if change.gain < (WORTH if change.traced else UNSURE):
            continue
        if change.fits and (best is None or change.gain > best.gain):
            best = change
        if not change.fits and (too_large is None or change.gain > too_large.gain):
            too_large = change
    if too_large and best and too_large.gain <= best.gain:
        too_large = None
    shares, hidden = (
        {kind: s / prediction.step_s for kind, s in seconds.items()}
        for seconds in (prediction.seconds_by_kind(), prediction.hidden_by_axis())
    )
    return Advice(shares, hidden, limit_of(prediction), best, too_large)


def _judged(
    settings: Settings, asked: PlannedLayout, other: PlannedLayout, traced: Sequence[PlannedLayout]
) -> Change:
    """Compares two layouts by their traces, or by an estimate if one was not traced.

    An estimate is corrected by the trace of another layout with the same arrangement of devices,
    if there is one.
    """
    batches = asked.run.train.global_batch / other.run.train.global_batch
    ours, theirs, gib = asked.estimate.step_s, other.estimate.step_s, other.estimate.peak_gib
    here = arrangement(other.run.layout)
    for one in traced:
        if (one.run.layout, one.run.train) == (other.run.layout, other.run.train):
            gain = 1 - batches * one.step_s / asked.step_s
            fits = bool(one.traced.fits)
            return Change(settings, gain, one.peak_gib, fits, other.run, traced=True)
    like = next((one for one in (asked, *traced) if arrangement(one.run.layout) == here), None)
    if like is not None:
        ours = asked.step_s
        theirs *= like.step_s / like.estimate.step_s
        gib *= like.peak_gib / like.estimate.peak_gib
    fits = gib <= other.estimate.limit_gib
    return Change(settings, 1 - batches * theirs / ours, gib, fits, other.run)


def _listed(shares: Mapping[str, float]) -> str:
    """Returns the larger ones of some fractions in words, the largest first."""
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {share:.0%}" for kind, share in largest if share >= SHOWN)


def limit_of(prediction: Prediction) -> str:
    """Returns a sentence on what takes most of the time."""
    seconds = prediction.seconds_by_kind()
    kind = max(seconds, key=lambda name: seconds[name])
    axis = kind.removeprefix("messages over ")
    if axis != kind:
        travels = TRAVELS.get(axis, "sums over all devices")
        return (
            f"What limits it most is messages over {axis} ({travels}), which no computation hides."
        )
    return f"What limits it most is {_LIMITS[kind]}."


# --------------------------------------------------------------------------- where nothing fits


def remedies(search: Search, smallest: PlannedLayout | None) -> list[str]:
    """Returns sentences that say what would fit, by estimate, where a search has found nothing.

    `smallest` is the layout with the least memory; None if no layout is valid at all.
    """
    run, n, sentences = search.run, search.n_devices, []
    if smallest is None:
        sentences.append(
            f"No layout of {counted(n, 'device')} divides this model and a global batch of "
            f"{run.train.global_batch}: `gridformer layouts` lists the reasons."
        )
    else:
        estimate = smallest.estimate
        sentences.append(
            f"The smallest layout, {smallest.name}, needs about {estimate.peak_gib:.1f} GiB of the "
            f"{estimate.limit_gib:.1f} GiB that a device has for tensors."
        )
        for settings in _savings(smallest.run):
            other = changed(smallest.run, settings)
            if other is not None and (saved := search.estimated(other)).estimate.fits:
                gib = f"{saved.estimate.peak_gib:.1f} GiB"
                sentences.append(f"{in_words(settings)} would fit: about {gib}.")
                break
        if layers := _most_layers(search, smallest):
            sentences.append(
                f"With {layers} of its {run.model.n_layers} layers the model would fit on these "
                "devices."
            )
    if more := _on_more_devices(search):
        sentences.append(f"On {more.run.layout.n_processes} devices {more.name} would fit.")
    return sentences


def _savings(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Yields settings that save memory and that the search does not change."""
    yield {"train.loss_chunk_tokens": 256}
    if run.train.dtype == "float32":
        yield {"train.dtype": "bfloat16"}
    yield {"train.offload": "optimizer", "train.device": "cuda"}
    batch = run.train.global_batch // 2
    while batch:
        yield {"train.global_batch": batch}
        batch //= 2


def _most_layers(search: Search, smallest: PlannedLayout) -> int:
    """Returns the most layers with which the smallest layout fits, or 0."""
    low, high = 0, smallest.run.model.n_layers
    while high - low > 1:
        middle, model = (low + high) // 2, smallest.run.model
        sizes = {"n_layers": middle} | ({"n_decoder_layers": middle} if model.two_stacks else {})
        run = smallest.run.model_copy(update={"model": model.model_copy(update=sizes)})
        fits = run.layout.n_stages <= run.model.n_links and search.estimated(run).estimate.fits
        low, high = (middle, high) if fits else (low, middle)
    return low


def _on_more_devices(search: Search) -> PlannedLayout | None:
    """Returns a layout that fits on the fewest devices of twice, four times, ... the number."""
    batch = search.run.train.global_batch
    for doublings in range(1, MOST_DOUBLINGS + 1):
        n = search.n_devices << doublings
        if n > search.cluster.size:
            return None
        # At least one sequence for each device, so that every arrangement is possible.
        train = search.run.train.model_copy(update={"global_batch": -(-batch // n) * n})
        larger = Search(search.run.model_copy(update={"train": train}), search.cluster, n)
        for one in map(larger.first, larger.arrangements()):
            if one.estimate.fits:
                return one
    return None
