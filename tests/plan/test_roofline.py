"""The roofline is close to traces: it chooses what is traced, and must not pass over the best."""

from typing import Any

import pytest

from gridformer.cluster.costs import LINK_EFFICIENCY
from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.quick import quick_peaks
from gridformer.memory.ranks import largest_ranks
from gridformer.models import count_parameters
from gridformer.parallel.auto.decisions import decide_run
from gridformer.plan.predict import on_device_type, predict, record_run
from gridformer.plan.roofline import estimate
from gridformer.record import Start
from gridformer.utils.units import format_bytes
from tests.support.marks import full_unless
from tests.support.plans import cluster

LLAMA: dict[str, Any] = {"family": "llama", "n_layers": 4, "hidden_size": 2048, "n_heads": 32}
LLAMA |= {"n_kv_heads": 8, "ffn_size": 8192, "max_seq_len": 1024}
FSDP = {"dp": 8, "dp_mode": "fsdp"}
MEGATRON = {"scheme": "megatron", "cols": 4}
SEQUENCE = {**MEGATRON, "sequence_parallel": True}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
OVER_SEQUENCE = {"scheme": "megatron_2d", "rows": 4, "cols": 1, "rows_over": "sequence"}
PIPELINE = {"pp": 4, "micro_batches": 8}
SMALL, SLOW = "megatron-1.2b", "frontera-rtx5000"
# Large enough that devices, and not the host, determine the time; few layers, so that it is quick.
CASES: dict[str, tuple[str, str | dict[str, Any], dict[str, Any]]] = {
    "GPT-2, FSDP": ("dgx-h100", "gpt2-774m", FSDP),
    "GPT-2, Megatron": ("dgx-h100", "gpt2-774m", MEGATRON),
    "GPT-2, Optimus": ("dgx-h100", "gpt2-774m", OPTIMUS),
    "GPT-2, rows": ("dgx-h100", "gpt2-774m", {"scheme": "megatron_2d", "rows": 4, "cols": 1}),
    "Llama, ZeRO-1": ("dgx-h100", LLAMA, {"dp": 8, "dp_mode": "zero1"}),
    "GPT-2, shards in a node": (*("dgx-h100", "gpt2-774m"),
        {**FSDP, "dp": 32, "shard_over": 8, "devices_per_node": 8}),
    "GPT-2, sums in each micro-batch": (*("dgx-h100", "gpt2-774m"),
        {**FSDP, "dp": 32, "gradient_sync": "micro_batch", "micro_batches": 4}),
    "Llama, sequence": ("dgx-h100", LLAMA, SEQUENCE),
    "Llama, pipeline": ("dgx-h100", LLAMA, PIPELINE),
    "Llama, zero bubble": ("dgx-h100", LLAMA, {**PIPELINE, "pipeline": "zb_h1"}),
    "Llama, V": ("dgx-h100", LLAMA, {**PIPELINE, "pp": 2, "pipeline": "zbv", "stages_per_rank": 2}),
    "Llama, rows over the sequence": ("dgx-h100", LLAMA, {**OVER_SEQUENCE, "cols": 2}),
    "T5, rows over the sequence": ("dgx-h100", "t5-large", {**OVER_SEQUENCE, "scheme": "optimus"}),
    "T5, sub-graph": ("dgx-h100", "t5-large", {"scheme": "subgraph", "branches": 4}),
    "cSub": ("dgx-h100", "bert-large", {"scheme": "subgraph", "branches": 2, "common": "first"}),
    "slow links": (SLOW, SMALL, {**PIPELINE, "dp": 8, "pp": 8}),
    "slow links, interleaved": (SLOW, SMALL, {**PIPELINE, "dp": 8, "stages_per_rank": 3}),
    "slow links, FSDP": (SLOW, SMALL, {**FSDP, "pp": 8, "micro_batches": 8, "reshard": "step"}),
}  # fmt: skip


def run_of(
    model: str | dict[str, Any], layout: dict[str, Any], *sizes: str, **train: Any
) -> RunConfig:
    sections = {"model": model, "data": {"path": "."}, "layout": layout, "train": train}
    if model != SMALL:
        sizes = ("model.vocab_size=32768", "model.n_layers=4", *sizes)
        sizes += ("model.n_decoder_layers=4",) * (model == "t5-large")
    return parse_run(sections, ["train.dtype=bfloat16", *sizes])


