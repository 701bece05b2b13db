"""Learning-rate schedules equal those of torch and transformers, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gridformer.config import TrainConfig, load_run, parse_run
from gridformer.config.reading import configs_dir
from gridformer.train.optimizer import learning_rate
from gridformer.utils.errors import ConfigError
from tests.support.reference.shared import transformers

STEPS, WARM, LR, LOW = 40, 6, 2.0, 0.2


def rates(**train: Any) -> list[float]:
    config = TrainConfig(
        **{"steps": STEPS, "warmup_steps": WARM, "lr": LR, "min_lr_ratio": LOW, **train}
    )
    return [learning_rate(step, config) for step in range(config.steps)]


def theirs(make: Any, *args: Any, **settings: Any) -> list[float]:
    """Return the rates of a function of torch or transformers, over one step more than ours."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer, *args, **settings)
    found = []
    for _ in range(STEPS + 1):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd", "inverse_sqrt"])
def test_the_warm_up_is_a_line_to_the_full_rate(schedule: str) -> None:
    """Transformers' warm-up begins at 0, where a step would change nothing; ours one step later."""
    found = rates(lr_schedule=schedule)
    want = theirs(transformers.get_constant_schedule_with_warmup, WARM)
    assert found[:WARM] == pytest.approx(want[1 : WARM + 1])


def test_cosine_and_linear_are_those_of_torch() -> None:
    span = STEPS - 1 - WARM
    want = theirs(torch.optim.lr_scheduler.CosineAnnealingLR, span, LR * LOW)
    assert rates(lr_schedule="cosine")[WARM:] == pytest.approx(want[: span + 1])
    want = theirs(torch.optim.lr_scheduler.LinearLR, 1.0, LOW, total_iters=span)
    assert rates(lr_schedule="linear")[WARM:] == pytest.approx(want[: span + 1])


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("fraction", [0.25, 0.85, 0.001])
def test_wsd_is_that_of_transformers(shape: str, fraction: float) -> None:
    """Its decay begins after the last stable step, and its last step has the lowest rate."""
    decay = max(1, round(fraction * STEPS))
    want = theirs(
        transformers.get_wsd_schedule,
        num_warmup_steps=WARM,
        num_stable_steps=STEPS - 1 - decay - WARM,
        num_decay_steps=decay,
        decay_type=shape,
        min_lr_ratio=LOW,
    )
    found = rates(lr_schedule="wsd", decay_fraction=fraction, decay_shape=shape)
    assert found[WARM:] == pytest.approx(want[WARM:STEPS])
    assert found[-1] == pytest.approx(LR * LOW)


def test_inverse_sqrt_is_that_of_transformers() -> None:
    want = theirs(transformers.get_inverse_sqrt_schedule, WARM)
    assert rates(lr_schedule="inverse_sqrt") == pytest.approx(want[1:])


def test_constant_stays() -> None:
    assert set(rates(lr_schedule="constant")[WARM:]) == {LR}


def refusal(**train: Any) -> str:
    raw = {"model": {"n_layers": 1, "hidden_size": 8, "n_heads": 2}, "data": {"path": "x"}}
    with pytest.raises(ConfigError) as caught:
        parse_run({**raw, "train": train})
    (problem,) = caught.value.problems
    return problem


def test_schedules_that_do_not_fit_are_refused_with_values_that_work() -> None:
    problem = refusal(lr_schedule="inverse_sqrt")
    assert "cannot use warmup_steps=0; use warmup_steps=1" in problem
    problem = refusal(lr_schedule="wsd", steps=100, warmup_steps=70, decay_fraction=0.4)
    assert "use warmup_steps=60, or decay_fraction=0.3" in problem
    for works in ({"warmup_steps": 60}, {"decay_fraction": 0.3}):
        rates(
            **{
                "lr_schedule": "wsd",
                "steps": 100,
                "warmup_steps": 70,
                "decay_fraction": 0.4,
                **works,
            }
        )
    # Both problems of the train section are told at once.
    problem = refusal(lr_schedule="inverse_sqrt", update="in_backward")
    assert "lr_schedule" in problem
    assert "clip_by" in problem


def test_wmt14_has_the_rates_of_the_original_transformer() -> None:
    """Equation 3 of Vaswani et al. 2017 with d_model = 512, to the digits of the run file."""
    train = load_run(configs_dir() / "runs" / "wmt14-en-de.yaml").train
    for step in (1, 2, 3999, 4000, 4001, 50_000, 100_000):
        want = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(step - 1, train) == pytest.approx(want, rel=1e-6)
