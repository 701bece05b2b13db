"""The seed, step and rows on which dropout masks depend, as tensors that kernels read.

A mask is a function of the seed, the step, the name of its site in the model, and global indices.
All but the indices is in a site's stamp, a tensor on the model's device. Compiled code and kernels
read it there, so that another step, micro-batch or layer changes nothing but the values of a
tensor. Stamps of all sites are made together and copied to the device once per micro-batch. They
are new tensors each time: kernels that were launched earlier may still read the old ones, and a
pipeline runs backward through several micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gridformer.utils import rng

# int64 numbers of a stamp: the low and the high half of the key, the index of the first sample, and
# a zero, since Triton compiles kernels again for addresses that are not multiples of 16 bytes.
STAMP_SIZE = 4


@dataclass
class DropoutClock:
    """Tells all sites of a model which step and which samples their masks are for.

    Attributes:
        seed: The seed of the run.
        step: The optimizer step.
        first_sample: The index of this rank's first sequence within the step's global batch.
        n_samples: The number of sequences in this rank's micro-batch.
        sites: The model's sites and the `sample_block` of each, whose stamps are made together.
        device: Where stamps are.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    n_samples: int = 0
    sites: Mapping[str, int] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _moment: tuple[object, ...] = ()
    _keys: NDArray[np.uint32] = field(default_factory=lambda: rng.keys((), ()), repr=False)
    _stamps: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def at(self, rows: slice) -> None:
        """Sets the rows of the step's global batch that the model runs next."""
        self.first_sample, self.n_samples = rows.start, rows.stop - rows.start
        if self.sites:
            self._of_now()

    def stamp(self, site: str, sample_block: int, device: torch.device) -> Tensor:
        """Returns a site's stamp for the step and the rows that are set, int64 [STAMP_SIZE].

        Args:
            site: The name of the site.
            sample_block: See `Site`.
            device: Where the stamp is wanted.
        """
        self.device = device
        stamps = self._of_now()
        found = stamps.get(site)
        if found is None:  # of a module outside of a model
            keys = rng.keys((self.seed, self.step), [site])
            stamps.update(self._made({site: sample_block}, keys))
            found = stamps[site]
        return found

    def _of_now(self) -> dict[str, Tensor]:
        """Returns the stamps of all sites. Those of a step are kept until the next one begins."""
        moment = self.seed, self.step, self.device, self.sites
        if moment != self._moment:
            self._moment, self._stamps = moment, {}
            self._keys = rng.keys((self.seed, self.step), self.sites)
        rows = self.first_sample, self.n_samples
        found = self._stamps.get(rows)
        if found is None:
            found = self._stamps[rows] = self._made(self.sites, self._keys)
        return found

    def _made(self, sites: Mapping[str, int], keys: NDArray[np.uint32]) -> dict[str, Tensor]:
        """Makes the stamps of sites with these halves of keys. The host does not wait for a GPU."""
        if not sites:
            return {}
        numbers = np.zeros((len(sites), STAMP_SIZE), np.int64)
        blocks = np.array([*sites.values()], np.int64)
        numbers[:, :2] = keys
        numbers[:, 2] = self.first_sample - blocks * self.n_samples
        on_host = torch.from_numpy(numbers)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()
        return dict(zip(sites, on_host.to(self.device, non_blocking=True).unbind()))


class Site(nn.Module):
    """The base class of modules that have dropout masks of their own.

    Args:
        p: The probability of dropping an element.
        site: The name of the module in dropout masks.
        clock: The step and rows on which the masks depend.

    Attributes:
        sample_block: Index of this device's micro-batch among those that the module gets, if it
            gets the micro-batches of several devices.
        fused: Whether a GPU computes masks in kernels of `gridformer.models.kernels`.
        held: The stamp that compiled code reads, see `hold`.
    """

    def __init__(self, p: float, site: str, clock: DropoutClock) -> None:
        super().__init__()
        self.site, self.p, self.clock = site, p, clock
        self.sample_block = 0
        self.fused = True
        self.held: Tensor | None = None

    def hold(self) -> None:
        """Makes the stamp that compiled code reads next, because compiled code cannot make it."""
        stamp = self.clock.stamp(self.site, self.sample_block, self.clock.device)
        object.__setattr__(self, "held", stamp)  # faster than nn.Module's __setattr__

    def stamp(self, device: torch.device) -> Tensor:
        """Returns the stamp of the step and the rows that are set; see `DropoutClock`."""
        if self.held is not None and torch.compiler.is_compiling():
            return self.held
        return self.clock.stamp(self.site, self.sample_block, device)