# With a collective of each kind, a pipeline of each kind, and each family.
QUICK = {"GPT-2, sums in each micro-batch", "T5, rows over the sequence", "cSub", "Llama, sequence"}
QUICK |= {"Llama, zero bubble", "Llama, V"}
QUICK |= {"slow links", "slow links, interleaved", "slow links, FSDP", "GPT-2, FSDP"}


@pytest.mark.parametrize("name", full_unless(QUICK.__contains__, CASES))
def test_a_step_takes_about_as_long_as_its_trace_says(name: str) -> None:
    machine, model, layout = CASES[name]
    there = load_cluster(machine)
    dtype = {"dtype": "float16"} if machine == SLOW else {}
    batch = layout.get("dp", 1) * layout.get("micro_batches", 4)
    run = run_of(model, layout, global_batch=batch * (1 if machine == SLOW else 16), **dtype)
    wanted = predict(run, there, memory=False).step_s
    assert estimate(run, there).step_s == pytest.approx(wanted, rel=0.2)


@pytest.mark.parametrize("name", ["GPT-2, FSDP", "GPT-2, Optimus", "Llama, ZeRO-1"])
def test_what_muon_costs_besides_counts(name: str) -> None:
    machine, model, layout = CASES[name]
    there = load_cluster(machine)
    found = []
    for seconds in (
        lambda run: predict(run, there, memory=False).step_s,
        lambda run: estimate(run, there).step_s,
    ):
        runs = [
            run_of(model, layout, global_batch=128, optimizer=name) for name in ("adamw", "muon")
        ]
        adamw, muon = map(seconds, runs)
        found.append(muon - adamw)
    assert found[1] / found[0] == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("mode", ["replicate", "zero1", "fsdp"])
def test_messages_of_many_replicas_count_one_by_one(mode: str) -> None:
    """Over 256 replicas their latency counts: in one message they would be four times too fast."""
    run = run_of("gpt2-1.5b", {"dp": 256, "dp_mode": mode}, global_batch=256)
    wanted = predict(run, cluster(), memory=False).step_s
    assert estimate(run, cluster()).step_s == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("how", [{"recompute_layers": 2}, {"recompute": "except_attention"}])
def test_what_is_recomputed_counts(how: dict[str, Any]) -> None:
    """By as much as in traces, with long sequences."""
    model = {**LLAMA, "max_seq_len": 16384}
    runs = [
        run_of(model, OVER_SEQUENCE, global_batch=1, compile=False, **{"recompute": "full", **one})
        for one in ({}, how)
    ]
    full, less = (predict(run, cluster(), memory=False).step_s for run in runs)
    ours, saved = (estimate(run, cluster()).step_s for run in runs)
    assert saved / ours == pytest.approx(less / full, abs=0.03)
    assert less < 0.97 * full


def test_sums_in_each_micro_batch_take_their_time() -> None:
    layout = {**FSDP, "dp": 64, "micro_batches": 8}
    runs = [
        run_of("gpt2-774m", {**layout, "gradient_sync": sync}, global_batch=512)
        for sync in ("step", "micro_batch")
    ]
    once, each = (predict(run, cluster(), memory=False).step_s for run in runs)
    ours, often = (estimate(run, cluster()).step_s for run in runs)
    assert ours / often == pytest.approx(once / each, abs=0.05)
    assert once < 0.8 * each


def test_stages_wait_for_messages_in_each_round_of_micro_batches() -> None:
    """A rank that has one stage runs no more passes ahead than there are stages after it."""
    one, four = (
        estimate(run_of(LLAMA, {**PIPELINE, "micro_batches": m}, global_batch=m), cluster())
        for m in (4, 16)
    )
    assert 0 < four.load.exposed["pp"] == pytest.approx(4 * one.load.exposed["pp"])


def test_a_chunked_head_by_panels_takes_longer() -> None:
    """The panels of its table travel again for each chunk of the loss."""
    grid = {"scheme": "optimus", "rows": 2, "cols": 4, "schedule": "broadcast"}
    runs = [run_of("gpt2-774m", grid, global_batch=16, loss_chunk_tokens=n) for n in (0, 1024)]
    before, after = (predict(run, cluster(), memory=False).step_s for run in runs)
    ours, longer = (estimate(run, cluster()).step_s for run in runs)
    assert after > 1.5 * before
    assert longer > 1.25 * ours


