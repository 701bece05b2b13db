"""Predictions from traces: what kernels are recorded, and that what is left out changes nothing."""

import textwrap
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.memory.estimate import estimate_rank
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check_layout
from gridformer.plan import program
from gridformer.plan.predict import predict, price, record_run, unfused
from gridformer.plan.prediction import Prediction
from gridformer.plan.show import print_prediction
from gridformer.record import Kernel, trace_rank
from gridformer.record.device import Backend
from gridformer.train.flops import StepFlops
from tests.support.commands import gridformer_here, python_alone
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

LAYOUTS: list[dict[str, Any]] = [
    {"micro_batches": 2},
    {"scheme": "megatron", "cols": 4},
    {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "pp": 2, "micro_batches": 4},
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "pipelined", "stationary": "output"},
    {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "gather", "stationary": "input"},
    {"scheme": "subgraph", "branches": 2, "dp": 2},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "common": "first"},
    {"dp": 4, "dp_mode": "fsdp"},
]
CASES = [
    (layout, backend, recompute)
    for layout in LAYOUTS
    for backend in ("nccl", "gloo")
    for recompute in ("none", "full")
]
QUICK = [(LAYOUTS[4], "nccl", "full"), (LAYOUTS[2], "gloo", "none")]
# The head of a grid is padded to a multiple of its size.
VOCABULARY = 96


