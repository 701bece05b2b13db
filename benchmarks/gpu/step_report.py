"""Writes the report of `benchmarks.gpu single`: the table, how it counts, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from benchmarks.gpu.report import Report, median, table
from benchmarks.gpu.sides import Gridformer, HuggingFace
from benchmarks.gpu.step import Comparison, Mode
from gridformer.config import ModelConfig
from gridformer.utils.units import GIB

LOSS_AGREES, NORM_AGREES = 2e-3, 2e-2  # relative; bfloat16 has 8 significant bits
CEILING_TARGET, RATIO_TARGET = 0.5, 1.15


def matrix_parameters(config: ModelConfig) -> int:
    """Return P of `step_flops`: weights used in products, with the tied table once as head."""
    return config.matrix_elements - (config.n_tables - 1) * config.vocab_size * config.hidden_size


def step_flops(config: ModelConfig, tokens: int, s: int) -> float:
    """Return the model FLOPs of one step: 6 P T + 12 N h s T, where h is the width of all heads.

    This is Narayanan et al. 2021, equation 3 (96 B s l h^2 (1 + s/6h + V/16lh)), without the
    recomputation that the equation includes: three passes instead of four. As in the paper,
    attention counts the whole s x s scores, although a causal kernel computes only half of them.
    """
    attention = 12 * config.n_layers * config.n_heads * config.head_width * s
    return float((6 * matrix_parameters(config) + attention) * tokens)


def write(
    comparison: Comparison,
    ceiling_tflops: float,
    report: Report,
    predicted: Mapping[tuple[str, Mode], float] | None = None,
) -> None:
    """Write the table, with what was predicted if that is given, how it counts, and the targets."""
    settings, config = comparison.settings, comparison.settings.config
    flops = step_flops(config, comparison.tokens, settings.s)
    columns = ["side", "tokens/s", "turns", "ms/step", "model TFLOP/s", "of the ceiling"]
    rows: list[list[str]] = []
    for r in (r for r in comparison.results if r.seconds):
        other = comparison.result(HuggingFace.name, r.mode)
        span = [comparison.tokens / seconds for seconds in (max(r.seconds), min(r.seconds))]
        rows.append(
            [
                f"{r.side}, {r.mode}",
                f"{comparison.tokens / r.median:,.0f}",
                f"{span[0]:,.0f} to {span[1]:,.0f}",
                f"{1e3 * r.median:,.1f}",
                f"{flops / r.median / 1e12:,.3g}",
                f"{100 * flops / r.median / 1e12 / ceiling_tflops:.1f} %",
                f"{other.median / r.median:.2f}x" if other else "-",
                f"{r.peak_bytes / GIB:.1f}" if r.peak_bytes else "-",
                f"{r.warm_up_s:.0f}",
                f"{1e3 * median(r.cpu_seconds):,.0f}",
                f"{median(other.cpu_seconds) / median(r.cpu_seconds):.2f}x" if other else "-",
            ]
        )
    columns += ["against Hugging Face, same mode", "peak GiB", "warm-up s"]
    columns += ["processor ms/step", "against Hugging Face, by processor time"]
    if any(r.peak_bytes for r in comparison.results):  # on a GPU the processor's time says little
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    if predicted:
        columns.append("predicted ms/step, error")
        for row, r in zip(rows, (r for r in comparison.results if r.seconds)):
            one = predicted.get((r.side, r.mode))
            row.append(f"{1e3 * one:,.1f}, {one / r.median - 1:+.0%}" if one else "-")
    report.write(table(columns, rows))
    said_s = {" ".join(side): seconds for side, seconds in (predicted or {}).items()}
    report.keep(ceiling_tflops=ceiling_tflops, predicted_s=said_s, **asdict(comparison))
    inner = config.n_heads * config.head_width
    share = 12 * config.n_layers * inner * settings.s * comparison.tokens / flops
    half = "bfloat16, " if settings.dtype == "bfloat16" else ""
    report.write(
        f"\nb={comparison.b}, s={settings.s}, T={comparison.tokens:,} tokens per step; {half}"
        f"float32 parameters, fused AdamW, clipping at 1, {_dropout(config)}, no recomputation. "
        f"Model FLOPs per step: 6PT + 12NhsT = {flops / 1e12:,.3g} T with P = "
        f"{matrix_parameters(config):,} (Narayanan et al. 2021, equation 3, without "
        f"recomputation); {100 * share:.0f} % of them "
        f"are attention's, which counts the full s x s scores. Ceiling: {ceiling_tflops:,.3g} "
        f"TFLOP/s. Hugging Face compiled: {settings.hf_compile}. Attention: {settings.attention}. "
        f"Medians over {settings.rounds} turns of {settings.steps} steps; the sides alternate.\n"
    )
    for name, said in comparison.failures.items():
        report.write(f"- {name} did not run: {said}")
    for line in [*agreement(comparison), *verdict(comparison, flops, ceiling_tflops)]:
        report.write(f"- {line}")


def _dropout(config: ModelConfig) -> str:
    return f"dropout {config.dropout:g}" if config.dropout else "no dropout"


def agreement(comparison: Comparison) -> list[str]:
    """Report whether all sides had the same losses, from the same weights on the same batches."""
    if comparison.settings.config.dropout:
        return ["each side drops other elements: losses are not compared"]
    others = [name for name, losses in comparison.losses.items() if losses]
    if Gridformer.name not in others or len(others) < 2:
        return ["one side did not run: there is nothing to compare with"]
    others.remove(Gridformer.name)
    return [line for name in others for line in _agreement_with(comparison, name)]


def _agreement_with(comparison: Comparison, name: str) -> list[str]:
    ours, theirs = comparison.losses[Gridformer.name], comparison.losses[name]
    norms = [comparison.first_norm[side] for side in (Gridformer.name, name)]
    first, norm = abs(ours[0] / theirs[0] - 1), abs(norms[0] / norms[1] - 1)
    worst = max(abs(a / b - 1) for a, b in zip(ours, theirs))
    agree = first < LOSS_AGREES and norm < NORM_AGREES
    return [
        f"same weights, same batch as {name}: loss {ours[0]:.5f} and {theirs[0]:.5f} ({first:.1e} "
        f"apart), gradient norm {norms[0]:.4f} and {norms[1]:.4f} ({norm:.1e}): "
        + ("they agree" if agree else "THEY DISAGREE"),
        f"after {len(ours)} steps: loss {ours[-1]:.5f} and {theirs[-1]:.5f}; at most {worst:.1e} "
        "apart at any step",
    ]


def verdict(comparison: Comparison, flops: float, ceiling_tflops: float) -> list[str]:
    """Report two targets: half of the ceiling, and 1.15 times Hugging Face's fastest mode."""
    ours = [r for r in comparison.results if r.side == Gridformer.name and r.seconds]
    theirs = [r for r in comparison.results if r.side == HuggingFace.name and r.seconds]
    if not ours:
        return []
    best = min(ours, key=lambda r: r.median)
    share = flops / best.median / 1e12 / ceiling_tflops
    met = "met" if share >= CEILING_TARGET else "not met"
    lines = [f"gridformer {best.mode}: {100 * share:.1f} % of the ceiling (target 50 %: {met})"]
    if theirs:
        fastest = min(theirs, key=lambda r: r.median)
        ratio = fastest.median / best.median
        met = "met" if ratio >= RATIO_TARGET else "not met"
        lines.append(
            f"gridformer {best.mode}: {ratio:.2f} times Hugging Face {fastest.mode}, its fastest "
            f"(target 1.15: {met})"
        )
    return lines
