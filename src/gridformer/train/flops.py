"""How many floating-point operations a step takes, and how well they utilize the devices.

Only matrix products count, 2mnk each and twice that in the backward pass; attention counts all
pairs of positions, and padding counts like text, as is usual for MFU (Narayanan et al. 2021;
Chowdhery et al. 2022, appendix B). Model operations count one device without recomputation;
hardware operations add what `train.recompute` computes again (Korthikanti et al. 2022).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from gridformer.config import ModelConfig, RunConfig
from gridformer.parallel.auto.products import recompute_share

TERA = 1e12
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


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step on all devices together."""

    model: int  # the operations of the model itself
    hardware: int  # `model`, and what is recomputed

    @staticmethod
    def of(run: RunConfig, stops_early: bool = True, layers_only: bool = False) -> StepFlops:
        """Counts the operations of a run's step.

        Args:
            run: The run, with its vocabulary and lengths resolved.
            stops_early: Whether recomputation stops early; see `models.blocks.Recompute`.
            layers_only: Whether only transformer layers count.
        """
        model, s, source = run.model, run.seq_len, run.source_len
        stacks = [_stack(model, model.n_layers, s)]
        if model.two_stacks:
            stacks = [
                _stack(model, model.n_layers, source),
                _stack(model, model.n_decoder_layers, s, source),
            ]
        layers, scores, last = map(sum, zip(*stacks))
        forward = layers + (0 if layers_only else _heads(model, s))
        again = 0
        if run.train.recomputes_blocks:
            # Nothing else reads the result of the last product, except for a norm after the layer.
            again = layers - last * (stops_early and model.norm_position == "pre")
            if run.train.recompute == "except_attention":  # whose kernel is fused
                again -= 2 * scores
            again = round(again * recompute_share(run))
        elif run.train.recompute == "selective":  # a fused kernel has both products
            again = scores * (1 if model.attention_dropout > 0.0 else 2)
        sequences = run.train.global_batch * run.sequences_per_sample
        return StepFlops(sequences * 3 * forward, sequences * (3 * forward + again))


def _stack(model: ModelConfig, n_layers: int, s: int, source: int = 0) -> tuple[int, int, int]:
    """Returns the operations of an encoder or a decoder for one sequence.

    Args:
        model: The model.
        n_layers: The layers of the stack.
        s: The tokens of the sequence.
        source: The number of tokens that cross-attention reads; 0 without it.

    Returns:
        The operations of the forward pass of all layers; of their products of queries and keys,
        which are as many as those with values; and of the last product of each layer, if nothing in
        the layer reads its result.
    """
    h, inner = model.hidden_size, model.n_heads * model.head_width
    both = inner + model.kv_heads * model.head_width
    scores = n_layers * 2 * s * (s + source) * inner
    widths = unread = n_layers * model.ffn_size
    if model.n_experts:
        widths = model.ffn_widths(model.experts_per_token)
        unread = model.ffn_widths(0)  # the gradients of gates read what experts return
    inside = 2 * s * h * widths
    weights = s * 2 * both * h  # queries and output, keys and values
    if source:
        weights += s * 2 * inner * h + source * 2 * inner * h
    routers = 2 * s * h * model.n_experts * (n_layers - model.dense_layers)
    forward = n_layers * 2 * weights + 2 * scores + (2 + model.gated) * inside + routers
    return forward, scores, 2 * s * h * unread


def _heads(model: ModelConfig, s: int) -> int:
    """The forward pass of all heads for one sequence."""
    h = model.hidden_size
    flops = 2 * s * h * model.vocab_size * model.token_head
    if model.family == "bert":
        flops += 2 * s * h * h * model.token_head  # the transform before the head
        if model.sentence_pair and not model.n_labels:
            flops += 2 * h * (h + 2)
    flops += 2 * s * h * 2 * model.span_head
    if model.n_labels:
        pooled = model.pooled_labels  # reads one token; without a pooler, the head reads them all
        flops += 2 * h * (h + model.n_labels) if pooled else 2 * s * h * model.n_labels
    return flops


@dataclass(frozen=True)
class Utilization:
    """Turns the time of a step into the speed and utilization of each device."""

    flops: StepFlops  # the operations of a step
    n_devices: int  # one for each process
    peak: float  # the peak of one device in TFLOP/s; 0 if it is unknown

    @staticmethod
    def of(run: RunConfig, device: torch.device, stops_early: bool) -> Utilization:
        """Looks up the peak of a device, unless `train.peak_tflops` sets it."""
        peak = run.train.peak_tflops
        if not peak and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            peak = peak_tflops(name, run.train.dtype, run.train.tf32) or 0.0
        return Utilization(StepFlops.of(run, stops_early), run.layout.n_processes, peak)

    def metrics(self, seconds: float) -> dict[str, float]:
        """Returns a step's TFLOP/s of each device and, if the peak is known, MFU and HFU."""
        each = seconds * self.n_devices * TERA
        model, hardware = self.flops.model / each, self.flops.hardware / each
        speeds = {"model_tflops": model, "hardware_tflops": hardware}
        if self.peak:
            speeds |= {"mfu": model / self.peak, "hfu": hardware / self.peak}
        return speeds


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
