"""What would fit where no layout does: more devices, fewer layers, other settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridformer.config import RunConfig
from gridformer.plan.search import Found, Search
from gridformer.plan.settings import changed
from gridformer.utils.units import format_setting

MOST_DOUBLINGS = 7  # of the number of devices


def remedies(search: Search, smallest: Found | None) -> list[str]:
    """Returns sentences that say what would fit, by estimate.

    Args:
        search: The search that found nothing.
        smallest: The layout with the least memory; None if no layout is valid at all.
    """
    run, n = search.run, search.n_devices
    found = []
    if smallest is None:
        batch = run.train.global_batch
        found.append(
            f"No layout of {n} devices divides this model and a global batch of {batch}: "
            "`gridformer layouts` lists the reasons."
        )
    else:
        estimate = smallest.estimate
        found.append(
            f"The smallest layout, {smallest.name}, needs about {estimate.peak_gib:.1f} GiB of the "
            f"{estimate.limit_gib:.1f} GiB that a device has for tensors."
        )
        for settings in _savings(smallest.run):
            other = changed(smallest.run, settings)
            if other is not None and (saved := search.estimated(other)).estimate.fits:
                words = " ".join(format_setting(*item) for item in settings.items())
                found.append(f"{words} would fit: about {saved.estimate.peak_gib:.1f} GiB.")
                break
        if layers := _most_layers(search, smallest):
            found.append(
                f"With {layers} of its {run.model.n_layers} layers the model would fit on these "
                "devices."
            )
    more = _devices(search)
    if more:
        found.append(f"On {more.run.layout.n_processes} devices {more.name} would fit.")
    return found


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


def _most_layers(search: Search, smallest: Found) -> int:
    """Returns the most layers with which the smallest layout fits, or 0."""

    def fits(n_layers: int) -> bool:
        model = smallest.run.model
        sizes = {"n_layers": n_layers}
        if model.two_stacks:
            sizes["n_decoder_layers"] = n_layers
        run = smallest.run.model_copy(update={"model": model.model_copy(update=sizes)})
        if run.layout.n_stages > run.model.n_links:
            return False
        return search.estimated(run).estimate.fits

    low, high = 0, smallest.run.model.n_layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _devices(search: Search) -> Found | None:
    """Returns a layout that fits on the fewest devices of twice, four times, ... the number."""
    n = search.n_devices
    for _ in range(MOST_DOUBLINGS):
        n *= 2
        if n > search.cluster.size:
            return None
        batch = search.run.train.global_batch
        run = search.run
        if batch % n:  # one sequence a device at least, so that every arrangement is possible
            train = run.train.model_copy(update={"global_batch": -(-batch // n) * n})
            run = run.model_copy(update={"train": train})
        larger = Search(run, search.cluster, n)
        for arrangement in larger.arrangements():
            found = larger.first(arrangement)
            if found.estimate.fits:
                return found
    return None
