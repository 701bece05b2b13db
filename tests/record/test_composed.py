"""A step that is composed from short ones is the complete step: its events, memory and seconds."""

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gridformer.cluster.file import load_cluster
from gridformer.config import LayoutConfig, PipelineOrder, RunConfig, parse_run
from gridformer.memory.estimate import Changes, changes_of
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto import heuristics
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.plan.predict import Recorded, different_ranks, price
from gridformer.record import Start, Trace, layers, rank
from gridformer.record.events import Held, Kernel, Wait
from gridformer.record.itineraries import shortened
from gridformer.record.layers import NotPeriodicError
from gridformer.record.rank import RankRecord, record_ranks
from gridformer.record.step import RecordOptions, StepPart, StepRecord, record_step
from gridformer.train import muon
from tests.support.foreign import save_llama
from tests.support.marks import full_unless
from tests.support.multirank import own_networks
from tests.support.multirank.matrix import CELLS, HEADS, QUICK, Cell, time_of
from tests.support.multirank.memory import a_run
from tests.support.traces import comparable

MEGATRON = {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 6}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2, "micro_batches": 6}
FULL = {"recompute": "full"}
PLACEHOLDER = 8  # bytes of what stands for joined weights; torch frees these in any order
V_SHAPED = {"pipeline": "zbv", "stages_per_rank": 2}
BY_LAYER = {"update": "in_backward", "clip_by": "layer"}
BRANCHES = {"scheme": "subgraph", "branches": 2}
EXPERTS: dict[str, Any] = {"family": "llama", "n_experts": 4, "experts_per_token": 2}
# Layouts and training settings. The models have ten layers a stage; the names with a star run in
# `make test`.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one device": ({}, {"recompute": "selective"}, {}),
    "moments in bfloat16": ({}, {"moments_dtype": "bfloat16"}, {}),
    "pipelined products": ({**OPTIMUS, "schedule": "pipelined"}, FULL, {}),
    "sums over replicas*": ({**MEGATRON, "dp": 2}, {"dtype": "bfloat16"}, {}),
    "gathered products": ({**OPTIMUS, "schedule": "gather", "dp": 2}, FULL, {}),
    "broadcast*": ({"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast"}, {}, {}),
    "gpipe": ({**MEGATRON, "pipeline": "gpipe"}, {"device": "cuda"}, {}),
    "interleaved": ({**MEGATRON, "stages_per_rank": 2}, {"device": "cuda"}, {}),
    "interleaved on four ranks": ({**MEGATRON, "pp": 4, "stages_per_rank": 2, "micro_batches": 8},
        {"dtype": "bfloat16"}, {}),
    "zero bubble*": ({**MEGATRON, "pipeline": "zb_h1", "dp": 2, "dp_mode": "zero1"},
        {"device": "cuda", "dtype": "bfloat16"}, {"family": "llama"}),
    "zero bubble on four ranks": ({"pp": 4, "micro_batches": 12, "pipeline": "zb_h1"}, FULL, {}),
    "zero bubble, sums in each pass": (
        {"pp": 3, "micro_batches": 12, "pipeline": "zb_h1", "dp": 2, "dp_mode": "fsdp"}
        | {"gradient_sync": "micro_batch"},
        {"device": "cuda"}, {}),
    "zero bubble on a grid": ({**OPTIMUS, "schedule": "gather", "pipeline": "zb_h1"}, {}, {}),
    "V*": ({**MEGATRON, "pp": 4, "micro_batches": 12, **V_SHAPED}, {"device": "cuda"}, {}),
    "V, sums in each pass": (
        {"pp": 3, "micro_batches": 12, **V_SHAPED, "dp": 2, "dp_mode": "fsdp"}
        | {"gradient_sync": "micro_batch"},
        {"device": "cuda", **FULL}, {"family": "llama"}),
    "deep V": ({"pp": 7, "micro_batches": 15, **V_SHAPED}, {"device": "cuda"}, {}),
    "deep": ({"pp": 8, "micro_batches": 20}, {"device": "cuda"}, {}),
    "fewer micro-batches than ranks": ({"pp": 6, "micro_batches": 3}, {}, {}),
    "prefetched": ({**OPTIMUS, "schedule": "gather", "stages_per_rank": 2}, {}, {}),
    "kept weights": ({**OPTIMUS, "schedule": "gather", "keep_gathered": "weights"}, {}, {}),
    "all logits": (MEGATRON, {"loss_chunk_tokens": 0, "dtype": "float16"}, {}),
    "in backward": ({**MEGATRON, "dp": 2}, {**BY_LAYER, **FULL}, {}),
    "offload": (MEGATRON, {"offload": "optimizer", "device": "cuda"}, {}),
    "zero1": ({"dp": 2, "dp_mode": "zero1"}, {}, {"family": "t5"}),
    "zero1 on a grid, interleaved": (
        {**OPTIMUS, "schedule": "gather", "dp": 2, "dp_mode": "zero1", "stages_per_rank": 2},
        {"dtype": "bfloat16", **FULL, "device": "cuda"}, {}),
    "fsdp": ({**MEGATRON, "dp": 2, "dp_mode": "fsdp"}, {**FULL, "device": "cuda"}, {}),
    "fsdp, interleaved, sequence parallel": (
        {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "stages_per_rank": 2, "sequence_parallel": True},
        {"recompute": "selective"}, {"family": "llama"}),
    "fsdp without a pipeline*": ({"dp": 4, "dp_mode": "fsdp"}, {"device": "cuda"}, {}),
    "joined weights": ({**MEGATRON, "dp": 2}, {"dtype": "float32"}, {"family": "llama"}),
    "grid with weights over rows": ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "dp": 2},
        {"device": "cuda"}, {}),
    "sub-graphs": ({**BRANCHES, "pp": 2, "micro_batches": 6}, {}, {"dropout": 0.1}),
    "cSub*": ({**BRANCHES, "common": "first", "pp": 2, "micro_batches": 4}, {"device": "cuda"}, {}),
    "encoder and decoder in a pipeline": ({**MEGATRON, "pp": 4}, {}, {"family": "t5"}),
    # Matrices of several layers are updated together.
    "Muon": ({**OPTIMUS, "dp": 2}, {"optimizer": "muon", "dtype": "bfloat16"}, {"family": "llama"}),
    "Muon, zero1*": ({**MEGATRON, "dp": 2, "dp_mode": "zero1"},
        {"optimizer": "muon", "device": "cuda"}, {}),
    "Muon, fsdp": ({"dp": 2, "dp_mode": "fsdp"},
        {"optimizer": "muon", "device": "cuda", "recompute": "full", "recompute_layers": 4},
        {"family": "t5"}),
    "Muon by head, interleaved": ({**MEGATRON, "dp": 2, "dp_mode": "fsdp", "stages_per_rank": 2},
        {"optimizer": "muon", "muon_by_head": True, "dtype": "bfloat16"}, {"family": "t5"}),
    "Muon by layer": ({"dp": 2, "dp_mode": "zero1"},
        {"optimizer": "muon", "clip_by": "layer", "device": "cuda"}, {}),
    "Muon, experts": ({**MEGATRON, "dp": 2, "experts_over": ["cols"]},
        {"optimizer": "muon", "device": "cuda"}, {**EXPERTS, "dense_layers": 2}),
    "saves meanwhile": ({"pp": 2, "micro_batches": 4}, {"async_save": True, "save_every": 1}, {}),
    "in backward, sequence parallel": (
        {**MEGATRON, "sequence_parallel": True, "pp": 4, "micro_batches": 8},
        {**BY_LAYER, **FULL, "device": "cuda"}, {"n_layers": 8}),
    # The second micro-batch stands for all in the middle.
    "chunks of the loss*": ({"micro_batches": 7}, {"loss_chunk_tokens": 2}, {}),
    "broadcast, several micro-batches": (
        {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast", "micro_batches": 5},
        {"loss_chunk_tokens": 2}, {"family": "bert"}),
    "fsdp, several micro-batches*": ({"dp": 2, "dp_mode": "fsdp", "micro_batches": 4},
        {"dtype": "bfloat16", "device": "cuda"}, {"family": "llama", "n_layers": 2}),
    "sums in each micro-batch*": (
        {"dp": 4, "dp_mode": "fsdp", "shard_over": 2, "gradient_sync": "micro_batch"}
        | {"micro_batches": 5},
        {"dtype": "bfloat16", "device": "cuda"}, {}),
    "sums in each pass of a pipeline": (
        {**MEGATRON, "dp": 2, "dp_mode": "zero1", "gradient_sync": "micro_batch"}
        | {"stages_per_rank": 2},
        {"device": "cuda"}, {}),
    # A sum of the last pass of a stage must not end in whatever pass comes next.
    "sums in each pass, three stages a rank": (
        {"pp": 4, "dp": 2, "dp_mode": "fsdp", "gradient_sync": "micro_batch"}
        | {"stages_per_rank": 3, "micro_batches": 16},
        {"device": "cuda"}, {"n_layers": 12}),
    # Their sums of gradients fill several buckets.
    "copies of heads of keys*": ({"scheme": "subgraph", "branches": 4, "common": "first"},
        {"device": "cuda"},
        {"family": "llama", "n_heads": 4, "n_kv_heads": 2, "hidden_size": 2048}),
    # Small parts of them, of all layers more than a bucket holds.
    "copies of heads in parts": (
        {"scheme": "subgraph", "branches": 4, "common": "first", "dp": 8, "dp_mode": "fsdp"},
        {"device": "cuda"},
        {"family": "llama", "n_heads": 4, "n_kv_heads": 2, "hidden_size": 2048, "n_layers": 30}),
    "layers of two kinds": ({**MEGATRON, "dp": 2, "dp_mode": "fsdp"},
        {"recompute": "full", "recompute_layers": 5, "device": "cuda"}, {}),
    "layers of two kinds in two stacks": ({"micro_batches": 2},
        {"recompute": "except_attention", "recompute_layers": 4, "dtype": "bfloat16"},
        {"family": "t5"}),
    "attention is kept*": ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "dp": 2},
        {"recompute": "except_attention", "device": "cuda", "dtype": "bfloat16"},
        {"family": "llama", "attention_dropout": 0.1}),
    # A single micro-batch is the first and the last one, and the stages of a rank are equal.
    "one micro-batch": ({**MEGATRON, "pp": 4, "micro_batches": 1, "stages_per_rank": 3, "dp": 2},
        {"dtype": "bfloat16", "device": "cuda"}, {}),
    "one micro-batch, fsdp": (
        {"pp": 4, "micro_batches": 1, "stages_per_rank": 3, "dp": 2, "dp_mode": "fsdp"},
        {"dtype": "bfloat16", **FULL}, {"n_layers": 168}),  # the last stage's repeat after eight
    "one micro-batch, zero1": (
        {"pp": 4, "micro_batches": 4, "stages_per_rank": 3, "dp": 2, "dp_mode": "zero1"},
        {"device": "cuda"}, {}),
    "both neighbors are one rank*": ({"pp": 2, "micro_batches": 6, "stages_per_rank": 3},
        {"device": "cuda"}, {"n_layers": 12}),
    # Counters of dropout are copied before the first pass of a micro-batch.
    "dropout, interleaved*": ({"pp": 4, "micro_batches": 12, "stages_per_rank": 2},
        {"device": "cuda"}, {"n_layers": 16, "dropout": 0.1}),
    # The last pass of each kind has begun to gather the first weights of the next one.
    "gathered in advance*": ({**OPTIMUS, "micro_batches": 12, "dp": 2, "dp_mode": "zero1"},
        {"device": "cuda"}, {"family": "bert", "n_layers": 4}),
    # The first pass of a stage adds to gradients of a parameter that T5's decoder shares.
    "shared parameters": ({"pp": 4, "micro_batches": 8, "stages_per_rank": 3}, {"device": "cuda"},
        {"family": "t5", "n_layers": 6, "n_decoder_layers": 18}),
    # A pass that counts tokens comes first; and layers without experts, which are not left out.
    "experts*": ({"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}
        | {"experts_over": ["cols", "dp"], "micro_batches": 6},
        {"device": "cuda", "dtype": "bfloat16"}, {**EXPERTS, "balance_loss": 0.01}),
    "experts in a pipeline*": (
        {**MEGATRON, "dp": 4, "dp_mode": "zero1", "experts_over": ["dp"], "experts_dp": 2},
        {"device": "cuda", **FULL},
        {**EXPERTS, "dense_layers": 2, "shared_size": 32}
        | {"router": "sigmoid", "router_bias": True}),
    "experts that are counted in a pipeline": ({**MEGATRON, "experts_over": ["cols"]},
        {"device": "cuda"}, {**EXPERTS, "balance_loss": 0.01}),
    "experts on a grid": ({**OPTIMUS, "dp": 2, "dp_mode": "fsdp", "experts_over": ["rows"]},
        {"dtype": "bfloat16"}, EXPERTS),
    "experts in sub-graphs": ({**BRANCHES, "common": "first", "experts_over": ["branches"]},
        {"device": "cuda"}, EXPERTS),
}  # fmt: skip


