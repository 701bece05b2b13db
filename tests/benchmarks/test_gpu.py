"""benchmarks.gpu in its CPU form: the code that a GPU would run, on tiny models."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import expected, host_time, matmul, numerics, sides, step_report
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import step as gpu_step
from benchmarks.predicted.predictions import Predicted
from torch import Tensor
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from gridformer.config import ModelConfig, TrainConfig, shipped_model
from gridformer.utils.errors import UserError
from tests.support.commands import called_here
from tests.support.marks import full_unless

CPU = torch.device("cpu")
CPU_FORM = ["--device", "cpu", "--quick"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: tiny tensors gain nothing from more, which wait for each other under load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*words: str, expect: int = 0) -> str:
    result = CliRunner().invoke(gpu.app, [*words, *CPU_FORM])
    assert result.exit_code == expect, (result.output, result.exception)
    return result.stdout


def cells(markdown: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with `first`."""
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


# --------------------------------------------------------------------------- the commands


def test_ceiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "ceiling", "--quick"])
    out = run("ceiling", "--out", str(tmp_path / "report.md"))
    assert "torch " + torch.__version__ in out
    assert "`python -m benchmarks.gpu ceiling --quick`" in out
    assert "the figures mean nothing" in out
    speeds = [float(line.split("|")[3]) for line in out.splitlines() if line.startswith("| tiny")]
    assert len(speeds) == 6
    assert all(speed > 0 for speed in speeds)
    assert cells(out, "tiny head")[1] == "256 x 32 x 211"
    assert cells(out, "tiny head, v padded")[1] == "256 x 32 x 256"
    assert (tmp_path / "report.md").read_text() == out


@pytest.mark.full  # the tests of `compare` and of compiled blocks below are its parts
@pytest.mark.parametrize("hf_compile", ["blocks", "whole"])
def test_single(hf_compile: str) -> None:
    """Both sides run eager and compiled, and their losses agree."""
    pytest.importorskip("transformers")
    options = ["--backend", "aot_eager", "--hf-compile", hf_compile, "--attention", "flash"]
    out = run("single", *options)
    for side in ("gridformer", "Hugging Face"):
        for mode in ("eager", "compiled"):
            row = cells(out, f"{side}, {mode}")
            assert float(row[1].replace(",", "")) > 0
    assert cells(out, "Hugging Face, compiled")[6] == "1.00x"
    assert ": they agree" in out
    assert "target 1.15" in out
    assert f"Hugging Face compiled: {hf_compile}." in out


@pytest.mark.full
def test_schemes() -> None:
    out = run("schemes")
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        assert set(cells(out, name)[1:]) <= {"right", "-"}
    for name in numerics.QUICK:
        assert cells(out, name)[-1] == "equal"


@pytest.mark.parametrize(
    "names",
    full_unless(
        lambda names: len(names) == 2,
        [
            ["Hugging Face's Llama, one device", "llama, single"],
            [side.name for side in host_time.sides()],
        ],
    ),
    ids=["two", "all"],
)
def test_host_time(names: list[str]) -> None:
    """Every side runs as one rank of four and is compared with a rival that is in the table."""
    only = [word for name in names for word in ("--only", name)]
    text = run("host-time", *only)
    for side in host_time.sides():
        if side.name not in names:
            continue
        _, time_of, ratio, launched = cells(text, side.name)
        assert float(time_of) != 0.0
        assert bool(launched) == side.counts
        assert (ratio.partition(" of ")[2] == side.rival) or not side.rival
    assert not torch.distributed.is_initialized()


def test_an_unknown_side_is_refused() -> None:
    assert "--only optimus" in run_refused("host-time", "--only", "optimus")


def run_refused(*words: str) -> str:
    result = CliRunner().invoke(gpu.app, [*words, *CPU_FORM])
    assert result.exit_code == 2
    return result.output


def test_without_a_gpu_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = called_here(gpu.main, "benchmarks.gpu", "ceiling")
    assert done.returncode == 2
    assert "--device cpu --quick" in done.stderr
    assert "Traceback" not in done.stderr


def test_errors_that_a_user_can_fix_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong() -> None:
        raise UserError("no such model")

    with pytest.raises(SystemExit, match="2"):
        gpu.main(wrong)
    assert capsys.readouterr().err == "error: no such model\n"


def test_a_missing_compiler_stops_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "toolchain_problems", lambda device: ["there is no g++"])
    assert not run("single", expect=2)


# --------------------------------------------------------------------------- single


