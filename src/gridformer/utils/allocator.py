"""The settings of torch's CUDA allocator, which it reads when torch initializes CUDA."""

from __future__ import annotations

import os
import sys

# Since torch 2.9 the first name holds for all kinds of GPUs, and the others are still read.
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
_NAMES = (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Makes the CUDA allocator grow its segments, unless the user has set it up differently.

    Otherwise a segment has the size of the tensor for which it was allocated, and memory between
    tensors of other sizes stays unused: full and partial operands of a grid, chunks of logits and
    buckets of gradients all differ. The environment variable is also inherited by processes that
    are started later. It has no effect on CPUs. Only Linux has the setting.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _NAMES):
        os.environ[ALLOC_CONF] = "expandable_segments:True"
