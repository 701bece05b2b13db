"""Published throughputs of mixtures of experts, which nothing is fitted to, and predicted ones.

    python -m benchmarks.published.experts --out docs/results/published-experts.md

experts.csv has the rows. Those that gridformer cannot predict are kept there, too, and say why.
Nothing here runs on a cluster.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.common.page import write_page
from benchmarks.predicted.predictions import Question, answer
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.validation import check_layout

ROWS = Path(__file__).with_suffix(".csv")
PEAK = 989.5  # TFLOP/s of an H100, of which publications give shares


# Layers, h, heads, key/value heads, their width, vocabulary; E, k and the width of experts.
_KEYS = (
    *("n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "vocab_size"),
    *("n_experts", "experts_per_token", "expert_size"),
)
_SIZES = {
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 32000, 8, 2, 14336),
    "mixtral-8x22b": (56, 6144, 48, 8, 128, 32768, 8, 2, 16384),
    "mixtral-8x22b-g8t8": (56, 6144, 48, 8, 128, 32768, 64, 8, 2048),
    "llama3-8x70b": (80, 8192, 64, 8, 128, 128256, 8, 2, 28672),  # k is assumed
    "qwen2-57b-a14b": (28, 3584, 28, 4, 128, 151936, 64, 8, 2560),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 151936, 128, 8, 768),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 151936, 128, 8, 1536),
}
_MORE: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "shared_size": 20480},
    "qwen3": {"qk_norm": True},
}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        **{"family": "llama", "tied_head": False, **dict(zip(_KEYS, sizes))},
        **_MORE.get(name.partition("-")[0], {}),
    }
    for name, sizes in _SIZES.items()
}


def read_rows() -> list[dict[str, str]]:
    """Returns all rows of experts.csv."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def run_of(row: dict[str, str], model: dict[str, Any] | None = None) -> RunConfig:
    """Returns a row as a run of gridformer, or the same layout of another model.

    Megatron's distributed optimizer shards the optimizer and gathers parameters in 16 bits once a
    step, which is represented by dp_mode=fsdp with reshard=step. With etp=1 all devices of a group
    have whole experts, also those of a tensor-parallel group.
    """
    tp, pp, ep, dp, batch = (int(row[key]) for key in ("tp", "pp", "ep", "dp", "global_batch"))
    folded = int(row["etp"]) < tp
    layout: dict[str, Any] = {
        "scheme": "megatron",
        "cols": tp,
        "sequence_parallel": tp > 1,
        "pp": pp,
        "stages_per_rank": int(row["vp"]),
        "dp": dp,
        "dp_mode": "fsdp" if dp > 1 else "replicate",
        "reshard": "layer" if row["sharding"] == "parameters" else "step",
        "micro_batches": batch // dp // int(row["micro_batch"]),
        "devices_per_node": 8 if row["cluster"] == "dgx-h100" else 0,
    }
    over_dp = ep // tp if folded else ep
    over = ["cols"] * folded + ["dp"] * (over_dp > 1)
    if over and model is None:
        layout |= {"experts_over": over, "experts_dp": over_dp if over_dp > 1 else 0}
    sizes = {**(model or MODELS[row["model"]]), "max_seq_len": int(row["seq_len"])}
    train = {"global_batch": batch, "dtype": "bfloat16", "recompute": row["recompute"]}
    run = parse_run({"model": sizes, "layout": layout, "train": train, "data": {"path": "none"}})
    check_layout(run)
    return run


def flop_per_token(row: dict[str, str]) -> float:
    """Returns the operations of a token as the publication counts them, in 10^12.

    Some count the products of attention as if tokens attended to all others (`full`).
    """
    m = parse_run({"model": MODELS[row["model"]], "data": {"path": "none"}}).model
    heads = 2 * (m.n_heads + m.kv_heads) * m.head_width
    feed_forward = 3 * (m.experts_per_token * m.expert_size + m.shared_size) + m.n_experts
    products = m.n_layers * m.hidden_size * (heads + feed_forward) + m.hidden_size * m.vocab_size
    attended = int(row["seq_len"]) * (1 if row["attention"] == "full" else 0.5)
    scores = m.n_layers * 2 * attended * m.n_heads * m.head_width
    return 6 * (products + scores) / 1e12


