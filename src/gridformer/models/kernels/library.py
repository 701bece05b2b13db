"""The namespace `torch.ops.gridformer`, and on which devices its operators run."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = torch.library.Library("gridformer", "DEF")


# The types of devices that may run the operators. A trace adds its own, which runs nothing.
DEVICE_TYPES = ["cuda"]


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the operators run on tensors of a device and a dtype.

    float64 is for comparisons, for which PyTorch's operators are the reference.
    """
    return device.type in DEVICE_TYPES and dtype != torch.float64 and _run_on(device)


# By device. Compiled code reads it, while a cached function's body would break its graph.
_RUN: dict[torch.device, bool] = {}


def _run_on(device: torch.device) -> bool:
    """Returns whether a GPU is one of NVIDIA with the shared memory that tiles need, and Triton."""
    runs = _RUN.get(device)
    if runs is None:
        nvidia = torch.version.cuda is not None
        runs = device.type != "cuda" or (
            nvidia and torch.cuda.get_device_capability(device) >= (8, 0) and triton_works()
        )
        _RUN[device] = runs
    return runs


@cache
def triton_works() -> bool:
    """Returns whether Triton is installed and finds what it builds its launchers with."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    header = Path(sysconfig.get_path("include"), "Python.h")
    return (
        find_spec("triton") is not None
        and any(shutil.which(compiler) for compiler in compilers)
        and header.exists()
    )


def define(schema: str) -> None:
    """Declares an operator, given its schema."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def threshold(p: float) -> int:
    """Returns the number that random bits must reach for an element to be kept, as `rng.keep`."""
    return round(p * (1 << 32))
