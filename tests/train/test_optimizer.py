"""Updates by unit on one device: clipping, non-finite losses, offloaded moments; learning rates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import checkpoint
from gridformer.config import LayoutConfig, TrainConfig, load_run, parse_run
from gridformer.config.reading import configs_dir
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.data.gradients import clippings
from gridformer.train.optimizer import UpdateUnit, learning_rate
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import ConfigError, DivergedError
from tests.support.checkpoints import save_checkpoint
from tests.support.reference.shared import transformers

MODEL = {"n_layers": 3, "hidden_size": 16, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
RUN = parse_run({"model": MODEL, "data": {"path": "unused"}, "train": {"global_batch": 2}})
MOMENTS = ("exp_avg", "exp_avg_sq")


def stepper(**train: Any) -> Stepper:
    model = build_parallel(RUN.model, LayoutConfig(), Axes(), 1, torch.device("cpu"))
    return Stepper(model, TrainConfig(global_batch=2, **train), Axes())


def step(device: Stepper, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    return device(number, lambda rows: next_words(tokens[rows])).grad_norm


def norm_of(unit: UpdateUnit) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in unit.updated if p.grad is not None))


def assert_same(a: Stepper, b: Stepper) -> None:
    """Check equality to the bit, including moments."""
    for one, other in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(one, other)
        left, right = a.updates.state[one], b.updates.state[other]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_unit_is_clipped_by_its_own_norm() -> None:
    """Units are each layer's matrices, and the rest; only large norms are clipped."""
    free = stepper(clip_norm=0.0, clip_by="layer")
    total = step(free, 0)
    norms = [norm_of(unit) for unit in free.updates.units]
    assert len(norms) == 3 + 1
    assert math.hypot(*norms) == pytest.approx(total, rel=1e-6)
    clip = sorted(norms)[1]  # two norms are larger
    device = stepper(clip_norm=clip, clip_by="layer")
    assert step(device, 0) == pytest.approx(total, rel=1e-6), "what is reported is not clipped"
    for unit, norm in zip(device.updates.units, norms):
        assert norm_of(unit) == pytest.approx(min(norm, clip), rel=1e-4)
    layers = device.updates.units[:-1]
    assert {p.dim() for unit in layers for p in unit.updated} == {2}
    inside = sum(p.numel() for unit in layers for p in unit.updated)
    assert inside == 3 * 12 * 16 * 16


def clipping(norm: float, max_norm: float) -> float:
    """Return the factor that scales a norm above `max_norm` down to it, otherwise 1."""
    return max_norm / (norm + 1e-6) if max_norm and norm > max_norm else 1.0


@pytest.mark.parametrize("clip", [0.0, 0.1, 1.0])
def test_the_device_clips_as_python_does(clip: float) -> None:
    """To the bit, also for numbers that are not finite and those at the limit."""
    norms = [0.0, 1e-3, 0.1, 0.1 + 1e-9, 1.0, 1.0 - 5e-7, 3.7, 1e30, math.inf, math.nan]
    found = clippings(torch.tensor(norms, dtype=torch.float64), clip).tolist()
    assert found == [clipping(norm, clip) for norm in norms]


def test_updates_in_backward_are_exact_to_the_bit() -> None:
    """One device in float32 runs the same operations, only at another time."""
    a, b = (
        stepper(clip_norm=0.05, clip_by="layer", update=u)
        for u in ("after_backward", "in_backward")
    )
    for number in range(3):
        assert step(a, number) == pytest.approx(step(b, number), rel=1e-12)
    assert_same(a, b)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.0}, {"clip_by": "layer"}])
def test_a_diverged_step_in_backward_says_that_layers_were_updated(clip: dict[str, Any]) -> None:
    device = stepper(update="in_backward", **clip)
    step(device, 0)
    with torch.no_grad():
        device.model.get_parameter("layers.1.mlp.up.weight")[0, 0] = math.nan
    with pytest.raises(
        DivergedError, match=r"step 2: .* layers were updated before this was known, so resume from"
    ):
        step(device, 1)


