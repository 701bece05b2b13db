"""Dropout whose masks do not depend on the layout, and the counters that kernels read them from.

A mask is a function of the seed, the step, the name of its site in the model, and global indices.
All but the indices is in a site's counter, a tensor on the model's device, so that compiled code
and kernels stay the same from step to step. The counters of all sites are made together and copied
once per micro-batch. They are new tensors each time: kernels that were launched earlier may still
read the old ones, and a pipeline runs backward through several micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gridformer.models.blocks.sequence import SequenceRows
from gridformer.models.kernels import library
from gridformer.models.kernels.library import LIBRARY, define
from gridformer.utils import rng
from gridformer.utils.tensors import loop

# int64 numbers of a counter: the low and the high half of the key, the index of the first sample,
# and a zero, since Triton compiles kernels again for addresses that are not multiples of 16 bytes.
COUNTER_SIZE = 4


@dataclass
class DropoutRng:
    """Tells all sites of a model which step and which samples their masks are for.

    Attributes:
        first_sample: The index of this rank's first sequence within the step's global batch.
        n_samples: The number of sequences in this rank's micro-batch.
        sites: The model's sites and the `sample_block` of each, whose counters are made together.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    n_samples: int = 0
    sites: Mapping[str, int] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _moment: tuple[object, ...] = ()
    _keys: NDArray[np.uint32] = field(default_factory=lambda: rng.keys((), ()), repr=False)
    _counters: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def at(self, rows: slice) -> None:
        """Sets the rows of the step's global batch that the model runs next."""
        self.first_sample, self.n_samples = rows.start, rows.stop - rows.start
        if self.sites:
            self._of_now()

    def counter(self, site: str, sample_block: int, device: torch.device) -> Tensor:
        """Returns a site's counter for the step and the rows that are set, int64 [COUNTER_SIZE]."""
        self.device = device
        counters = self._of_now()
        counter = counters.get(site)
        if counter is None:  # of a module outside of a model
            keys = rng.keys((self.seed, self.step), [site])
            counters.update(self._made({site: sample_block}, keys))
            counter = counters[site]
        return counter

    def _of_now(self) -> dict[str, Tensor]:
        """Returns the counters of all sites. Those of a step are kept until the next one begins."""
        moment = self.seed, self.step, self.device, self.sites
        if moment != self._moment:
            self._moment, self._counters = moment, {}
            self._keys = rng.keys((self.seed, self.step), self.sites)
        rows = self.first_sample, self.n_samples
        counters = self._counters.get(rows)
        if counters is None:
            counters = self._counters[rows] = self._made(self.sites, self._keys)
        return counters

    def _made(self, sites: Mapping[str, int], keys: NDArray[np.uint32]) -> dict[str, Tensor]:
        """Makes the counters of sites with these halves of keys, without waiting for a GPU."""
        if not sites:
            return {}
        numbers = np.zeros((len(sites), COUNTER_SIZE), np.int64)
        blocks = np.array([*sites.values()], np.int64)
        numbers[:, :2] = keys
        numbers[:, 2] = self.first_sample - blocks * self.n_samples
        on_host = torch.from_numpy(numbers)
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()
        return dict(zip(sites, on_host.to(self.device, non_blocking=True).unbind()))


class DropoutSite(nn.Module):
    """The base class of modules that have dropout masks of their own.

    Attributes:
        sample_block: Index of this device's micro-batch among those that the module gets, if it
            gets the micro-batches of several devices.
        fused: Whether a GPU computes masks in kernels of `gridformer.models.kernels`.
        held: The counter that compiled code reads, see `hold`.
    """

    def __init__(self, p: float, site: str, dropout_rng: DropoutRng) -> None:
        super().__init__()
        self.site, self.p, self.dropout_rng = site, p, dropout_rng
        self.sample_block = 0
        self.fused = True
        self.held: Tensor | None = None

    def hold(self) -> None:
        """Makes the counter that compiled code reads next, because compiled code cannot make it."""
        counter = self.dropout_rng.counter(self.site, self.sample_block, self.dropout_rng.device)
        self.__dict__["held"] = counter  # faster than nn.Module's __setattr__

    def counter(self, device: torch.device) -> Tensor:
        """Returns the counter of the step and the rows that are set; see `DropoutRng`."""
        if self.held is not None and torch.compiler.is_compiling():
            return self.held
        return self.dropout_rng.counter(self.site, self.sample_block, device)


class Dropout(DropoutSite):
    """Dropout whose mask is a function of (seed, step, site, global element index).

    The input is [b, s, h] or a block of it: `sequence` says which tokens this device has, and
    `block` is the index of its block of columns. With `fused` a GPU computes mask and product in
    one kernel.
    """

    sequence = SequenceRows()
    block = 0

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSH
        _, s, h = x_BSH.shape
        tokens, column = self.sequence.runs(s), self.block * h
        fused = self.fused and library.available(x_BSH.device, x_BSH.dtype)
        counter = self.counter(x_BSH.device)
        out: Tensor = _Masked.apply(x_BSH, counter, *tokens, column, self.p, fused)
        return out


