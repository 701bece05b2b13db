"""Plain single-device building blocks: the reference that every parallel layout must equal.

Shapes are written as suffixes with the specification's symbols: b sequences, s tokens, h hidden
size, n heads, d head size, f feed-forward size, v vocabulary. A weight is [in, out], so that
`y = x W + b` reads as in the papers; see `gridformer.parallel` for how weights are cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer import rng

IGNORE = -100  # a target that does not count in the loss


@dataclass(frozen=True)
class Init:
    """How a parameter begins: every element `mean`, plus normal noise of `std`."""

    mean: float = 0.0
    std: float = 0.0


def new_parameter(*shape: int, init: Init) -> nn.Parameter:
    """An unfilled parameter that remembers its Init; `gridformer.parallel.initialise` fills it."""
    parameter = nn.Parameter(torch.empty(*shape))
    parameter.init = init  # type: ignore[attr-defined]
    return parameter


class Linear(nn.Module):
    """y = x W + b, W [in, out].

    `opens` tells where the product stands in its section (attention, feed-forward): the one that
    opens it (h to wider, cut by columns in 1-D schemes) or the one that closes it.
    """

    def __init__(self, n_in: int, n_out: int, opens: bool, std: float) -> None:
        super().__init__()
        self.opens = opens
        self.weight = new_parameter(n_in, n_out, init=Init(std=std))
        self.bias: nn.Parameter | None = new_parameter(n_out, init=Init())

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype).t(), bias)


class LayerNorm(nn.Module):
    """LayerNorm over h, statistics in at least float32.

    `opens` tells that nothing but the product that opens a section reads its result.
    """

    def __init__(self, h: int, eps: float, opens: bool = False) -> None:
        super().__init__()
        self.eps, self.opens = eps, opens
        self.weight = new_parameter(h, init=Init(mean=1.0))
        self.bias = new_parameter(h, init=Init())

    def forward(self, x_BSH: Tensor) -> Tensor:
        x = x_BSH.to(self.weight.dtype)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps).to(x_BSH.dtype)


class TokenEmbedding(nn.Module):
    """Rows of a [v, h] table, one a token. The table also serves the tied head."""

    def __init__(self, v: int, h: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(v, h, init=Init(std=std))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.embedding(tokens_BS, self.weight)


class PositionEmbedding(nn.Module):
    """The rows `start` to `start + s` of a [max_seq_len, h] table."""

    def __init__(self, max_seq_len: int, h: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(max_seq_len, h, init=Init(std=std))

    def forward(self, s: int, start: int = 0) -> Tensor:
        return self.weight[start : start + s]


class TiedHead(nn.Module):
    """Logits from the embedding's own table: x Tᵀ."""

    def forward(self, x_BSH: Tensor, table_VH: Tensor) -> Tensor:
        return F.linear(x_BSH, table_VH.to(x_BSH.dtype))


class CrossEntropy(nn.Module):
    """Sum (not mean) of the cross entropy over targets that are not IGNORE, in at least float32.

    Sums of parts add up to the whole's, so the trainer divides once by the global token count.
    """

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        logits = logits_BSV.flatten(0, -2)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits, targets_BS.flatten(), ignore_index=IGNORE, reduction="sum")


class Clock(Protocol):
    """What a dropout mask depends on besides its place."""

    @property
    def seed(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def first_sample(self) -> int: ...


@dataclass
class DropoutClock:
    """The Clock of a model, shared by all its dropouts.

    `first_sample` is the global number, within the step's batch, of this rank's first sequence, and
    `n_samples` counts those of its micro-batch.
    """

    seed: int = 0
    step: int = 0
    first_sample: int = 0
    n_samples: int = 0

    def at(self, rows: slice) -> None:
        """These rows of the step's batch come next."""
        self.first_sample, self.n_samples = rows.start, rows.stop - rows.start


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, site, global element index).

    Input [b, s, h], or a block of it: `block` says which block along s and along h is held here.
    """

    def __init__(self, p: float, site: str, clock: Clock) -> None:
        super().__init__()
        self.p, self.site, self.clock = p, site, clock
        self.block = (0, 0)

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSH
        b, s, h = x_BSH.shape
        samples = _range(self.clock.first_sample, b, x_BSH).view(b, 1)
        tokens = _range(self.block[0] * s, s, x_BSH)
        columns = _range(self.block[1] * h, h, x_BSH)
        key = rng.key(self.clock.seed, self.clock.step, self.site)
        keep = rng.keep(key, rng.join(samples, tokens), columns, self.p)
        return x_BSH * keep.to(x_BSH.dtype).mul_(1.0 / (1.0 - self.p))


class KVCache:
    """Keys and values of the tokens seen so far, for generation."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k_BNSD: Tensor, v_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is not None and self.v is not None:
            k_BNSD, v_BNSD = torch.cat((self.k, k_BNSD), 2), torch.cat((self.v, v_BNSD), 2)
        self.k, self.v = k_BNSD, v_BNSD
        return k_BNSD, v_BNSD


