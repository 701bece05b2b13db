"""The CPU cores and memory of this machine, and the peak speeds of known GPUs."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def n_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Returns the free bytes of the machine or its container, the lesser; None if unknown."""
    free = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return min(free, default=None)


# TFLOP/s of float16, bfloat16, TF32, float32 and float64, on tensor cores where they support it; 0
# if the data sheet has no value.
_TYPES = ("float16", "bfloat16", "tf32", "float32", "float64")
_HOPPER_SXM = (989.5, 989.5, 494.5, 67.0, 67.0)
_HOPPER_NVL = (835.5, 835.5, 417.5, 60.0, 60.0)
# Patterns of the names that CUDA gives to devices; the first one that is found counts. The values
# are those of NVIDIA's data sheets of the products, read on pages that quote them, and for the RTX
# 4090 those of the Ada architecture's white paper (with float32 accumulation, as in torch's
# products). Those of the two NVL cards were not checked again.
_PEAKS: tuple[tuple[str, tuple[float, ...]], ...] = (
    (r"\bGB200\b", (2500.0, 2500.0, 1250.0, 80.0, 40.0)),
    (r"\bB200\b", (2250.0, 2250.0, 1100.0, 75.0, 37.0)),
    (r"\bGH200\b", _HOPPER_SXM),
    (r"\bH200 NVL\b", _HOPPER_NVL),
    (r"\bH200\b", _HOPPER_SXM),
    (r"\bH100 NVL\b", _HOPPER_NVL),
    (r"\bH100 PCIe\b", (756.5, 756.5, 378.0, 51.0, 51.0)),
    (r"\bH100\b", _HOPPER_SXM),
    (r"\bA100\b", (312.0, 312.0, 156.0, 19.5, 19.5)),
    (r"\bA40\b", (149.7, 149.7, 74.8, 37.4, 0.0)),
    (r"\bA10\b", (125.0, 125.0, 62.5, 31.2, 0.0)),
    (r"\bL40S\b", (362.0, 362.0, 183.0, 91.6, 0.0)),
    (r"\bRTX 4090$", (165.2, 165.2, 82.6, 82.6, 0.0)),
    (r"\bT4\b", (65.0, 0.0, 0.0, 8.1, 0.0)),
    (r"\bQuadro RTX 5000$", (89.2, 0.0, 0.0, 11.2, 0.0)),
    (r"\bV100S\b", (130.0, 0.0, 0.0, 16.4, 8.2)),
    (r"\bV100-PCI", (112.0, 0.0, 0.0, 14.0, 7.0)),
    (r"\bV100\b", (125.0, 0.0, 0.0, 15.7, 7.8)),
)


def peak_tflops(name: str, dtype: str, tf32: bool = False) -> float | None:
    """Returns the peak of a GPU in TFLOP/s, or None if it is unknown.

    Args:
        name: The name that CUDA gives to the device.
        dtype: The data type of the products.
        tf32: Whether products of float32 tensors may use TF32.
    """
    if " MIG " in name:
        return None  # a part of a GPU
    for pattern, peaks in _PEAKS:
        if re.search(pattern, name):
            peak = dict(zip(_TYPES, peaks))
            return (tf32 and dtype == "float32" and peak["tf32"]) or peak[dtype] or None
    return None
