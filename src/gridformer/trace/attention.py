"""Attention of the fake GPU, which torch would compute there in unfused parts.

A GPU computes `F.scaled_dot_product_attention` in one fused kernel. The fake GPU has none, so here
gridformer's own kernel, which has the same operations and results of the same shapes, takes its
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.kernels import attention as kernel
from gridformer.trace.device import NAME


@contextmanager
def fused_attention() -> Iterator[None]:
    """Makes attention on the fake GPU one kernel, inside the context."""
    real = F.scaled_dot_product_attention

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float = 1.0,
        **more: Any,
    ) -> Tensor:
        fits = q.device.type == NAME and q.dtype != torch.float64
        if mask is not None or dropout_p or not fits:
            return real(q, k, v, mask, dropout_p, is_causal, scale=scale, **more)
        return kernel.attention(q, k, v, None, None, kernel.Settings(is_causal, scale))

    with patch.object(F, "scaled_dot_product_attention", attend):
        yield
