"""Published measurements that nothing is fitted to, and what the planner predicts for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.pricing import RecordedRow, cluster_of, predicted, record
from benchmarks.planner.rows import FRONTERA, H100, Row, Value, calibration_rows, gpt
from gridformer.config import parse_run

LASSEN, DGX2H = "lassen-v100", "dgx2h-v100"
SUPER = "Jain et al. 2021 (SUPER), as quoted in the project's specification"
V1 = "https://nv-adlr.github.io/MegatronLMV1, table 1"
SCALING = "Shoeybi et al. 2019 (Megatron-LM), as quoted in the project's specification"
README = "https://github.com/NVIDIA/Megatron-LM, README of release 0.7"


@dataclass(frozen=True)
class HeldOut:
    """A published number that is no step of a calibration file.

    Attributes:
        name: How the table calls it.
        published: The published number.
        unit: What it is.
        row: The run.
        over: The run that it is relative to, if it is a ratio.
        training: Whether steps count; otherwise forward passes.
        note: What one should know about the comparison.
    """

    name: str
    published: float
    unit: str
    row: Row
    over: Row | None = None
    training: bool = True
    note: str = ""


def held_out() -> list[HeldOut]:
    """Returns all rows, in the order of their machines."""
    return [*_optimus(), *_super(), *_megatron_v1(), *_weak_scaling(), *_gpt3()]


def predict_held_out(one: HeldOut) -> float:
    """Returns what is predicted for a published number, in its unit."""
    found = _priced(record(one.row, one.training))
    if one.over is None:
        return found
    base = _priced(record(one.over, one.training))
    if one.unit == "times faster":
        return base / found
    return 100 * found / base


def _priced(recorded: RecordedRow) -> float:
    return predicted(recorded, cluster_of(recorded.row))


def _optimus() -> list[HeldOut]:
    rows = {row.name: row for row in calibration_rows(FRONTERA)}
    return [
        HeldOut(
            "Optimus against Megatron, 64 devices, inference",
            1.78,
            "times faster",
            replace(rows["optimus / 64"], source="Xu et al. 2021 (Optimus), abstract"),
            over=rows["megatron / 64"],
            training=False,
            note="the paper's forward times were taken without waiting for the device",
        )
    ]


def _super() -> list[HeldOut]:
    found = []
    for model, published in (("t5-large-mod", 2.22), ("transformer-base", 1.8)):
        runs = []
        layouts: tuple[dict[str, Any], ...] = (
            {"scheme": "subgraph", "branches": 4},
            {"scheme": "single", "dp": 4},
        )
        for layout in layouts:
            raw = {
                "name": "published",
                "model": {"name": model, "dropout": 0.0},
                "layout": {**layout, "devices_per_node": 4},
                "data": {"path": "none", "task": "pairs"},
                "train": {"global_batch": 4},
            }
            runs.append(Row(model, LASSEN, published, "s/iteration", parse_run(raw), SUPER))
        found.append(
            HeldOut(
                f"SUPER, {model}, 4-way D&SP against data parallelism",
                published,
                "times faster",
                runs[0],
                over=runs[1],
                note="SUPER launched every head's kernels separately; here heads are one batched "
                "product, in both",
            )
        )
    return found


def _megatron_row(
    name: str, sizes: tuple[int, int, int], value: Value, published: float, **layout: int
) -> Row:
    """Returns a row of a GPT-2 with s=1024 in 16 bits with full recomputation, as in 2019."""
    layers, hidden, heads = sizes
    placed = {"scheme": "megatron", "devices_per_node": 16, **layout}
    run = gpt(
        (layers, hidden, heads, 1024, 51200),
        placed,
        {"global_batch": 8 * layout.get("dp", 1), "recompute": "full", "dtype": "float16"},
    )
    return Row(name, DGX2H, published, value, run, V1)


def _megatron_v1() -> list[HeldOut]:
    rows = (
        _megatron_row("Megatron-LM 1.0, 1.2B, 1 device", (40, 1536, 16), "s/iteration", 1.288),
        _megatron_row(
            "Megatron-LM 1.0, 4.2B, 4 devices", (64, 2304, 24), "s/iteration", 1.357, cols=4
        ),
    )
    return [
        HeldOut(row.name, row.published, "s/iteration", row, note="sequences of 1,024 assumed")
        for row in rows
    ]


def _weak_scaling() -> list[HeldOut]:
    small = _megatron_row("1.2B", (40, 1536, 16), "hardware TFLOP/s", 1)
    found = []
    for published, replicas in ((77.0, 1), (74.0, 64)):
        row = _megatron_row(
            "8.3B", (72, 3072, 24), "hardware TFLOP/s", published, cols=8, dp=replicas
        )
        found.append(
            HeldOut(
                f"Megatron-LM 2019, 8.3B on {8 * replicas} devices against 1.2B on one",
                published,
                "% of its rate a device",
                replace(row, source=SCALING),
                over=small,
            )
        )
    return found


def _gpt3() -> list[HeldOut]:
    """Returns the strong scaling of GPT-3, which takes 1,152 sequences a step on all devices."""
    found = []
    for devices, published in ((96, 47.0), (4608, 42.0)):
        dp = devices // 32
        layout = {
            "scheme": "megatron",
            "cols": 4,
            "pp": 8,
            "stages_per_rank": 12,
            "dp": dp,
            "dp_mode": "fsdp",
            "reshard": "step",
            "micro_batches": 1152 // dp,
            "sequence_parallel": True,
            "devices_per_node": 8,
        }
        train = {"global_batch": 1152, "dtype": "bfloat16"}
        run = gpt((96, 12288, 96, 2048, 131072), layout, train)
        row = Row(f"GPT-3 on {devices}", H100, published, "MFU", run, README, fused_attention=True)
        found.append(
            HeldOut(
                f"Megatron-LM on H100, GPT-3 175B on {devices:,} devices",
                published,
                "% of the peak",
                row,
                note="tensor-parallel size 4, 8 stages in 12 parts and s=2048 are assumed",
            )
        )
    return found
