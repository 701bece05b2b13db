"""Kernels for GPUs that PyTorch does not have, as operators `torch.ops.gridformer`.

They are written in Triton, which CUDA builds of PyTorch include; elsewhere PyTorch's operators
compute the same numbers. Each operator declares the shapes of its results without Triton, so fake
tensors see what a GPU would run. Only `tiles`, `masking`, `flash` and `flash_backward` import it.
"""
