"""A device that claims to be a GPU, on any machine, and tensors on it that have no memory.

Fake tensors have a device but no memory, and like a GPU's they refuse to be mixed with tensors of
another device. A CPU build of torch cannot run backward through fake tensors on `cuda`, so they use
torch's PrivateUse1 device type, which behaves alike.

A registered device type stays registered in its process, so use a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal
from unittest.mock import patch

import torch

from gridformer.models.kernels import library

NAME = "fakegpu"
_ONE_KERNEL = ("silu_backward",)
_library = torch.library.Library("aten", "IMPL")  # its registrations last as long as it
Backend = Literal["nccl", "gloo"]


class _Backend:
    """The functions that torch calls in a device module."""

    @staticmethod
    def is_available() -> bool:
        """False except for fake tensors, so that torch makes no other tensors there."""
        return False

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _never_run(*_: Any) -> None:
    raise AssertionError("an operator on a fake tensor")


@cache
def fake_gpu() -> torch.device:
    """Returns the device, which is registered once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, _Backend)
    # Without a kernel of their own torch computes these by several operators, unlike on a GPU.
    # Fake tensors have shapes by the operator's rules, so the kernels are never run.
    for name in _ONE_KERNEL:
        _library.impl(name, _never_run, "PrivateUse1")
    return torch.device(NAME, 0)


def traced_device(backend: Backend) -> torch.device:
    """Returns the device of a trace: the fake GPU for NCCL, and the CPU for gloo."""
    return fake_gpu() if backend == "nccl" else torch.device("cpu")


@contextmanager
def gpu_kernels(device_type: str) -> Iterator[None]:
    """Makes models inside use their kernels for GPUs with fake tensors on a type of device."""

    def available(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == device_type and dtype != torch.float64

    with patch.object(library, "available", available):
        yield
