"""Published measurements as runs: those that may be fitted to (data/), and those kept apart.

What a publication does not say is assumed, and `assumed` says so. Runs have no dropout: its masks
cost gridformer other operators than they cost the published code.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gridformer.config import RunConfig, parse_run

DATA = Path(__file__).parent / "data"
Value = Literal["s/sequence", "s/iteration", "TFLOP/s", "hardware TFLOP/s", "MFU"]
FRONTERA, SELENE, H100 = "frontera-rtx5000", "selene-a100", "dgx-h100"
# The calibration data of each cluster, and the numbers that are fitted to it.
FITS: dict[str, tuple[str, ...]] = {
    FRONTERA: ("product_efficiency", "inner_efficiency", "outer_efficiency", "slowdown_per_node"),
    SELENE: ("product_efficiency", "memory_efficiency", "inner_efficiency"),
    H100: ("product_efficiency", "memory_efficiency", "inner_efficiency"),
}
# Layers that are traced for rows which count layers alone: equal layers take equal times.
TRACED_LAYERS = 2


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        name: How tables call it.
        cluster: The machine.
        published: The published number.
        value: What it is.
        run: The run.
        source: Where it was published.
        assumed: What the publication does not say.
        layers: Transformer layers of the published run where layers alone count; 0 if all counts.
        fused_attention: Whether the published code had attention in one kernel.
        node_block: Rows and columns of the grid in a node; None for the choice of gridformer.
    """

    name: str
    cluster: str
    published: float
    value: Value
    run: RunConfig
    source: str
    assumed: str = ""
    layers: int = 0
    fused_attention: bool = False
    node_block: tuple[int, int] | None = None


def calibration_rows(cluster: str) -> list[Row]:
    """Returns the measurements that the numbers of a cluster may be fitted to."""
    readers: dict[str, tuple[str, Callable[[dict[str, str]], Row]]] = {
        FRONTERA: ("frontera_rtx5000_weak_scaling.csv", _frontera),
        SELENE: ("a100_80g_korthikanti.csv", _selene),
        H100: ("h100_megatron_weak_scaling.csv", _h100),
    }
    name, reader = readers[cluster]
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return [reader(row) for row in csv.DictReader(file)]


def gpt(
    sizes: tuple[int, int, int, int, int],
    layout: dict[str, Any],
    train: dict[str, Any],
) -> RunConfig:
    """Returns a run of a GPT-2; sizes are layers, hidden size, heads, sequence and vocabulary."""
    layers, hidden, heads, seq, vocab = sizes
    model = {
        "family": "gpt2",
        "n_layers": layers,
        "hidden_size": hidden,
        "n_heads": heads,
        "max_seq_len": seq,
        "vocab_size": vocab,
        "dropout": 0.0,
    }
    return parse_run(
        {
            "name": "published",
            "model": model,
            "layout": layout,
            "data": {"path": "none"},
            "train": train,
        }
    )


def _frontera(row: dict[str, str]) -> Row:
    p, scheme = int(row["gpus"]), row["scheme"]
    q = round(p**0.5)
    layout: dict[str, Any] = {"scheme": scheme, "devices_per_node": 4}
    if scheme == "megatron":
        layout |= {"cols": p}
    else:
        layout |= {"rows": q, "cols": q, "schedule": "broadcast", "stationary": "output"}
    sizes = (TRACED_LAYERS, int(row["hidden"]), int(row["heads"]), int(row["seq"]), 1152)
    train = {"global_batch": int(row["batch"]), "recompute": "full", "clip_norm": 0}
    return Row(
        name=f"{scheme} / {p}",
        cluster=FRONTERA,
        published=float(row["seconds_per_sequence_fwd_plus_bwd"]),
        value="s/sequence",
        run=gpt(sizes, layout, train),
        source="Xu et al. 2021 (Optimus), Table 2, forward plus backward",
        layers=int(row["layers"]),
        node_block=None if scheme == "megatron" else (2, 2),
    )


def _selene(row: dict[str, str]) -> Row:
    batch, micro = int(row["global_batch"]), int(row["micro_batch"])
    stages = int(row["pp"])
    interleaved = {"stages_per_rank": 3} if stages > 1 else {}
    layout = {
        "scheme": "megatron",
        "cols": int(row["tp"]),
        "pp": stages,
        "dp": int(row["dp"]),
        "micro_batches": batch // micro // int(row["dp"]),
        "sequence_parallel": "SP" in row["recompute"],
        "devices_per_node": 8,
        **interleaved,
    }
    recompute = "full" if row["recompute"] == "full" else "selective"
    train = {"global_batch": batch, "recompute": recompute, "dtype": "float16"}
    return Row(
        name=f"{row['model']}, {row['recompute']}",
        cluster=SELENE,
        published=float(row["value"]),
        value="s/iteration",
        run=gpt(_sizes(row), layout, train),
        source=row["source"],
        assumed="three stages a rank for 175B",
    )


def _h100(row: dict[str, str]) -> Row:
    batch, replicas = int(row["global_batch"]), int(row["dp"])
    layout = {
        "scheme": "megatron",
        "cols": int(row["tp"]),
        "dp": replicas,
        "dp_mode": "fsdp",
        "reshard": "step",
        "sequence_parallel": int(row["tp"]) > 1,
        "devices_per_node": 8,
    }
    train = {"global_batch": batch, "dtype": "bfloat16"}
    return Row(
        name=f"{row['model']} on {row['gpus']}",
        cluster=H100,
        published=float(row["value"]),
        value="TFLOP/s",
        run=gpt(_sizes(row), layout, train),
        source=row["source"],
        assumed="one micro-batch of four sequences, because the sums of gradients of shorter ones "
        "could not hide behind the computation, which Megatron-LM's README says they do; no "
        "recomputation; parameters gathered in 16 bits once a step, as its distributed optimizer "
        "does, represented by dp_mode=fsdp with reshard=step",
        fused_attention=True,
    )


def _sizes(row: dict[str, str]) -> tuple[int, int, int, int, int]:
    layers, hidden, heads, seq, vocab = (
        int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")
    )
    return layers, hidden, heads, seq, vocab