class _Masked(torch.autograd.Function):
    """Multiplies x by a mask, which backward generates again, so that nothing is saved.

    A block that ends in dropout therefore does not need the output of its last product in backward,
    and recomputation can stop before it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        counter: Tensor,
        token: int,
        split: int,
        skipped: int,
        column: int,
        p: float,
        fused: bool,
    ) -> Tensor:
        # Recomputation would run until the counter is saved; a compiled block is run as a whole.
        ctx.counter = None if torch.compiler.is_compiling() else counter
        if torch.compiler.is_compiling():
            ctx.save_for_backward(counter)
        ctx.rest = token, split, skipped, column, p, fused
        return _masked(x_BSH, counter, *ctx.rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (counter,) = ctx.saved_tensors or (ctx.counter,)
        return _masked(grads[0], counter, *ctx.rest), *[None] * 7


def _masked(x: Tensor, counter: Tensor, *where: Any) -> Tensor:
    *indices_and_p, fused = where
    if not fused and not torch.compiler.is_compiling():
        return drop_elements(x, counter, *indices_and_p)
    ops = torch.ops.gridformer
    out: Tensor = (ops.masked if fused else ops.masked_unfused)(x, counter, *indices_and_p)
    return out


def drop_elements(
    x_BSH: Tensor, counter: Tensor, token: int, split: int, skipped: int, column: int, p: float
) -> Tensor:
    """Zeroes elements of x with probability p and multiplies the others by 1 / (1 - p).

    `token`, `split` and `skipped` are those of `SequenceRows.runs`, `column` is the first column.
    """
    b, s, h = x_BSH.shape
    low, high, first_sample, _ = counter.unbind()
    # Runs on some rows at a time: the random integers take several times the memory of x.
    samples = (indices(0, b, x_BSH) + first_sample).view(b, 1)
    places = indices(token, s, x_BSH)
    if skipped:
        places = places + (places >= token + split) * skipped
    rows = rng.hash_indices(samples, places).view(-1)
    columns = indices(column, h, x_BSH)
    flat = x_BSH.reshape(-1, h)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    n_rows = max(1, _CHUNK_ELEMENTS[x_BSH.is_cuda] // h)
    for some in loop([slice(i, i + n_rows) for i in range(0, len(flat), n_rows)]):
        torch.mul(flat[some], rng.keep((low, high), rows[some], columns, p), out=out[some])
    return out.mul_(1.0 / (1.0 - p)).view_as(x_BSH)


# Elements per chunk, by whether the tensor is on a GPU: there each chunk costs kernel launches.
_CHUNK_ELEMENTS = {False: 1 << 18, True: 1 << 24}


def keep_scores(
    counter: Tensor, shape: tuple[int, int, int, int], first: tuple[int, int, int], p: float
) -> Tensor:
    """Returns which attention probabilities dropout keeps, bool [b, n, s, S].

    `first` holds the global indices of the first head, query and key.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.gridformer.keep_scores(counter, shape, first, p)
        return out
    return _keep_scores(counter, shape, first, p)


def _keep_scores(counter: Tensor, shape: Sequence[int], first: Sequence[int], p: float) -> Tensor:
    b, n, s, seen = shape
    first_head, first_query, first_key = first
    low, high, first_sample, _ = counter.unbind()
    samples = (indices(0, b, counter) + first_sample).view(b, 1, 1)
    heads = indices(first_head, n, counter).view(n, 1)
    rows = rng.hash_indices(samples, heads, indices(first_query, s, counter))
    return rng.keep((low, high), rows, indices(first_key, seen, counter), p)


def indices(start: int, n: int, like: Tensor) -> Tensor:
    """Returns the n integers from `start` on, on the device of `like`."""
    return torch.arange(start, start + n, device=like.device)


# A GPU's kernel `masked` computes the bits of `drop_elements`, the mask in registers. Compiled code
# calls the two functions as operators, which the compiler does not trace: it then gives the same
# bits as uncompiled code, and does not keep 64-bit random integers for the backward pass.
_WHERE = "int token, int split, int skipped, int column, float p"
define(f"masked(Tensor x, Tensor counter, {_WHERE}) -> Tensor")
define(f"masked_unfused(Tensor x, Tensor counter, {_WHERE}) -> Tensor")
define("keep_scores(Tensor counter, int[] shape, int[] first, float p) -> Tensor")
torch.library.impl(LIBRARY, "masked_unfused", "CompositeExplicitAutograd")(drop_elements)
torch.library.impl(LIBRARY, "keep_scores", "CompositeExplicitAutograd")(_keep_scores)


@torch.library.impl(LIBRARY, "masked", "CUDA")
def _(x: Tensor, counter: Tensor, *where: Any) -> Tensor:
    from gridformer.models.kernels import masking

    with torch.cuda.device(x.device):
        return masking.launch_masking(x, counter, *where)


@torch.library.register_fake("gridformer::masked", lib=LIBRARY)
@torch.library.register_fake("gridformer::masked_unfused", lib=LIBRARY)
def _(x: Tensor, counter: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("gridformer::keep_scores", lib=LIBRARY)
def _(counter: Tensor, shape: Sequence[int], first: Sequence[int], p: float) -> Tensor:
    return counter.new_empty(shape, dtype=torch.bool)
