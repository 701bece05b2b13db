"""A device that claims to be a GPU, on any machine, and tensors on it that have no memory.

Fake tensors have a device but no memory, and like a GPU's they refuse to be mixed with tensors of
another device. A CPU build of torch cannot run backward through fake tensors on `cuda`, so they use
torch's PrivateUse1 device type, which behaves alike.

A registered device type stays registered in its process, so use a process of its own.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from gridformer.models.kernels import attention, library

NAME = "fakegpu"
_ONE_KERNEL = ("silu_backward",)
_library = torch.library.Library("aten", "IMPL")  # its registrations last as long as it
Backend = Literal["nccl", "gloo"]


# The functions that torch calls in a device module. It is not available except for fake tensors, so
# that torch makes no other tensors there.
_MODULE = SimpleNamespace(
    is_available=lambda: False,
    is_initialized=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)


def _never_run(*_: Any) -> None:
    raise AssertionError("an operator on a fake tensor")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float = 1.0,
    **more: Any,
) -> Tensor:
    """Attention in one kernel, as on a GPU.

    gridformer's own has the same operations and results of the same shapes as torch's.
    """
    fused = q.dtype != torch.float64 and torch.backends.cuda.flash_sdp_enabled()  # see attending
    if fused and mask is None and not dropout_p:
        return attention.attention(q, k, v, None, None, attention.Settings(is_causal, scale))
    unfused = torch.ops.aten.scaled_dot_product_attention.default.decompose
    out: Tensor = unfused(q, k, v, mask, dropout_p, is_causal, scale=scale, **more)
    return out


@cache
def fake_gpu() -> torch.device:
    """Returns the device, which is registered once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, _MODULE)
    # Without a kernel of their own torch computes these by several operators, unlike on a GPU.
    # Fake tensors have shapes by the operator's rules, so the kernels are never run.
    for name in _ONE_KERNEL:
        _library.impl(name, _never_run, "PrivateUse1")
    _library.impl("scaled_dot_product_attention", _attend, "AutogradPrivateUse1")
    library.DEVICE_TYPES.append(NAME)
    return torch.device(NAME, 0)
