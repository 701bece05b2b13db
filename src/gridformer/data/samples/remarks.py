"""What a run says about its samples when it starts: what is left out, truncated and padded."""

from __future__ import annotations

from gridformer.data.samples.chat import ChatSamples
from gridformer.data.samples.examples import ChoiceExamples
from gridformer.data.samples.mixture import Mixture
from gridformer.data.samples.samples import Batches, Samples, SequentialBatches, ShuffledBatches
from gridformer.data.samples.translation import PairSamples


def remarks(batches: Batches) -> list[str]:
    """Returns sentences without a period about the samples of a run."""
    found = _sources(batches)
    samples = [one for one in _samples_of(batches) if isinstance(one, ChatSamples | PairSamples)]
    for kind, what in ((PairSamples, "pairs"), (ChatSamples, "conversations")):
        some = [one for one in samples if isinstance(one, kind)]
        if left_out := sum(one.n_left_out for one in some):
            why = "longer than that" if what == "pairs" else "no answer begins within that length"
            are = "they are " if what == "pairs" else ""
            found.append(f"{left_out:,} {what} are left out: {are}{why}")
        if truncated := sum(one.n_truncated for one in some if isinstance(one, ChatSamples)):
            found.append(f"{truncated:,} {what} are truncated: they are longer than that")
    if samples:
        held = sum(one.n_held for one in samples)
        positions = sum(one.n_samples * one.n_positions for one in samples)
        found.append(f"{1 - held / positions:.0%} of the positions are padding")
    return found


def alike(*read: Batches) -> list[str]:
    """Returns a warning about questions whose choices truncation makes equal, if there are any."""
    samples = [one for batches in read for one in _samples_of(batches)]
    questions = [one for one in samples if isinstance(one, ChoiceExamples)]
    if not (n := sum(one.n_alike for one in questions)):
        return []
    return [
        f"Warning: at least {n:,} of {sum(one.n_samples for one in questions):,} questions have "
        f"choices that are equal once truncated to data.seq_len={questions[0].reading.seq_len}, so "
        "that rounding decides which one is chosen: use a larger data.seq_len or shorter choices"
    ]


def _samples_of(batches: Batches) -> tuple[Samples, ...]:
    if isinstance(batches, ShuffledBatches):
        return batches.samples
    return (batches.samples,) if isinstance(batches, SequentialBatches) else ()


def _sources(batches: Batches) -> list[str]:
    """Returns the shares of the sources of a mixture, in each stage."""
    if not (isinstance(batches, ShuffledBatches) and isinstance(batches.order, Mixture)):
        return []
    order, start, found = batches.order, batches.start, []
    for number, stage in enumerate(order.stages):
        shares = [
            f"{weight / sum(stage.weights):.1%} {name}"
            + ("" if number else f" ({one.n_samples:,} samples)")
            for name, weight, one in zip(order.names, stage.weights, batches.samples)
        ]
        since = f"from step {start + stage.first_step + 1} on " if number else "a mixture of "
        found.append(since + ", ".join(shares))
    return found
