"""benchmarks.gpu: predicted times, targets, FLOPs and tolerances."""

import math
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import expected, numerics, step_report
from benchmarks.gpu import step as gpu_step
from benchmarks.predicted.predictions import Predicted

from gridformer.config import ModelConfig, shipped_model


def settings(**changes: Any) -> gpu_step.Settings:
    values: dict[str, Any] = {
        "config": gpu.TINY, "batches": (2,), "s": 8, "steps": 1, "rounds": 2, "modes": ("eager",),
    }  # fmt: skip
    return gpu_step.Settings(**{**values, **changes})


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


def test_disagreement_is_reported_loudly() -> None:
    assert "they agree" in step_report.agreement(comparison_of(1, 1, 4.0))[0]
    assert "THEY DISAGREE" in step_report.agreement(comparison_of(1, 1, 5.0))[0]


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