@pytest.mark.parametrize("layout", [{}, {**MEGATRON, "dp": 2, "dp_mode": "fsdp"}])
def test_moments_in_host_memory_take_the_time_of_their_copies(layout: dict[str, Any]) -> None:
    """Both moments of each parameter, of 4 bytes each, travel to the device and back."""
    plain, moved = (
        run_of(LLAMA, layout, global_batch=32, offload=offload, compile=False)
        for offload in ("none", "optimizer")
    )
    each = count_parameters(moved.model) / moved.layout.n_processes
    seconds = 16 * each / (63e9 * LINK_EFFICIENCY)
    traced = predict(moved, cluster(), memory=False)
    memory = cluster().device.memory_gbps.value * 1e9 * cluster().number("memory_efficiency")
    assert traced.parts.update == pytest.approx(seconds + 28 * each / memory, rel=0.03)
    more = estimate(moved, cluster()).step_s - estimate(plain, cluster()).step_s
    assert more == pytest.approx(seconds, rel=0.03)
    assert not any("link_gbps" in said for said in traced.warnings)


def test_an_assumed_link_to_the_host_is_named() -> None:
    host = cluster().host.model_copy(update={"link_gbps": None})
    there = cluster().model_copy(update={"host": host})
    for offload, named in (("optimizer", True), ("none", False)):
        run = run_of("gpt2-774m", {}, global_batch=8, offload=offload)
        said = "dgx-h100 does not state host.link_gbps: 15.75 GB/s are assumed"
        found = predict(run, there, memory=False).warnings
        assert any(said in one for one in found) == named


def test_kinds_of_kernels_agree() -> None:
    """Products and attention come from the same table of costs."""
    run = run_of("gpt2-774m", {"scheme": "megatron_2d", "rows": 2, "cols": 2}, global_batch=32)
    load, parts = estimate(run, cluster()).load, predict(run, cluster(), memory=False).parts
    assert load.products == pytest.approx(parts.products, rel=0.02)
    assert load.attention == pytest.approx(parts.attention, rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        {**MEGATRON, "dp": 2, "experts_over": ["dp"]},
        {**OPTIMUS, "experts_over": ["rows"]},
        # Where only the first branch has tokens, it sends all of them.
        {"scheme": "subgraph", "branches": 2, "common": "first", "experts_over": ["branches"]},
    ],
    ids=["columns share experts", "columns share the experts of rows", "cSub"],
)
def test_each_token_travels_once_to_an_expert(layout: dict[str, Any]) -> None:
    """Columns send parts of their tokens, and gather those of their experts."""
    model = {**LLAMA, "n_experts": 8, "experts_per_token": 2, "expert_size": 2048}
    run = run_of(model, layout, "model.n_layers=2", global_batch=16)
    traced = predict(run, cluster(), memory=False).parts.exposed["experts"]
    assert estimate(run, cluster()).load.exposed["experts"] == pytest.approx(traced, rel=0.1)
    reasons = decide_run(run).choices.reasons
    (sent,) = {
        one.size
        for one in record_run(run).traces[0].unfolded()
        if isinstance(one, Start) and (one.axis, one.dtype) == ("experts", "bfloat16")
    }
    said = f"a device sends {format_bytes(2 * sent)} of tokens"
    assert any(said in one for one in reasons), reasons


def test_without_a_head_of_tokens_nothing_multiplies_by_their_table() -> None:
    run = run_of(LLAMA, {}, global_batch=8)
    changes = {"token_head": False, "n_labels": 2}
    other = run.model_copy(update={"model": run.model.model_copy(update=changes)})
    words, labels = (estimate(one, cluster()) for one in (run, other))
    assert labels.load.products < 0.95 * words.load.products
    assert labels.peak_gib <= words.peak_gib


@pytest.mark.parametrize("stages", [1, 2, 3, "zb_h1", "zbv"])
def test_memory_of_pipelines(stages: int | str) -> None:
    """More micro-batches are under way on the first rank if it has several stages."""
    k = stages if isinstance(stages, int) else 1 + (stages == "zbv")
    order = {"stages_per_rank": k, "pipeline": "auto" if isinstance(stages, int) else stages}
    layout = {"pp": 4, "micro_batches": 16, **order}
    sections = {"model": "gpt2-355m", "data": {"path": "."}, "layout": layout}
    run = parse_run({**sections, "train": {"global_batch": 64, "dtype": "bfloat16"}})
    run = on_device_type(run, "cuda")
    traced = max(estimate_rank(run, rank).peak for rank in largest_ranks(run, decide_run(run)))
    assert 0.9 <= max(quick_peaks(run, decide_run(run).choices)) / traced <= 1.1
