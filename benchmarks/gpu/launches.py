"""How many kernels and messages the host launches for a layer, forward and backward, on layouts.

    python -m benchmarks.gpu launches

They are counted in records of rank 0 (`gridformer.record`), so no GPU is needed: eager, and with
blocks compiled as `train.compile: auto` does it on GPUs. Those of a layer are the difference
between steps with 6 and with 3 layers, divided by 3; the update does not count. A kernel of a layer
that torch.compile would join with others counts once with these, as does a multi-tensor kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.report import Report, table
from gridformer.config import parse_run
from gridformer.plan.predict import record_run
from gridformer.record.events import Kernel, Start

FEW, MANY = 3, 6  # numbers of layers
_SIZES = {"hidden_size": 2048, "n_heads": 16, "vocab_size": 32768, "max_seq_len": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**_SIZES, "family": "gpt2"},
    "llama": {**_SIZES, "family": "llama", "n_kv_heads": 8, "ffn_size": 5632, "tied_head": False},
}
_GRID = {"rows": 2, "cols": 2}
_OPTIMUS = {"scheme": "optimus", **_GRID}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp 4": {"dp": 4},
    "zero1 over 4": {"dp": 4, "dp_mode": "zero1"},
    "fsdp over 4": {"dp": 4, "dp_mode": "fsdp"},
    "megatron 1x4": {"scheme": "megatron", "cols": 4},
    "megatron 1x4, sequence parallel": {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    "megatron 2-D 2x2": {"scheme": "megatron_2d", **_GRID},
    "megatron 2-D 2x2, rows over s": {"scheme": "megatron_2d", **_GRID, "rows_over": "sequence"},
    "megatron 2-D 2x2, dp 2": {"scheme": "megatron_2d", **_GRID, "dp": 2},
    "megatron 2-D 2x2, 2 micro-batches": {"scheme": "megatron_2d", **_GRID, "micro_batches": 2},
    "optimus 2x2": _OPTIMUS,
    "optimus 2x2, broadcast": {**_OPTIMUS, "schedule": "broadcast"},
    "optimus 2x2, rows over s": {**_OPTIMUS, "rows_over": "sequence"},
    "optimus 2x2, stationary weights": {**_OPTIMUS, "stationary": "weight"},
    "optimus 4x1": {"scheme": "optimus", "rows": 4, "cols": 1},
    "D&SP over 4": {"scheme": "subgraph", "branches": 4},
    "D&SP-cSub over 4": {"scheme": "subgraph", "branches": 4, "common": "first"},
}
# What `launches` returned at commit e2bcba82, before blocks were compiled by themselves and norms
# of grids with them: by model, in the order of LAYOUTS.
BEFORE: dict[str, Sequence[int]] = {
    "gpt2": (50, 55, 63, 89, 56, 67, 83, 149, 87, 166, 134, 196, 200, 134, 68, 62, 60),
    "llama": (92, 99, 103, 123, 96, 107, 121, 190, 125, 237, 132, 192, 201, 141, 106, 102, 100),
}


def launches(model: str, layout: str, compiled: bool = False) -> tuple[float, float]:
    """Return the kernels that are launched for a layer, and the messages."""
    counts = []
    for n_layers in (FEW, MANY):
        run = parse_run(
            {
                "model": {**MODELS[model], "n_layers": n_layers},
                "layout": LAYOUTS[layout],
                "data": {"path": "x", "seq_len": 2048},
                "train": {"global_batch": 8, "dtype": "bfloat16", "compile": compiled},
            }
        )
        trace = record_run(run).traces[0]
        trace.events = trace.events[: trace.update]
        passes = [*trace.unfolded()]
        kernels = sum(event.launches for event in passes if isinstance(event, Kernel))
        messages = sum(len(event.parts) or 1 for event in passes if isinstance(event, Start))
        counts.append((kernels, messages))
    few, many = counts
    return (many[0] - few[0]) / (MANY - FEW), (many[1] - few[1]) / (MANY - FEW)


def write(names: Sequence[str], report: Report) -> None:
    """Count and write the table of these layouts."""
    rows = []
    for model, before in BEFORE.items():
        for layout, total in zip(LAYOUTS, before, strict=True):
            if layout not in names:
                continue
            report.progress(f"{model}, {layout}")
            eager, (kernels, messages) = sum(launches(model, layout)), launches(model, layout, True)
            compiled = kernels + messages
            cells = f"{total}", f"{eager:.0f}", f"{compiled:.0f}", f"{messages:.0f}"
            rows.append([f"{model}, {layout}", *cells, f"{compiled / total - 1:+.0%}"])
    head = [
        "layer",
        "before, eager",
        "eager",
        "compiled",
        "of these messages",
        "compiled to before",
    ]
    report.write(table(head, rows))
