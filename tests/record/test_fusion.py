"""Kernels of compiled modules are joined as torch.compile joins them, and priced so."""

from collections import Counter
from typing import Any

import pytest

from gridformer.cluster.file import load_cluster
from gridformer.config import parse_run
from gridformer.launch.plan import read_run_without_data
from gridformer.plan.predict import predict, record_run
from gridformer.record.events import Kernel

B, S, H, F = 2, 64, 32, 96
UNIT = B * S * H * 2  # bytes of an activation [b, s, h] in bfloat16
SIZES: dict[str, Any] = {"n_layers": 3, "hidden_size": H, "n_heads": 2, "vocab_size": 256}
LLAMA = {**SIZES, "family": "llama", "ffn_size": F, "max_seq_len": S}


def kernels(layout: dict[str, Any] | None = None, **train: Any) -> list[Kernel]:
    """Return the kernels of the second layer in a step of the first rank."""
    run = parse_run(
        {
            "model": LLAMA,
            "layout": layout or {},
            "data": {"path": "x"},
            "train": {"global_batch": B, "dtype": "bfloat16", **train},
        }
    )
    events = record_run(run).traces[0].unfolded()
    every = [event for event in events if isinstance(event, Kernel)]
    return [one for one in every if f"{one.place.module}.".startswith("layers.1.")]


def memory_of(found: list[Kernel]) -> list[tuple[str, bool, int]]:
    """Return where memory-bound kernels outside of products are, forward and backward."""
    return [
        (one.place.module.removeprefix("layers.1"), one.place.backward, one.bytes)
        for one in found
        if one.kind == "memory" and not one.place.module.endswith((".qkv", ".out", ".up", ".down"))
    ]


def test_a_layer_reads_and_writes_what_compiled_code_does() -> None:
    found = memory_of(kernels())
    f = F / H
    forward = [round(n_bytes / UNIT, 1) for _, backward, n_bytes in found if not backward]
    # Norm; rotation of queries and keys, with its angles; sum and norm; silu(gate) * up; sum.
    assert forward == pytest.approx([2, 4, 4, 3 * f, 3], abs=0.6)
    backward = [round(n_bytes / UNIT, 1) for _, backward, n_bytes in found if backward]
    # Gate and up, beside each other; norm; its weight's sum; rotation, with values; norm; its sum.
    assert backward == pytest.approx([5 * f, 4, 2, 6, 4, 2], abs=0.6)


def test_only_memory_bound_kernels_change() -> None:
    def others(found: list[Kernel]) -> Counter[tuple[Any, ...]]:
        return Counter(one[:6] for one in found if one.kind != "memory")

    joined, single = kernels(), kernels(compile=False)
    assert others(joined) == others(single)
    assert len(memory_of(joined)) < len(memory_of(single)) / 2
    assert len(kernels(recompute="except_attention")) > len(single)


def test_what_communicates_stays_uncompiled() -> None:
    """Products stay as they are; norms become what is before their messages, and after them."""
    grid = {"scheme": "optimus", "rows": 2, "cols": 2}
    joined, single = (memory_of(kernels(grid, compile=on)) for on in (True, False))

    def of_norms(found: list[tuple[str, bool, int]]) -> list[tuple[str, bool, int]]:
        return [one for one in found if "norm" in one[0]]

    # The sum before the second norm is joined with it. Backward has what its weight's sum reads.
    assert len(of_norms(joined)) == 2 + 1 + 2 * 4
    assert len(of_norms(single)) == 2 * (9 + 14)
    assert len(joined) < len(single) / 2


# Milliseconds on an H100: docs/results/gpu.md.
MEASURED = {
    "gpt2-774m": (129.0, 107.0, {"global_batch": 8}, 1024),
    "llama-3.2-1b": (201.6, 147.6, {"global_batch": 4}, 2048),
}


@pytest.mark.parametrize("model", MEASURED)
def test_compiled_steps_are_as_much_faster_as_on_a_gpu(model: str) -> None:
    eager_ms, compiled_ms, train, tokens = MEASURED[model]
    settings = [f"data.seq_len={tokens}", "train.dtype=bfloat16"]
    settings += [f"train.{key}={value}" for key, value in train.items()]
    eager, compiled = (
        predict(
            read_run_without_data(model, [*settings, f"train.compile={mode}"]),
            load_cluster("dgx-h100"),
            memory=False,
        ).step_s
        for mode in ("false", "auto")
    )
    assert compiled / eager == pytest.approx(compiled_ms / eager_ms, rel=0.1)
    assert 1e3 * compiled == pytest.approx(compiled_ms, rel=0.1)
