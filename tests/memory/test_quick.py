"""Quick estimates are close to those from the real code, and the bounds hold."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gridformer.config import RunConfig, parse_run
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.quick import quick_estimate, states_of
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.validation import check_layout
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

Settings = dict[str, Any]
MODEL: Settings = {"hidden_size": 128, "n_layers": 4, "n_heads": 8}
MEGATRON: Settings = {"scheme": "megatron", "cols": 4}
SEQUENCE: Settings = {**MEGATRON, "sequence_parallel": True}
GRID: Settings = {"scheme": "optimus", "rows": 2, "cols": 2}
BRANCHES: Settings = {"scheme": "subgraph", "branches": 4}
ZERO1: Settings = {"dp": 2, "dp_mode": "zero1"}
FSDP: Settings = {"dp": 2, "dp_mode": "fsdp"}
STEP: Settings = {"dp": 4, "dp_mode": "fsdp", "reshard": "step"}
EACH_PASS: Settings = {"dp": 8, "dp_mode": "fsdp", "gradient_sync": "micro_batch"}
EACH_PASS |= {"micro_batches": 4}
EXCEPT: Settings = {"recompute": "except_attention"}
FULL: Settings = {"recompute": "full"}


class Case(NamedTuple):
    """A run, how far its quick estimate may be off, and whether `make test` has it."""

    model: Settings | str
    layout: Settings
    train: Settings
    low: float
    high: float
    quick: bool = False

    @property
    def title(self) -> str:
        parts = [*self.layout.values(), *self.train.values()]
        return "-".join(map(str, [self.model if isinstance(self.model, str) else "", *parts]))

    @property
    def run(self) -> RunConfig:
        if isinstance(self.model, dict):
            return a_run(self.layout, self.model, self.train)
        # Eight layers of each stack of a model, four sequences to a replica.
        sizes = ["model.n_layers=8"] + ["data.seq_len=2048"] * ("llama" in self.model)
        sizes += ["model.n_decoder_layers=8"] * self.model.startswith("t")
        batch = 4 * self.layout.get("dp", 1) * self.layout.get("micro_batches", 1)
        train = {"global_batch": batch, "dtype": "bfloat16", "device": "cuda", **self.train}
        sections = {"model": self.model, "data": {"path": "."}, "layout": self.layout}
        return parse_run({**sections, "train": train}, sizes)


LAYOUTS = [{}, ZERO1, FSDP, MEGATRON, SEQUENCE, GRID, BRANCHES, {**BRANCHES, "common": "first"}]
LAYOUTS += [{"pp": 2, "micro_batches": 2}]
CASES = [
    Case(MODEL, layout, train, 0.6, 1.6, (len(layout) != 2 and not train) or layout == GRID)
    for layout in LAYOUTS
    for train in ({}, FULL)
]
# A backward pass of grouped heads and gated networks has tensors as wide as they are.
GROUPED = {**MODEL, "family": "llama", "n_kv_heads": 2, "ffn_size": 512, "tied_head": False}
BF16 = {"dtype": "bfloat16", "device": "cuda", "global_batch": 4}
CASES += [
    Case({**GROUPED, "max_seq_len": 4096}, {**MEGATRON, "cols": 2}, {**BF16, **how}, 0.9, 1.25, q)
    for how, q in (({}, False), (FULL, True))
]
# Keys and values of long sequences are gathered for each layer.
ROWS: Settings = {"rows": 4, "cols": 2, "rows_over": "sequence"}
LONG: Settings = {**GROUPED, "n_layers": 8, "max_seq_len": 16384}
CASES += [
    Case(LONG, {**ROWS, "scheme": scheme}, {**BF16, **how}, 0.9, 1.25, scheme != "optimus" and q)
    for scheme in ("megatron_2d", "optimus")
    for how, q in (({"recompute": "none"}, True), ({"recompute": "selective"}, False), (FULL, True))
]
# Devices with whole tokens hold all of a learned table of positions, those of a first stage alone.
POSITIONS: Settings = {"hidden_size": 1024, "n_layers": 4, "n_heads": 8, "max_seq_len": 8192}
FIRST: Settings = {**ROWS, "scheme": "megatron_2d", "pp": 2, "micro_batches": 2}
CASES += [Case(POSITIONS, FIRST, {**BF16, **FULL, "global_batch": 2}, 0.85, 1.2, True)]
# As on clusters of the time before fused attention, whose files say `fused_attention`. The head
# counts as a layer, which of few layers is a large part.
UNFUSED = {**MODEL, "max_seq_len": 1024, "attention_dropout": 0.1}
TORCH = {"device": "cuda", "kernels": "torch", "global_batch": 8}
CASES += [
    Case(
        {**UNFUSED, "n_layers": 16 if "pp" in layout else 4},
        *(layout, {**TORCH, "dtype": dtype, "recompute": recompute}, 0.85, 1.15),
        (recompute, dtype) == ("none", "bfloat16"),
    )
    for layout, recompute in (
        *(({}, "none"), ({}, "selective"), ({}, "full")),
        ({"scheme": "megatron_2d", "rows": 2, "cols": 2}, "none"),
        ({"pp": 2, "micro_batches": 4}, "none"),
        ({"pp": 2, "micro_batches": 4, "pipeline": "zb_h1"}, "none"),
        ({"pp": 2, "micro_batches": 4, "pipeline": "zbv", "stages_per_rank": 2}, "none"),
    )
    for dtype in ("float32", "bfloat16")
]
# Long sequences make gathered activations large, and a table what FSDP gathers. What branches hold
# while they are recomputed is counted high.
LONG = {"family": "llama", "n_layers": 4, "hidden_size": 256, "n_heads": 8, "n_kv_heads": 4}
LONG |= {"ffn_size": 896, "tied_head": False, "max_seq_len": 8192, "vocab_size": 4096}
CASES += [
    Case(
        *(LONG, layout, {**BF16, "global_batch": 8, "loss_chunk_tokens": 2048, **how}, 0.85),
        1.2 if "branches" in layout and how else 1.15,
        bool(how) and "branches" not in layout and "pp" not in layout,
    )
    for layout in (
        *({"dp": 4, "dp_mode": "fsdp"}, MEGATRON, SEQUENCE, {**SEQUENCE, **FSDP}),
        {**SEQUENCE, "pp": 2, "stages_per_rank": 2, "micro_batches": 4},
        {"scheme": "megatron_2d", "rows": 2, "cols": 4},
        {"scheme": "megatron_2d", "rows": 4, "cols": 2},
        *({**GRID, "cols": 4}, {**GRID, "rows": 4, "cols": 4}),
        *({**GRID, "schedule": "pipelined"}, BRANCHES),
    )
    for how in ({}, FULL)
]
# What one layer keeps, and what there is of the table, differ between families, and what FSDP
# gathers counts where states are small.
CASES += [
    Case(model, layout, train, 0.85, 1.2, number >= 10)
    for number, (model, layout, train) in enumerate(
        (
            ("t5-large", {**MEGATRON, **STEP}, {}),
            ("transformer-big", {**GRID, "dp": 4, "dp_mode": "fsdp"}, FULL),
            ("llama-3.2-1b", {**EACH_PASS, **MEGATRON}, {}),
            *(("llama-3.1-8b", STEP, FULL), ("llama-3.1-8b", {**ZERO1, "dp": 4}, FULL)),
            ("llama-3.1-8b", {"pp": 2, "micro_batches": 2}, {"offload": "optimizer"}),
            ("t5-large", {"pp": 2, "micro_batches": 4}, FULL),
            ("llama-3.2-1b", {**EACH_PASS, "shard_over": 2}, FULL),
            ("bert-large", {**GRID, **STEP}, {}),
            ("llama-3.2-1b", MEGATRON, {**FULL, "recompute_layers": 4}),
            ("t5-large", MEGATRON, {}),  # from here on in `make test`
            ("t5-large", {}, {"dtype": "float32", "device": "cpu"}),  # keeps scores
            ("transformer-big", STEP, {}),
            *(("llama-3.2-1b", GRID, FULL), ("llama-3.2-1b", {**BRANCHES, **STEP}, FULL)),
            ("llama-3.2-1b", {**EACH_PASS, "pp": 2}, FULL),
            ("llama-3.2-1b", {"pp": 2, "micro_batches": 4}, {**EXCEPT, "recompute_layers": 3}),
            ("llama-3.2-1b", {**SEQUENCE, **STEP}, EXCEPT),
        )
    )
]


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case.quick, CASES), ids=lambda case: case.title
)
def test_quick_estimates_are_close(case: Case) -> None:
    run = case.run
    peak = max(estimate_rank(run, rank, timeline=False).peak for rank in largest_ranks(run))
    assert states_of(run) < peak
    assert case.low < quick_estimate(run) / peak < case.high


@pytest.mark.parametrize("layout", [{"dp": 64, "dp_mode": "fsdp"}, {**GRID, **ZERO1}])
def test_experts_of_a_folder(tmp_path: Path, layout: Settings) -> None:
    """More replicas than experts, too: each then has rows of every expert."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 8}
    config = transformers.MixtralConfig(**sizes, **heads, vocab_size=512)
    made = {**config.to_dict(), "architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(made))
    train = {"global_batch": 128, "dtype": "bfloat16", "device": "cuda", **FULL}
    sections = {"model": {"folder": str(tmp_path)}, "data": {"path": ".", "seq_len": 256}}
    run = check_layout(parse_run({**sections, "layout": layout, "train": train}))
    peak = estimate_rank(run, 0, timeline=False).peak
    assert 0.4 < quick_estimate(run) / peak < 1.2