def run_of(layout: dict[str, Any], train: dict[str, Any], model: dict[str, Any]) -> RunConfig:
    n_layers = 10 * layout.get("pp", 1) * layout.get("stages_per_rank", 1)
    sizes = {"n_layers": n_layers, "max_seq_len": 8}
    if model.get("family") == "t5":
        sizes["n_decoder_layers"] = n_layers
    run = a_run(layout, {**sizes, **model}, {"global_batch": 48, **train})
    if layout.get("micro_batches", 6) != 6 or layout.get("pp", 1) == 1:
        rows = layout.get("micro_batches", 1) * layout.get("dp", 1) * 4
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": rows})})
    check_layout(run)
    return run


def both(
    run: RunConfig, how: RecordOptions | None = None
) -> Iterator[tuple[RankRecord, RankRecord]]:
    """Yield the record of each kind of rank: composed, and of the complete step."""
    decisions = decide_run(run)
    how = how or RecordOptions("nccl" if on_gpu(run) else "gloo", True, True)
    for few in record_ranks(run, different_ranks(run, decisions), decisions, how):
        step = record_step(run, few.trace.rank, decisions, how._replace(extent="complete"))
        yield few, RankRecord(step.trace, step, range(len(step.parts)))


def same(few: RankRecord, whole: RankRecord) -> None:
    one, other = few.step, whole.step
    assert (one.between, one.host, one.saved) == (other.between, other.host, other.saved)
    parts = changes_of(few), changes_of(whole)
    assert [part.kind for part in parts[0]] == [part.kind for part in parts[1]]
    for mine, theirs in zip(*parts):
        if mine.kind:
            assert np.array_equal(changes(mine), changes(theirs)), mine.kind
    same_events(few, whole)