def run_of(layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    model = {"n_layers": 2, "max_seq_len": 24, "vocab_size": VOCABULARY, **model}
    run = a_run(layout, model, {"global_batch": 48, "loss_chunk_tokens": 0, **train})
    check_layout(run)
    return run


def product_flop(run: RunConfig, backend: Backend) -> int:
    """Return the operations of products and attention on all ranks."""
    torch.set_num_threads(1)
    decisions, total = decide_run(run), 0
    for rank in range(run.layout.n_processes):
        trace = trace_rank(run, rank, decisions, kernels=True, backend=backend)
        assert trace.complete, trace.troubles
        total += sum(one.flop for one in trace.unfolded() if isinstance(one, Kernel))
    return total


@pytest.mark.parametrize(
    ("layout", "backend", "recompute"), full_unless(QUICK.__contains__, CASES, unpack=True)
)
def test_the_recorded_products_are_those_of_the_formula(
    gpu: InProcess, layout: dict[str, Any], backend: Backend, recompute: str
) -> None:
    run = run_of(layout, {}, {"recompute": recompute})
    found = gpu(product_flop, run, backend)
    model, hardware = StepFlops.of(run).model, StepFlops.of(run).hardware
    if layout.get("common") == "first" or layout.get("scheme") == "subgraph":
        assert found >= hardware, "common layers are computed on several sub-grids"
    else:
        assert found == hardware >= model


def both_ways(run: RunConfig) -> list[Prediction]:
    """Return predictions from all layers and kernels, and from what is traced and priced once."""
    torch.set_num_threads(1)
    cluster = load_cluster("dgx-h100")
    every = record_run(run, all_layers=True)
    few = record_run(run)
    whole = price(every, cluster, timeline=True)
    assert whole.timeline
    whole.timeline = {}
    return [whole, price(few, cluster)]


@pytest.mark.parametrize("n_layers", [16, 32])
def test_a_table_s_gradient_is_hidden_by_no_more_layers_than_it_takes(
    gpu: InProcess, n_layers: int
) -> None:
    """It takes longer than three layers. Extended from these, the step was 6.5% too fast."""
    sections = {"model": "llama-3.1-8b", "data": {"path": "."}, "layout": {"dp": 64}}
    sizes = [f"model.n_layers={n_layers}", "model.max_seq_len=4096"]
    run = parse_run({**sections, "train": {"global_batch": 64, "dtype": "bfloat16"}}, sizes)
    every, few = gpu(both_ways, run)
    assert few.step_s == pytest.approx(every.step_s, rel=1e-6)
    assert few.parts.exposed["dp"] == pytest.approx(every.parts.exposed["dp"], rel=1e-6)


REPEATED: list[dict[str, Any]] = [
    {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 12},
    {"scheme": "optimus", "rows": 2, "cols": 2, "micro_batches": 6},
    {"dp": 2, "micro_batches": 6},
    # With two stages between the first and the last, of which one follows from the other.
    {"dp": 2, "dp_mode": "zero1", "pp": 4, "micro_batches": 20},
    {"dp": 2, "dp_mode": "fsdp", "pp": 4, "micro_batches": 20},
    {"dp": 2, "dp_mode": "fsdp", "reshard": "step", "pp": 4, "micro_batches": 20},
]


@pytest.mark.parametrize("layout", full_unless([REPEATED[0], REPEATED[-1]].__contains__, REPEATED))
def test_what_is_repeated_takes_as_long_as_what_is_traced(
    gpu: InProcess, layout: dict[str, Any]
) -> None:
    batch = 40 if layout["micro_batches"] == 20 else 48
    run = run_of(layout, {"n_layers": 16}, {"dtype": "bfloat16", "global_batch": batch})
    whole, repeated = gpu(both_ways, run)
    for name in ("step_s", "model_tflops_per_device"):
        assert getattr(repeated, name) == pytest.approx(getattr(whole, name), rel=1e-6)
    for name in ("forward_s", "backward_s"):  # a pass gives each its share of waiting for the host
        assert getattr(repeated, name) == pytest.approx(getattr(whole, name), rel=0.05)
    parts = whole.parts.by_kind()
    for name, seconds in repeated.parts.by_kind().items():
        assert seconds == pytest.approx(parts.get(name, 0.0), abs=1e-6 * whole.step_s)


def replays_of_passes(run: RunConfig) -> int:
    """Return how often a pass is replayed alone to price a run."""
    torch.set_num_threads(1)
    with patch.object(program, "replay", wraps=program.replay) as replay:
        price(record_run(run), load_cluster("dgx-h100"))
    return replay.call_count


def test_equal_passes_of_ranks_are_priced_once(gpu: InProcess) -> None:
    """More stages with equal layers make no work, though each has groups of its own."""
    found = []
    for pp in (6, 8):
        layout = {"scheme": "megatron", "cols": 2, "pp": pp, "micro_batches": 2 * pp}
        found.append(gpu(replays_of_passes, run_of(layout, {"n_layers": pp}, {})))
    assert 0 < found[0] == found[1]


def several(run: RunConfig) -> dict[str, Prediction]:
    torch.set_num_threads(1)
    cluster = load_cluster("frontera-rtx5000")
    whole = record_run(run, all_layers=True)
    return {
        "step": predict(run, cluster),
        "layers": price(whole, cluster, layers_only=True),
        "forward": predict(run, cluster, training=False),
        "two levels": predict(run, cluster, memory=False, timeline=True),
    }


def test_a_prediction_of_a_step_of_its_layers_and_of_its_forward_passes(gpu: InProcess) -> None:
    run = run_of({"scheme": "megatron", "cols": 2, "dp": 4}, {}, {})
    found = gpu(several, run)
    step, layers, forward = found["step"], found["layers"], found["forward"]
    assert step.to_json().keys() >= {
        *("step_s", "forward_s", "backward_s", "update_s", "fits", "peak_gib", "warnings"),
        *("model_tflops_per_device", "hardware_tflops_per_device", "bubble_s"),
        *("exposed_communication_s", "parts"),
    }
    assert step.fits is True
    assert step.step_s == pytest.approx(step.forward_s + step.backward_s + step.update_s)
    assert sum(step.parts.by_kind().values()) == pytest.approx(step.step_s)
    assert 0 < layers.forward_s < step.forward_s
    assert 0 < layers.backward_s < step.backward_s
    assert layers.parts.update == 0 == pytest.approx(layers.update_s, abs=1e-12)
    assert {"world", "dp"}.isdisjoint(layers.parts.exposed)
    # The head's operations are not divided by the time of the layers, which would exceed the peak.
    flop = StepFlops.of(run, layers_only=True).model
    assert layers.model_tflops_per_device * layers.step_s * 8 == pytest.approx(flop / 1e12)
    assert flop < StepFlops.of(run).model
    assert forward.backward_s == 0
    assert forward.step_s < step.step_s
    assert forward.to_json()["fits"] is forward.to_json()["peak_gib"] is None
    events = found["two levels"].chrome_trace()["traceEvents"]
    assert {"compute", "messages col", "messages dp"} <= {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert any(event.get("cat") == "products" and event["dur"] > 0 for event in events)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.full)])