def published_rate(row: dict[str, str]) -> float:
    """Returns the published tokens/s a device."""
    value = float(row["value"])
    if row["unit"] == "tokens/s":
        return value
    return (value / 100 * PEAK if row["unit"] == "MFU" else value) / flop_per_token(row)


def lines_of(rows: Sequence[dict[str, str]]) -> list[str]:
    """Predicts rows, and returns their table and the mean error."""
    lines = [
        "| model | devices | tp x pp x ep (stages a rank) | published | tokens/s a device | "
        "predicted | error |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    errors = []
    for row in rows:
        found = answer(Question(run_of(row)), Path(row["cluster"]))
        experts = f"{row['ep']}{' folded' if int(row['etp']) < int(row['tp']) else ''}"
        layout = f"{row['tp']} x {row['pp']} x {experts} ({row['vp']})"
        if row["sharding"] == "parameters":
            layout += ", FSDP"
        published = published_rate(row)
        cells = [row["model"], row["devices"], layout, f"{row['value']} {row['unit']}"]
        cells += [f"{published:,.0f}"]
        if found.error:
            cells += ["", found.error.partition("\n")[0]]
        else:
            tokens = int(row["global_batch"]) * int(row["seq_len"]) / int(row["devices"])
            errors.append(found.step_s / (tokens / published) - 1)
            cells += [f"{tokens / found.step_s:,.0f}", f"{errors[-1]:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    if errors:
        sizes = sorted(map(abs, errors))
        lines += [
            "",
            f"Mean error {statistics.mean(sizes):.0%}, median {statistics.median(sizes):.0%}, "
            f"worst {sizes[-1]:.0%}, of {len(errors)} rows.",
        ]
    return lines


def main(
    out: Annotated[Path | None, typer.Option(help="The page to write; else it is printed.")] = None,
    only: Annotated[str, typer.Option(help="Only models whose name begins with it.")] = "",
) -> None:
    """Predict all rows, and write the page."""
    rows = [row for row in read_rows() if row["model"].startswith(only)]
    parts = ["# Published throughputs of mixtures of experts", _HOW]
    for source in dict.fromkeys(row["source"] for row in rows if not row["why_not"]):
        some = [row for row in rows if row["source"] == source and not row["why_not"]]
        assumed = dict.fromkeys(row["assumed"] for row in some if row["assumed"])
        parts += [f"## {source} ({some[0]['date']})", "\n".join(lines_of(some))]
        parts += [f"Assumed: {'; '.join(assumed)}."] if assumed else []
    kept = [row for row in rows if row["why_not"]]
    lines = [
        "| model | machine | devices | precision | published | why not |",
        "|---|---|---:|---|---:|---|",
    ]
    for row in kept:
        cells = [row[key] for key in ("model", "cluster", "devices", "precision")]
        cells += [f"{row['value']} {row['unit']}", row["why_not"]]
        lines.append(f"| {' | '.join(cells)} |")
    about = describe_machine("benchmarks.published.experts")
    parts += ["## Rows that are not predicted", "\n".join(lines)]
    parts += [f"{about['date']}, `{command_line('benchmarks.published.experts')}`."]
    write_page(parts, out)


_HOW = """\
gridformer's code is predicted to be slower than most of the published code, by 40% at the
median: its kernels are eager, and each token travels to every one of its experts by itself, though
several of them may be on one node. Only FSDP is predicted faster.

Nothing is fitted to these rows. gridformer's own code is predicted, with the layout of the row on
the shipped cluster `dgx-h100` or `gb200-nvl72`, in bfloat16, with equally many tokens for each
expert, as in most of these measurements. Published shares of the peak and TFLOP/s are turned into
tokens/s by the operations that the publication counts; of attention, Megatron-Core counted all
scores until 2024, and half of them (the causal ones) later. Errors are those of the time of a step:
+10% is a prediction that is 10% slower than what was published. What the published code does and
gridformer does not (all-to-alls beside other work, DeepEP, CUDA graphs, fused permutations) is in
the error. Folded: groups of experts go across tensor-parallel devices, each of which has whole
experts; else each expert is sharded over them."""


if __name__ == "__main__":
    typer.run(main)