def same_events(few: RankRecord, whole: RankRecord) -> None:
    events = comparable(few.trace), comparable(whole.trace)
    for number, (a, b) in enumerate(zip(*events)):
        assert a == b, f"event {number}"
    assert len(events[0]) == len(events[1])


def changes(part: Changes) -> NDArray[np.int64]:
    """Return the bytes and kinds; of what torch may free in another order, only the sizes."""
    found = np.stack([part.n_bytes, part.kinds], 1)
    return found[abs(part.n_bytes) > PLACEHOLDER]


def seconds(run: RunConfig, traces: list[Trace]) -> dict[str, float]:
    """Return the seconds that are predicted from traces, on GPUs or on CPUs, by what takes them."""
    gpus = load_cluster("dgx-h100")
    kind = "cuda" if on_gpu(run) else "cpu"
    device = gpus.device.model_copy(update={"kind": kind})
    machine = gpus.model_copy(update={"device": device})
    found = price(Recorded(run, decide_run(run), traces, training=True), machine)
    phases = {"forward": found.forward_s, "backward": found.backward_s, "update": found.update_s}
    return {"step": found.step_s, **phases, **found.parts.by_kind()}


@pytest.mark.parametrize("method", full_unless(lambda name: name.endswith("*"), METHODS))
def test_methods_are_those_of_the_complete_step(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    real = rank.record_step

    def noted(run: RunConfig, *others: Any, **named: Any) -> Any:
        record = real(run, *others, **named)
        recorded.append(run.model.n_layers * len(record.parts))
        return record

    monkeypatch.setattr(rank, "record_step", noted)
    monkeypatch.setattr(muon, "TOGETHER", 2**12)  # small ones take several turns, too
    run = run_of(*METHODS[method])
    pairs = [*both(run)]
    assert len(recorded) <= 6 * len(different_ranks(run, decide_run(run))), "few ranks"
    for few, whole in pairs:
        same(few, whole)
        assert max(recorded) < run.model.n_layers * len(whole.step.parts), "few layers and passes"
    few_s, whole_s = (seconds(run, [pair[i].trace for pair in pairs]) for i in (0, 1))
    # Where the host is late, what it launches at the border of two passes may count to either one.
    for phase in ("forward", "backward"):
        assert few_s.pop(phase) == pytest.approx(whole_s.pop(phase), abs=0.005 * whole_s["step"])
    assert few_s == pytest.approx(whole_s, abs=1e-6 * whole_s["step"])


def test_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of each of four sequences: the next one is on its way before one is multiplied."""
    monkeypatch.setattr(
        heuristics,
        "_chunked",
        lambda choices, _: heuristics._each(
            choices, lambda one: replace(one, n_chunks=8, whole_backward=True)
        ),
    )
    layout = {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "keep_gathered": "none"}
    run = run_of(layout, {"device": "cuda"}, {"family": "llama"})
    for few, whole in both(run):
        same(few, whole)
        on_their_way: list[int] = []
        for event in few.trace.unfolded():
            if isinstance(event, Start) and event.op == "all_gather":
                on_their_way.append(event.number)
            elif isinstance(event, Wait) and event.number in on_their_way:
                on_their_way.remove(event.number)
            elif isinstance(event, Kernel) and event.op == "bmm" and event.shape[0] == 2:
                break  # the first product of a chunk, whose tokens come from two devices
        assert len(on_their_way) == 1


def test_gradients_are_multiplied_while_activations_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all messages of activations in the backward pass, only the first is waited for at once."""
    monkeypatch.setattr(
        heuristics, "_chunked", lambda choices, _: replace(choices, late_gradients=True)
    )
    layout = {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "keep_gathered": "none"}
    run = run_of(layout, {"device": "cuda"}, {"family": "llama"})
    for few, whole in both(run):
        same(few, whole)
        multiplied, alone = dict[int, int](), 0
        products, backward = 0, False
        for event in few.trace.unfolded():
            if isinstance(event, Start) and event.label == "product":
                backward = event.place.backward
                multiplied[event.number] = products
            elif isinstance(event, Kernel):
                products += event.kind == "product"
            elif isinstance(event, Wait) and event.number in multiplied and backward:
                alone += multiplied[event.number] == products
        # The last closing product has none after it in the chain, and the lookup's is the table's.
        assert alone <= 3


NETWORKS: dict[str, dict[str, Any]] = {
    "tokens": {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    "pipeline of grids": {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2, "micro_batches": 4},
    "fsdp": {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2, "dp_mode": "fsdp"},
}


OTHERS = [*itertools.product(("", f"{own_networks.__name__}:deep"), NETWORKS)]
QUICK_OTHERS = (("", "pipeline of grids"), OTHERS[3])


@pytest.mark.parametrize(
    ("model", "method"), full_unless(QUICK_OTHERS.__contains__, OTHERS, unpack=True)
)
def test_networks_of_others(tmp_path: Path, method: str, model: str) -> None:
    layout = NETWORKS[method]
    if model and method != "fsdp":  # which replica saves a vector does not repeat
        layout = {**layout, "dp": 1}
    model = model or str(save_llama(tmp_path, num_hidden_layers=10))
    how = {"global_batch": 16, "device": "cuda", "dtype": "bfloat16", "recompute": "full"}
    run = parse_run({"model": model, "data": {"path": "."}, "layout": layout, "train": how})
    for few, whole in both(check_layout(run)):
        same(few, whole)
        assert few.step.composed or layout.get("pp", 1) > 1


@pytest.mark.parametrize("training", [True, False])
def test_messages_alone_and_evaluations(training: bool) -> None:
    run = run_of({**MEGATRON, "pp": 4, "micro_batches": 8}, {"device": "cuda"}, {"n_layers": 8})
    for few, whole in both(run, RecordOptions("nccl", not training, training=training)):
        same_events(few, whole)


# Of the matrix's quick cells, a small one with each scheme, replicas, family and stages.
PRETRAINED = [cell for cell in QUICK if cell.model not in HEADS]
QUICKEST_LAST = sorted(PRETRAINED, key=lambda cell: (-time_of(cell), cell))
TELLING = {
    cell
    for key in ("scheme", "replicas", "model", "pp")
    for cell in {getattr(one, key): one for one in QUICKEST_LAST}.values()
}


@pytest.mark.parametrize(
    "cell", full_unless(TELLING.__contains__, sorted(CELLS)), ids=lambda cell: cell.title
)
def test_cells_are_those_of_the_complete_step(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded states repeat only after more layers; METHODS have these."""
    monkeypatch.setattr(layers, "_WORTH", 2)  # so that few layers are enough
    layout = {**cell.layout, "micro_batches": 4 if cell.pp > 1 else 2}
    n_layers = cell.pp * (2 if layout.get("dp_mode") in ("zero1", "fsdp") else 4)
    model = {**cell.config, "n_layers": n_layers}
    if "n_decoder_layers" in a_run(layout, model, {}).model.model_fields_set:
        model["n_decoder_layers"] = n_layers
    run = a_run(layout, model, {"global_batch": 16}, cell.task)
    for few, whole in both(run):
        same(few, whole)


changed = st.lists(st.sampled_from([-3, -2, -1, 1, 2, 3, 1000, -1000]), max_size=6)
parts = st.lists(st.tuples(changed, changed), min_size=1, max_size=3)


def with_layers(part: list[tuple[list[int], list[int]]], n: int) -> NDArray[np.int64]:
    """Return a part with loops over n layers, each after something else."""
    return np.array([x for before, each in part for x in (*before, *each * n)], dtype=np.int64)


def extended(shorter: NDArray[np.int64], longer: NDArray[np.int64], more: int) -> list[int]:
    one, other = (
        StepRecord(Trace(0), [StepPart("", tuple(Held(int(n), "", "") for n in some))])
        for some in (shorter, longer)
    )
    [part] = layers.with_layers(one, other, more).parts
    return [one.n_bytes for one in part.events if isinstance(one, Held)]


@given(parts, st.integers(1, 9))
def test_what_is_inserted_is_inserted_again(
    part: list[tuple[list[int], list[int]]], more: int
) -> None:
    shorter, longer, whole = (with_layers(part, n) for n in (3, 4, 4 + more))
    assert extended(shorter, longer, more) == whole.tolist()


def test_what_does_not_repeat_is_refused() -> None:
    shorter = np.array([5, -5, 7, -7], dtype=np.int64)
    longer = np.array([5, -5, 7, -7, 9, -9, 7, -7], dtype=np.int64)
    with pytest.raises(NotPeriodicError, match="does not repeat"):
        extended(shorter, longer, 1)


def test_a_single_size_grows_along_a_line() -> None:
    shorter, longer = (np.array([5, n * 4, -n * 4, -5], dtype=np.int64) for n in (3, 4))
    assert extended(shorter, longer, 6) == [5, 40, -40, -5]


def test_a_step_whose_layers_do_not_repeat_runs_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise NotPeriodicError("never")

    monkeypatch.setattr(rank, "with_layers", refuses)
    for few, whole in both(run_of({"pp": 2, "micro_batches": 4}, {}, {})):
        same(few, whole)
        assert not few.step.composed


PIPELINES = st.tuples(
    st.sampled_from(get_args(PipelineOrder)),
    st.integers(2, 12),
    st.integers(2, 3),
    st.integers(1, 40),
)


@given(PIPELINES, st.data())
def test_a_shorter_schedule_has_every_kind_of_pass(
    drawn: tuple[PipelineOrder, int, int, int], data: st.DataObject
) -> None:
    order, pp, k, m = drawn
    k = {"interleaved": k, "zbv": 2}.get(order, 1)
    if order == "interleaved":
        m = -(-m // pp) * pp
    layout = LayoutConfig(pp=pp, micro_batches=m, stages_per_rank=k, pipeline=order)
    index = data.draw(st.integers(0, pp - 1))
    short = shortened(layout, [index])
    (schedule,) = short.schedules
    assert schedule is not None
    assert [key[0] for key in schedule].count("forward") == m * k
    assert {*schedule} <= {*short.keys}


@pytest.mark.parametrize(("pp", "k"), [(128, 1), (16, 6)])
def test_deep_pipelines_need_three_micro_batches(pp: int, k: int) -> None:
    layout = LayoutConfig(pp=pp, micro_batches=512, stages_per_rank=k)
    for index in (0, 1, pp // 2, pp - 1):
        assert len(shortened(layout, [index]).itinerary.actions) <= 6 * k


def test_stages_of_a_rank_are_composed_alike() -> None:
    layout = {"pp": 2, "micro_batches": 8, "stages_per_rank": 4, "dp": 2, "dp_mode": "fsdp"}
    run = run_of(layout, {"device": "cuda", "dtype": "bfloat16"}, {"n_layers": 16})
    for few, whole in both(run):
        same(few, whole)


@pytest.mark.parametrize("mode", ["replicate", "fsdp"])
def test_records_do_not_keep_the_tensors_of_their_steps(mode: str) -> None:
    run = run_of({"dp": 2, "dp_mode": mode}, {"device": "cuda"}, {"n_layers": 4})

    def kept() -> int:
        assert [*both(run)]
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    assert kept() >= kept(), "what the first ones cache is all"


def test_groups_of_some_stages_are_those_of_each_rank() -> None:
    """The stages of T5's decoder share a parameter, but each stage is in another place there."""
    model = {"family": "t5", "n_layers": 3, "n_decoder_layers": 5, "max_seq_len": 8}
    run = a_run({"pp": 6, "micro_batches": 6}, model, {"global_batch": 6})
    for pair in both(run, RecordOptions("gloo", kernels=True)):
        mine, theirs = (
            {e.ranks for e in one.trace.unfolded() if isinstance(e, Start) and e.op != "p2p"}
            for one in pair
        )
        assert mine == theirs