class Attention(nn.Module):
    """Causal multi-head self-attention.

    The columns of `qkv` are ordered [n, 3, d]: a contiguous block of columns is whole heads, which
    is what a cut over any number of devices that divides n needs.
    """

    def __init__(
        self,
        h: int,
        n: int,
        dropout: float,
        site: str,
        clock: Clock,
        std: float,
        std_out: float,
    ) -> None:
        super().__init__()
        self.head_dim = h // n
        self.dropout, self.site, self.clock = dropout, site, clock
        self.head_block = 0  # which block of heads is held here
        self.qkv = Linear(h, 3 * h, opens=True, std=std)
        self.out = Linear(h, h, opens=False, std=std_out)

    def forward(self, x_BSH: Tensor, cache: KVCache | None = None) -> Tensor:
        qkv_BSO = self.qkv(x_BSH)
        b, s, _ = qkv_BSO.shape
        q, k, v = qkv_BSO.view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        if cache is not None:
            k, v = cache.append(k, v)
        if self.training and self.dropout > 0.0:
            o_BNSD = self._unfused(q, k, v)
        else:
            seen, mask = k.shape[2], None
            if 1 < s < seen:  # several tokens after cached ones: each sees those up to itself
                mask = torch.ones(s, seen, dtype=torch.bool, device=q.device).tril(seen - s)
            o_BNSD = F.scaled_dot_product_attention(q, k, v, mask, is_causal=s == seen)
        return self.out(o_BNSD.transpose(1, 2).reshape(b, s, -1))

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with dropout of its probabilities, which a fused kernel cannot address."""
        b, n, s, d = q.shape
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(future, -torch.inf)
        samples = _range(self.clock.first_sample, b, q).view(b, 1, 1)
        heads = _range(self.head_block * n, n, q).view(n, 1)
        rows = rng.join(samples, heads, _range(0, s, q))
        key = rng.key(self.clock.seed, self.clock.step, self.site)
        keep = rng.keep(key, rows, _range(0, s, q), self.dropout)
        probabilities = torch.softmax(scores, -1) * keep / (1.0 - self.dropout)
        return probabilities.to(v.dtype) @ v


class FeedForward(nn.Module):
    """h to f, GELU (the tanh form of GPT-2), f to h."""

    def __init__(
        self, h: int, f: int, std: float, std_out: float, gelu: Literal["none", "tanh"] = "tanh"
    ) -> None:
        super().__init__()
        self.gelu: Literal["none", "tanh"] = gelu
        self.up = Linear(h, f, opens=True, std=std)
        self.down = Linear(f, h, opens=False, std=std_out)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BSH), approximate=self.gelu))


class Classifier(nn.Module):
    """The hidden vector at one chosen token of each sequence to a label (Optimus, figure 2).

    x [b, s, h] and positions [b] to logits [b, n_labels]: `choose`, a pooler with tanh, `labels`.
    """

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.choose: nn.Module = ChosenToken()
        self.pooler = Linear(h, h, opens=True, std=std)
        self.labels: nn.Module = LabelHead(h, n_labels, std)

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        logits: Tensor = self.labels(torch.tanh(self.pooler(self.choose(x_BSH, at_B))))
        return logits


class ChosenToken(nn.Module):
    """One token's vector of each sequence: x [b, s, h], positions [b], to [b, h]."""

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        return x_BSH[torch.arange(len(at_B), device=at_B.device), at_B]


class LabelHead(nn.Module):
    """[b, h] to logits [b, n_labels]: too few columns to be cut."""

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(h, n_labels, init=Init(std=std))
        self.bias: nn.Parameter | None = new_parameter(n_labels, init=Init())

    def forward(self, x_BH: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x_BH.dtype)
        return F.linear(x_BH, self.weight.to(x_BH.dtype).t(), bias)


def _range(start: int, n: int, like: Tensor) -> Tensor:
    return torch.arange(start, start + n, device=like.device)