def test_copies_record_a_part_of_the_steps(fails: bool) -> None:
    """In a process of its own, for copies of one that has computed gradients compute none."""
    script = f"""
    from unittest.mock import patch
    from gridformer.cluster.file import load_cluster
    from gridformer.plan import predict
    from gridformer.record import rank
    from gridformer.utils import process as fork_pool
    from tests.plan.test_predict import run_of

    layout = {{"scheme": "optimus", "rows": 2, "cols": 2, "pp": 3, "micro_batches": 4}}
    run, cluster = run_of(layout, {{"n_layers": 3}}, {{}}), load_cluster("dgx-h100")
    real, ranks = rank.record_step, []

    def recorded(run, rank, *more, **named):
        ranks.append(rank)
        assert not ({fails} and fork_pool.is_copy())
        return real(run, rank, *more, **named)

    found = []
    with patch.object(rank, "record_step", recorded), patch.object(fork_pool, "n_cores", lambda: 2):
        for on_all_cores in (True, False, True):  # the last copies have threads for gradients
            ranks.clear()
            found.append(predict.predict(run, cluster, on_all_cores=on_all_cores).to_json())
            print(*ranks)
    assert found[0] == found[1] == found[2], found
    """
    ran = python_alone("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr
    beside_copies, alone, _ = (sorted(line.split()) for line in ran.stdout.splitlines())
    assert len(alone) == 3
    assert beside_copies == alone if fails else len(beside_copies) < 3, "copies record the rest"


def test_copies_while_it_saves_count_where_they_lie_in_the_same_memory() -> None:
    """On CPUs, as for `memory` and `train`."""
    run = run_of({}, {}, {"save_every": 1, "steps": 4, "async_save": True, "device": "cpu"})
    gpus = load_cluster("dgx-h100")
    cpus = gpus.model_copy(update={"device": gpus.device.model_copy(update={"kind": "cpu"})})
    held = estimate_rank(run, 0)
    assert held.needed > held.peak
    found = predict(run, cpus)
    assert found.peak_gib == held.needed / 2**30


def test_the_peak_is_that_of_the_fullest_rank() -> None:
    layout = {"pp": 3, "micro_batches": 6}
    run = run_of(layout, {"n_layers": 6}, {"device": "cuda"})
    found = predict(run, load_cluster("dgx-h100"))
    peaks = [estimate_rank(run, rank).needed for rank in range(3)]
    assert found.peak_gib == max(peaks) / 2**30 > min(peaks) / 2**30


def test_memory_without_fused_attention_is_larger() -> None:
    run = run_of({}, {"max_seq_len": 256}, {"device": "cuda"})
    frontera, h100 = load_cluster("frontera-rtx5000"), load_cluster("dgx-h100")
    assert unfused(run, h100) == run
    assert estimate_rank(unfused(run, frontera), 0).peak > estimate_rank(run, 0).peak


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict",), "--cluster is missing: name one of dgx-h100, "),
        (("plan", "--devices", "8"), "or the file that `gridformer calibrate` writes"),
        (("predict", "--cluster", "dgx-h10"), "dgx-h100"),
        (("predict", "--cluster", "dgx-h100", "layout.cols=2"), "layout.cols"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], said: str) -> None:
    command, *more = words
    done = gridformer_here(command, "gpt2-124m", "train.global_batch=2", *more)
    assert done.returncode == 2
    assert said in done.stderr


def of_pipelines(run: RunConfig) -> tuple[Prediction, Prediction, list[float]]:
    """Return predictions of a pipeline and of one device a replica, and when ranks end passes."""
    torch.set_num_threads(1)
    cluster = load_cluster("dgx-h100")
    deep = price(record_run(run, all_layers=True), cluster, timeline=True)
    single = run.model_copy(
        update={"layout": run.layout.model_copy(update={"pp": 1, "micro_batches": 1})}
    )
    flat = price(record_run(single, all_layers=True), cluster)
    ends = [
        max(one.end for one in intervals if one.module.startswith("layers"))
        for intervals in deep.timeline.values()
    ]
    deep.timeline = {}
    return deep, flat, ends


def test_phases_of_a_pipeline_are_those_of_all_ranks(gpu: InProcess) -> None:
    """The update begins after the last pass of any rank, and waiting is not all of one phase."""
    run = run_of(
        {"pp": 4, "micro_batches": 4},
        {"n_layers": 8, "hidden_size": 3072, "max_seq_len": 2048},
        {"global_batch": 8, "dtype": "bfloat16"},
    )
    deep, flat, ends = gpu(of_pipelines, run)
    for one in (deep, flat):
        assert one.forward_s + one.backward_s + one.update_s == pytest.approx(one.step_s)
        assert sum(one.parts.by_kind().values()) == pytest.approx(one.step_s)
    before = deep.forward_s + deep.backward_s
    assert max(ends) <= before
    assert deep.update_s < 0.2 * before, "waiting for other ranks belongs to the passes"
    assert deep.bubble_s > 0.2 * deep.step_s
    share = flat.forward_s / (flat.forward_s + flat.backward_s)
    assert deep.forward_s / before == pytest.approx(share, abs=0.06)


def test_a_run_fits_if_its_own_limit_leaves_a_margin(gpu: InProcess) -> None:
    run, cluster = run_of({}, {}, {}), load_cluster("frontera-rtx5000")
    peak = gpu(predict, run, cluster).peak_gib
    for gib, fits in ((1.02 * peak, False), (1.06 * peak, True)):
        limited = run.model_copy(update={"train": run.train.model_copy(update={"memory_gib": gib})})
        found = gpu(predict, limited, cluster)
        assert found.fits is fits
        assert found.limit_gib == pytest.approx(0.95 * gib)
    fast = replace(found, model_tflops_per_device=1453.2, hardware_tflops_per_device=0.0123)
    console = Console(record=True)
    print_prediction(run, cluster, fast, console)
    assert "1,453 model" in (said := console.export_text())
    assert "(0.0123 with" in said