def settings(**changes: Any) -> gpu_step.Settings:
    values: dict[str, Any] = {
        "config": gpu.TINY,
        "batches": (2,),
        "s": 8,
        "steps": 1,
        "rounds": 2,
        "modes": ("eager",),
    }
    return gpu_step.Settings(**{**values, **changes})


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        pytest.param(
            RuntimeError("backend='inductor' raised: OutOfMemoryError: CUDA out of memory"),
            marks=pytest.mark.full,
        ),
    ],
    ids=["running", "compiling"],
)
def test_the_largest_batch_that_fits_is_taken(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    step = sides.HuggingFace.step
    tried = []

    def small_memory(self: Any, number: int, batch: Tensor) -> Any:
        tried.append(len(batch))
        if len(batch) > 3:
            raise error
        return step(self, number, batch)

    monkeypatch.setattr(sides.HuggingFace, "step", small_memory)
    comparison, _ = gpu_step.compare(settings(batches=(8, 4, 3, 2)), CPU, gpu_report.Report())
    assert comparison.b == 3
    assert tried[:3] == [8, 4, 3]
    with pytest.raises(ValueError, match="not even a batch of 4"):
        gpu_step.compare(settings(batches=(8, 4)), CPU, gpu_report.Report())


@pytest.mark.parametrize(
    ("error", "batches"),
    [(RuntimeError("no kernel image"), (4, 2)), (torch.OutOfMemoryError("no memory"), (4,))],
    ids=["not taken for a lack of memory", "no smaller batch to try"],
)
def test_a_side_that_fails_is_named_and_the_rest_measured(
    error: RuntimeError,
    batches: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")

    def broken(self: Any, number: int, batch: Tensor) -> Any:
        raise error

    monkeypatch.setattr(sides.HuggingFace, "step", broken)
    report = gpu_report.Report()
    comparison, _ = gpu_step.compare(settings(batches=batches), CPU, report)
    assert comparison.b == 4
    assert [r.side for r in comparison.results] == ["gridformer"]
    step_report.write(comparison, 1.0, report)
    said = f"Hugging Face eager did not run: {type(error).__name__}: {error}"
    assert said in capsys.readouterr().out
    monkeypatch.setattr(sides.Gridformer, "step", broken)
    with pytest.raises(RuntimeError, match="nothing runs"):
        gpu_step.compare(settings(), CPU, report)


def test_times_are_predicted_by_the_planner_and_from_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer: Future[Predicted] = Future()
    answer.set_result(Predicted(step_s=0.25, forward_s=0.08, backward_s=0.15))  # an update of 20 ms
    monkeypatch.setattr(expected, "predicting", lambda *_: nullcontext([answer]))
    config = ModelConfig(**shipped_model("gpt2-774m"))
    run = settings(config=config, batches=(16,), s=1024, modes=("eager", "compiled"))
    (times,) = expected.expected([run], "dgx-h100")
    assert times["gridformer", "eager"] == 0.25
    then, tokens = expected.last_time("gpt2-774m")["Hugging Face", "compiled"]
    theirs = 0.02 + (then - 0.02) * 16 * 1024 / tokens
    assert times["Hugging Face", "compiled"] == pytest.approx(theirs)


def test_gridformer_alone_where_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "find_spec", lambda name: None)
    comparison, _ = gpu_step.compare(settings(), CPU, gpu_report.Report())
    assert [r.side for r in comparison.results] == ["gridformer"]
    assert step_report.agreement(comparison) == [
        "one side did not run: there is nothing to compare with"
    ]
    assert len(step_report.verdict(comparison, 1e9, 1.0)) == 1


def test_no_round_starts_after_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    comparison, _ = gpu_step.compare(settings(rounds=5, limit_s=0.0), CPU, gpu_report.Report())
    assert {len(r.seconds) for r in comparison.results} == {1}
    assert "time is up after 1 of 5 rounds" in capsys.readouterr().err


def test_kernels_are_shown() -> None:
    _, kernels = gpu_step.compare(settings(), CPU, gpu_report.Report(), profile=True)
    assert list(kernels) == ["gridformer eager", "Hugging Face eager"]
    assert all("aten::mm" in text or "aten::addmm" in text for text in kernels.values())


def comparison_of(ours_s: float, theirs_s: float, loss: float) -> gpu_step.Comparison:
    results = [
        gpu_step.Result("gridformer", "compiled", 1.0, [ours_s]),
        gpu_step.Result("Hugging Face", "eager", 1.0, [2 * theirs_s]),
        gpu_step.Result("Hugging Face", "compiled", 1.0, [theirs_s]),
    ]
    losses = {"gridformer": [5.0, loss], "Hugging Face": [5.0, 4.0]}
    norms = {"gridformer": 1.0, "Hugging Face": 1.0 + (loss > 4.5)}
    return gpu_step.Comparison(settings(), 2, results, losses, norms)


def test_targets_are_held_against_the_fastest_of_hugging_face() -> None:
    share, ratio = step_report.verdict(comparison_of(1.0, 1.2, 4.0), 4e14, 800.0)
    assert "50.0 % of the ceiling (target 50 %: met)" in share
    assert "1.20 times Hugging Face compiled, its fastest (target 1.15: met)" in ratio
    share, ratio = step_report.verdict(comparison_of(1.0, 1.1, 4.0), 3e14, 800.0)
    assert "37.5 %" in share
    assert "not met" in share
    assert "not met" in ratio


def test_losses_with_dropout_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Each side draws its own masks. Both have dropout, whose rate the table names."""
    pytest.importorskip("transformers")
    config = gpu.TINY.model_copy(update={"dropout": 0.5, "attention_dropout": 0.5})
    theirs = sides.causal_model(config)
    assert {m.p for m in theirs.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}
    report = gpu_report.Report()
    comparison, _ = gpu_step.compare(settings(config=config), CPU, report)
    assert len({losses[0] for losses in comparison.losses.values()}) == 2
    step_report.write(comparison, 1.0, report)
    out = capsys.readouterr().out
    assert "dropout 0.5, no recomputation" in out
    assert "losses are not compared" in out


def test_disagreement_is_reported_loudly() -> None:
    assert "they agree" in step_report.agreement(comparison_of(1, 1, 4.0))[0]
    assert "THEY DISAGREE" in step_report.agreement(comparison_of(1, 1, 5.0))[0]


@pytest.mark.parametrize(("how", "n_graphs"), [("blocks", 2), ("whole", 1)])
def test_all_of_hugging_face_is_compiled(how: sides.HFCompile, n_graphs: int) -> None:
    """One graph serves all blocks: no layer stays uncompiled because of too many recompilations."""
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    counters.clear()
    config = gpu.TINY.model_copy(update={"n_layers": 10 if how == "blocks" else 2})
    train = TrainConfig(global_batch=2, dtype="bfloat16")
    side = sides.HuggingFace(config, train, CPU, "aot_eager", how)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    for step in range(3):
        side.step(step, tokens)
    assert counters["stats"]["unique_graphs"] == n_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", gpu.MODELS)
def test_flops_are_those_of_the_paper(name: str) -> None:
    """Check the FLOPs against Narayanan et al. 2021, equation 3.

    The equation has four passes of the layers, one of them recomputation, and three of the logits.
    """
    config, b, s = ModelConfig(**shipped_model(name)), 4, 1024
    h, l, v = config.hidden_size, config.n_layers, config.vocab_size  # noqa: E741
    paper = 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    recomputation = 24 * b * s * l * h**2 + 4 * b * s**2 * l * h
    assert step_report.step_flops(config, b * s, s) == pytest.approx(paper - recomputation)


def test_products_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = matmul.measure

    def small_memory(product: matmul.Product, *rest: Any) -> matmul.Speed:
        if product.n > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(product, *rest)

    monkeypatch.setattr(matmul, "measure", small_memory)
    speeds = matmul.measure_all(matmul.squares(True, CPU), CPU, 1, gpu_report.Report())
    assert [s.product.n for s in speeds] == [64]


# --------------------------------------------------------------------------- schemes


def one_rank_goes_wrong(how: str) -> dict[str, Any]:
    """A rank's job: rank 2 raises, dies or hangs; the others wait for it or go on."""
    if torch.distributed.get_rank() != 2:
        return {"fine": 1.0}
    if how == "raises":
        raise NotImplementedError("no such | thing\nand more")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(900)
    return {}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "rank 2: NotImplementedError: no such / thing"),
        pytest.param("dies", "rank 2: died (SIGABRT)", marks=pytest.mark.full),
    ],
)
def test_what_goes_wrong_on_a_rank_is_reported(how: str, said: str) -> None:
    answers = numerics.run_ranks(3, one_rank_goes_wrong, (how,), 120.0)
    assert numerics._error_of(answers).startswith(said)
    row, within = numerics._layout_row("megatron 1x4", answers)
    assert not within
    assert row[-1].startswith(f"not run: {said}")
    assert len(row) == 2 + 2 * len(numerics.COMPARED)


@pytest.mark.full  # test_what_goes_wrong_on_a_rank_is_reported shows the same for other failures
def test_a_rank_that_hangs_is_given_up() -> None:
    answers = numerics.run_ranks(3, one_rank_goes_wrong, ("hangs",), 6.0)
    assert answers[2]["error"] == "no answer within 6 s"


def test_a_layout_is_equal_only_within_its_tolerance() -> None:
    def answers(worst: float) -> list[dict[str, Any]]:
        good = dict.fromkeys(numerics.COMPARED, 1e-7)
        exact = dict.fromkeys(good, 1e-13)
        return [
            {"float32": good, "float64": exact},
            {"float32": {**good, "gradients": worst}, "float64": exact},
        ]

    assert numerics._layout_row("x", answers(9e-6)) == (
        ["x", "1.0e-07", "1.0e-07", "9.0e-06", "1.0e-07", *["1.0e-13"] * 4, "equal"],
        True,
    )
    for worst in (2e-5, math.nan, math.inf):
        row, within = numerics._layout_row("x", answers(worst))
        assert (row[-1], within) == ("TOO FAR APART", False)


def test_tables_are_markdown() -> None:
    assert gpu_report.table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
