"""A run makes its batches ahead, and leaves no thread behind; its reports; timelines."""

import json
import shutil
import threading
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gridformer.comm import Record, record_messages
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.samples.order import Rows
from gridformer.data.samples.sample import Arrays
from gridformer.mesh import Axes
from gridformer.mesh.process_group import World
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.pipeline import Event
from gridformer.train.flops import StepFlops
from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trace import merged_trace
from gridformer.train.trainer import Trainer
from gridformer.utils.errors import DataError
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of, train


def reading(plan: Plan, damaged: int = -1) -> tuple[list[int], list[int], list[str]]:
    """Run one rank; return the training and validation batches it made, and an error's frames."""
    made: dict[str, list[int]] = {"train": [], "val": []}
    whole = ShuffledBatches.batch

    def batch(self: ShuffledBatches, step: int, rows: Rows | None = None) -> Arrays:
        name = self.purpose.partition("/")[2]
        made[name].append(step)
        if (name, step) == ("train", damaged):
            raise DataError("a damaged file")
        return whole(self, step, rows)

    frames: list[str] = []
    with patch.object(ShuffledBatches, "batch", batch):
        try:
            train(plan)
        except DataError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    return made["train"], made["val"], frames


def test_a_run_reads_its_batches_and_no_others(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """It evaluates before the first step, after the third and after the last."""
    settings: dict[str, Any] = {"steps": 5, "eval_every": 3, "eval_batches": 2}
    plan = plan_of(token_folder, tmp_path, {"micro_batches": 4}, **settings)
    ((trained, validated, _),) = pool.run(1, reading, plan)
    assert trained == [*range(5)], "each once, and none after the last step"
    assert validated == [0, 1] * 3
    assert ": done, step 5, loss" in health_of(tmp_path).why


def test_a_run_that_is_never_evaluated_is_at_its_end(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    plan = plan_of(token_folder, tmp_path, {}, steps=2, eval_every=0, eval_batches=1)
    ((_, validated, _),) = pool.run(1, reading, plan)
    assert validated == [0]
    assert ["val_loss" in line for line in read_metrics(tmp_path)] == [False, True]


def test_a_damaged_batch_ends_the_run_at_its_step(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The steps before it are taken, and the traceback is that of the thread that read it."""
    plan = plan_of(token_folder, tmp_path, {}, steps=9, eval_batches=1)
    ((trained, _, frames),) = pool.run(1, reading, plan, 3)
    assert trained == [0, 1, 2, 3]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert frames[-1] == "batch"
    assert "fit" in frames
    assert ": failed, step 3, loss" in health_of(tmp_path).why


def test_the_tokenizer_may_lie_in_the_run_directory(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """As for token files of another program, whose tokenizer an earlier run has kept."""
    own = tmp_path / "own"
    shutil.copytree(token_folder, own)
    pool.run(1, train, plan_of(own, own, {}, steps=1, eval_batches=1))
    kept, source = (folder / "tokenizer.json" for folder in (own, token_folder))
    assert kept.read_bytes() == source.read_bytes()


SEQ, STEPS = 16, 4


def run_of(data: Path, **train: Any) -> RunConfig:
    sections = {
        "model": {
            "n_layers": 1,
            "hidden_size": 16,
            "n_heads": 2,
            "max_seq_len": SEQ,
            "vocab_size": 301,
            "dropout": 0.3,
            "init_std": 0.5,  # different texts have different losses from the first step
        },
        "data": {"path": str(data), "seq_len": SEQ},
        "train": {"steps": STEPS, "eval_every": 99, "dtype": "float64", "seed": 3, **train},
    }
    return parse_run(sections)


def fit(plan: Plan) -> None:
    world = World(0, 0, 1, torch.device("cpu"), "gloo", "test")
    Trainer(plan, world).fit()


def windows_of(file: Path) -> torch.Tensor:
    """Return all samples of a token file, [n, SEQ + 1], in file order."""
    ids = np.fromfile(file, dtype=np.uint16).astype(np.int64)
    n = (len(ids) - 1) // SEQ
    return torch.from_numpy(np.stack([ids[i * SEQ : (i + 1) * SEQ + 1] for i in range(n)]))


def test_validation_reads_all_held_out_text(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """val_loss is the mean over val.bin, which is read here with numpy.

    An evaluation of as many rows as val.bin has windows reads each window once, in any order.
    Batches have few rows, so that there are several.
    """
    windows = windows_of(token_folder / "val.bin")
    rows = next(rows for rows in (7, 5, 3, 2, 1) if len(windows) % rows == 0)
    n_batches = len(windows) // rows
    assert n_batches > 3
    run = run_of(token_folder, global_batch=rows, eval_batches=n_batches, steps=1)
    pool.run(1, fit, Plan(run, tmp_path, None, 0, decide_run(run)))
    plain = run.model.model_copy(update={"dropout": 0.0})
    model = build_parallel(plain, LayoutConfig(), Axes(), 3, torch.device("cpu"), "float64").eval()
    assert isinstance(model, GPT2)

    def loss_of(windows: torch.Tensor) -> float:
        with torch.no_grad():
            logits = model(windows[:, :-1])
            return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

    want = loss_of(windows)
    assert read_metrics(tmp_path)[0]["val_loss"] == pytest.approx(want, rel=1e-9)
    train = windows_of(token_folder / "train.bin")[: len(windows)]
    assert loss_of(train) != pytest.approx(want, rel=1e-4), "the test must tell them apart"


def test_metrics_are_of_their_own_step(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The learning rate follows its formula; tokens add up, and tokens/s are those of one step."""
    run = run_of(
        token_folder, global_batch=2, eval_batches=1, lr=0.01, warmup_steps=2, peak_tflops=0.5
    )
    pool.run(1, fit, Plan(run, tmp_path, None, 0, decide_run(run)))
    first, *lines = read_metrics(tmp_path)
    assert (first["step"], first["tokens"]) == (0, 0)
    # Warm-up: half, then the full rate. Then a cosine's start and its end, a tenth.
    assert [line["lr"] for line in lines] == pytest.approx([0.005, 0.01, 0.01, 0.001])
    for number, line in enumerate(lines, start=1):
        assert line["step"] == number
        assert line["tokens"] == 2 * SEQ * number
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(2 * SEQ)
        flops = line["model_tflops"] * line["step_time_s"] * 1e12
        assert flops == pytest.approx(StepFlops.of(run).model)
        assert line["mfu"] == line["hfu"] == pytest.approx(line["model_tflops"] / 0.5)


def part(host: str, zero: float, events: list[Event], messages: list[dict[str, Any]]) -> Any:
    return {"host": host, "zero": zero, "place": {}, "events": events, "messages": messages}


def of_kind(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if all(e.get(k) == v for k, v in wanted.items())]


@pytest.mark.parametrize(("host", "start"), [("a", 1_000_000.0), ("b", 0.0)])
def test_clocks_of_one_machine_are_one(host: str, start: float) -> None:
    """Another machine's clock starts at the barrier."""
    event = Event("forward", 0, 2, 11.0, 11.5)
    trace = merged_trace([part("a", 10.0, [event], []), part(host, 11.0, [event], [])])
    first, second = of_kind(trace, name="forward 2")
    assert {first["pid"], second["pid"]} == {0, 1}
    ranked = {e["pid"]: e for e in (first, second)}
    assert ranked[0]["ts"] == 1_000_000.0
    assert ranked[1]["ts"] == start
    assert ranked[1]["dur"] == 500_000.0


def traced(plan: Any) -> dict[str, float]:
    """Return what this rank sent over each axis in the traced step, by the recorder."""
    seen: list[Record] = []
    with record_messages() as recorder:
        train(plan)
    times = [r for r in recorder.records if r.timing.ended]
    assert all(r.timing.began <= r.timing.waited <= r.timing.ended for r in times)
    seen += times
    return {axis: sum(r.bytes for r in seen if r.axis == axis) for axis in {r.axis for r in seen}}


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "optimus", "rows": 2, "cols": 1, "pp": 2, "micro_batches": 3},
        {"scheme": "megatron", "cols": 2, "dp": 2, "dp_mode": "zero1"},
    ],
    ids=["pipeline", "replicas"],
)
def test_a_step_of_all_processes(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    plan = plan_of(token_folder, tmp_path, layout, steps=2, trace_step=2, eval_batches=1)
    sent = pool.run(4, traced, plan)
    trace = json.loads((tmp_path / "trace-step-2.json").read_text())
    assert not [*tmp_path.glob(".trace*")], "parts are gone"
    m, pp = layout.get("micro_batches", 1), layout.get("pp", 1)
    for rank in range(4):
        passes = of_kind(trace, ph="X", cat="pass", pid=rank)
        assert sorted(e["name"] for e in passes) == sorted(
            f"{kind} {i}" for kind in ("forward", "backward") for i in range(m)
        )
        assert {e["args"]["stage"] for e in passes} == ({rank // 2} if pp > 1 else {0})
        assert {e["name"] for e in of_kind(trace, ph="X", cat="other", pid=rank)} >= {
            "update",
            "wait for data",
        }
        began, ended = ({e["id"]: e for e in of_kind(trace, ph=ph, pid=rank)} for ph in ("b", "e"))
        assert began
        assert began.keys() == ended.keys()
        assert all(began[i]["ts"] <= ended[i]["ts"] for i in began)
        axes = {e["args"]["axis"] for e in began.values()}
        assert axes >= ({"row", "pp", "world"} if pp > 1 else {"col", "dp", "world"})
        for axis in axes - {"world"}:
            there = sum(e["args"]["bytes"] for e in began.values() if e["args"]["axis"] == axis)
            least = 0 if axis == "grid" else 1  # a rank in the owner's place receives nothing
            assert least <= there <= sent[rank][axis] / 2, "one of two steps"
    assert all(e["ts"] >= -1e6 and e.get("dur", 0) >= 0 for e in trace["traceEvents"] if "ts" in e)


def test_other_steps_are_not_traced(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    pool.run(1, train, plan_of(token_folder, tmp_path, {}, steps=1, eval_batches=1))
    assert not [*tmp_path.glob("trace*")]
    assert not dist.is_initialized()
