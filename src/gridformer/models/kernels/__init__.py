"""Kernels for GPUs that PyTorch does not have, as operators `torch.ops.gridformer`.

They are written in Triton, which CUDA builds of PyTorch include. Everywhere else the blocks that
use them compute the same numbers with PyTorch's operators.

Each operator declares the shapes of its results without Triton, so fake tensors (in an estimate of
memory, or a count of kernels) see what a GPU would run. Triton is imported when an operator first
runs: `tiles`, `masking`, `flash` and `flash_backward` import it, the others do not.
"""