def test_layers_below_a_gradient_that_is_not_finite_stay_as_they_are() -> None:
    """If layers are clipped, their norm is checked before they are updated."""
    device = stepper(update="in_backward", clip_by="layer")
    step(device, 0)
    middle = device.model.get_parameter("layers.1.mlp.up.weight")
    middle.register_hook(lambda grad: grad * math.inf)
    before = {name: p.detach().clone() for name, p in device.model.named_parameters()}
    with pytest.raises(DivergedError):
        step(device, 1)
    changed = {n for n, p in device.model.named_parameters() if not torch.equal(p, before[n])}
    assert {name.split(".")[1] for name in changed} == {"2"}, "the layer above it alone"


def test_a_clipped_loss_in_backward_needs_clip_by_layer() -> None:
    with pytest.raises(ConfigError, match="use clip_by=layer or clip_norm=0"):
        parse_run({**raw(), "train": {"update": "in_backward"}})
    with pytest.raises(ConfigError, match="use dtype=bfloat16 or update=after_backward"):
        parse_run({**raw(), "train": {"update": "in_backward", "clip_norm": 0, "dtype": "float16"}})


def test_a_run_is_told_that_micro_batches_keep_all_gradients() -> None:
    train = {"update": "in_backward", "clip_norm": 0.0}
    for micro_batches in (1, 2):
        run = parse_run({**raw(), "layout": {"micro_batches": micro_batches}, "train": train})
        said = [reason for reason in decide_run(run).choices.reasons if "in_backward" in reason]
        assert bool(said) == (micro_batches > 1)
        assert all("saves no memory here" in reason for reason in said)


def raw() -> dict[str, Any]:
    return {"model": MODEL, "data": {"path": "unused"}}


def test_offloaded_moments_are_copied_there_and_back() -> None:
    """AdamW sees the copies; the memory that keeps the moments stays the same throughout."""
    device = stepper(offload="optimizer", clip_norm=0.05)
    homes = {
        id(p): [s[name].data_ptr() for name in MOMENTS] for p, s in device.updates.state.items()
    }
    assert len(homes) == len([*device.model.parameters()])
    seen = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            seen.append(id(parameter))
            here = [state[name].data_ptr() for name in MOMENTS]
            assert not set(here) & {address for each in homes.values() for address in each}

    for unit in device.updates.units:
        for optimizer in unit.optimizers:
            optimizer.register_step_pre_hook(look)
    for number in range(2):
        step(device, number)
    assert sorted(seen) == sorted([*homes, *homes]), "each parameter's, once a step"
    for parameter, state in device.updates.state.items():
        assert [state[name].data_ptr() for name in MOMENTS] == homes[id(parameter)]
        assert all(bool(state[name].any()) for name in MOMENTS)


@pytest.mark.parametrize("first", ["none", "optimizer"])
def test_a_run_resumes_with_or_without_offload(tmp_path: Path, first: str) -> None:
    """Both are equal to the bit."""
    second = "optimizer" if first == "none" else "none"
    hows = (first, first, second)
    whole, before, after = (stepper(offload=how, clip_norm=0.05) for how in hows)
    for number in range(4):
        step(whole, number)
    for number in range(2):
        step(before, number)
    folder = save_checkpoint(tmp_path, 2, 16, RUN, before.model, before.updates, Axes())
    checkpoint.load(folder, after.model, after.updates, Axes())
    for number in range(2, 4):
        step(after, number)
    assert_same(whole, after)


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
    asked = {"lr_schedule": "wsd", "steps": 100, "warmup_steps": 70, "decay_fraction": 0.4}
    for works in ({"warmup_steps": 60}, {"decay_fraction": 0.3}):
        rates(**{**asked, **works})
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
