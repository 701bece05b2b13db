"""The layouts that `benchmarks.gpu.cluster` compares: every scheme on all devices of a cluster."""

from __future__ import annotations

from typing import Any

Layout = dict[str, Any]
LARGEST = 8  # the most devices that share a layer; more devices become replicas


def usable(n: int) -> int:
    """Returns the largest number of devices up to `n` that the layouts can use; 0 if none is."""
    return n // LARGEST * LARGEST or max((k for k in (2, 4) if k <= n), default=0)


def layouts_of(n: int) -> dict[str, Layout]:
    """Returns every scheme, pipelines and each mode of replicas on `n` devices, by title.

    Args:
        n: The number of devices: 2, 4, or a multiple of 8.

    Raises:
        ValueError: These layouts cannot use `n` devices.
    """
    if n not in (2, 4) and n % LARGEST:
        hint = f"; use --processes {usable(n)}" if usable(n) else ""
        raise ValueError(
            f"{n} devices: the layouts of this report need 2, 4 or a multiple of {LARGEST}{hint}"
        )
    k = min(n, LARGEST)
    rows, cols = 2, k // 2
    grid, line = {"rows": rows, "cols": cols}, {"scheme": "megatron", "cols": k}
    optimus = {"scheme": "optimus", **grid}
    found: dict[str, Layout] = {
        f"megatron 1x{k}": line,
        f"megatron 1x{k}, sequence parallel": {**line, "sequence_parallel": True},
        f"megatron_2d {rows}x{cols}": {"scheme": "megatron_2d", **grid},
        f"optimus {rows}x{cols}, auto": optimus,
        f"optimus {rows}x{cols}, gather": {**optimus, "schedule": "gather"},
        f"optimus {rows}x{cols}, broadcast": {**optimus, "schedule": "broadcast"},
        f"optimus {rows}x{cols}, pipelined": {**optimus, "schedule": "pipelined"},
        f"D&SP, {k} branches": {"scheme": "subgraph", "branches": k},
        f"D&SP-cSub, {k} branches": {"scheme": "subgraph", "branches": k, "common": "first"},
    }
    found = {title: _fill(layout, n // k) for title, layout in found.items()}
    for mode in ("replicate", "zero1", "fsdp"):
        found[f"{n} replicas, {mode}"] = {"dp": n, "dp_mode": mode}
    stages = min(k, 4)
    for order in ("1f1b", "gpipe"):
        found[f"{stages} stages, {order}"] = _fill(
            {"pp": stages, "micro_batches": 2 * stages, "pipeline": order}, n // stages
        )
    if k >= 4:
        half = k // 2
        found[f"megatron 1x{half}, 2 replicas, fsdp"] = _fill(
            {"scheme": "megatron", "cols": half, "sequence_parallel": True, "dp_mode": "fsdp"},
            n // half,
        )
        found[f"optimus 2x{half // 2}, 2 stages, 1f1b"] = _fill(
            {"scheme": "optimus", "rows": 2, "cols": half // 2, "pp": 2, "micro_batches": 4}, n // k
        )
        found["2 stages, interleaved"] = _fill(
            {"pp": 2, "micro_batches": 4, "pipeline": "interleaved", "stages_per_rank": 2}, n // 2
        )
    return found


def _fill(layout: Layout, replicas: int) -> Layout:
    return {**layout, "dp": replicas} if replicas > 1 else layout
