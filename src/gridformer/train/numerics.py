"""The settings of torch on which the bits of a result depend. A run sets all of them explicitly."""

from __future__ import annotations

import os

from gridformer.config import TrainConfig

# cuBLAS reads it when a process first uses a GPU. The value is one of the two with which its
# products are deterministic.
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_numerics(train: TrainConfig) -> None:
    """Sets how this process computes. Call it before the process uses a GPU.

    Products of bfloat16 and float16 accumulate in float32 and never in less, whatever torch's
    defaults are. `train.tf32` decides about TF32, and `train.deterministic` about kernels that add
    in an order that differs from run to run.
    """
    if train.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")

    import torch
    from torch.utils import deterministic

    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False
    products.allow_tf32 = train.tf32
    torch.backends.cudnn.allow_tf32 = train.tf32
    if torch.get_deterministic_debug_mode() != (2 if train.deterministic else 0):
        torch.use_deterministic_algorithms(train.deterministic)  # loads torch's compiler
    torch.backends.cudnn.benchmark = False
    if train.deterministic:
        # Every element is written before it is read, so filling new tensors would only take time.
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
