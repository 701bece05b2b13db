"""Keys and values of past tokens, which generation keeps."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """One layer's keys and values of past tokens and of the source, for generation.

    Attributes:
        k: Keys of the past tokens [b, n, s, d]; None before the first one.
        v: Values of the past tokens.
        first: The position of the first token in `k` and `v`; a window forgets those before it.
        source: Keys and values of the source.
    """

    def __init__(self) -> None:
        self.first = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.source: tuple[Tensor, Tensor] | None = None

    def append(self, k_BNSD: Tensor, v_BNSD: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
        """Adds keys and values of new tokens [b, n, s, d] and returns those of all tokens.

        With a window, no new token sees more than `window` - 1 of the past tokens, and the others
        are forgotten.

        Args:
            k_BNSD: Keys of the new tokens [b, n, s, d].
            v_BNSD: Values of the new tokens [b, n, s, d].
            window: How many keys a query sees at most, its own among them; 0 means all of them.

        Returns:
            The keys and the values of all tokens that a new one may see, [b, n, S, d] with S >= s.
        """
        if self.k is not None and self.v is not None:
            unseen = max(0, self.k.shape[2] - window + 1) if window else 0
            self.first += unseen
            k_BNSD = torch.cat((self.k[:, :, unseen:], k_BNSD), 2)
            v_BNSD = torch.cat((self.v[:, :, unseen:], v_BNSD), 2)
        self.k, self.v = k_BNSD, v_BNSD
        return k_BNSD, v_BNSD

    def keep(self, n: int) -> None:
        """Forgets the tokens from position n on."""
        if self.k is not None and self.v is not None:
            kept = max(0, n - self.first)
            self.k, self.v = self.k[:, :, :kept], self.v[:, :, :kept]

    def select(self, rows: Tensor) -> None:
        """Keeps the sequences that `rows` indexes, in that order, as a beam search needs."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
        if self.source is not None:
            self.source = self.source[0][rows], self.source[1][rows]
