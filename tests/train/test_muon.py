"""Muon on one device, beside torch's own; what it updates, and settings that it refuses."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig, TrainConfig, parse_run
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import Layer
from gridformer.parallel import build_parallel
from gridformer.train.muon import Muon, muon_matrices, orthogonalized
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import ConfigError
from tests.support.multirank.matrix import MODELS

MODEL = {"n_layers": 2, "hidden_size": 16, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
ADAMW: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
WHOLE = Axis("whole")


def stepper(model: dict[str, Any] = MODEL, **train: Any) -> Stepper:
    settings = TrainConfig.model_validate(
        {
            **{"global_batch": 2, "lr": 0.02, "lr_schedule": "constant", "clip_norm": 0.0},
            **{"optimizer": "muon", "dtype": "float64", **train},
        }
    )
    built = build_parallel(
        ModelConfig(**model), LayoutConfig(), Axes(), 1, torch.device("cpu"), settings.dtype
    )
    return Stepper(built, settings, Axes())


def step(device: Stepper, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    device(number, lambda rows: next_words(tokens[rows]))


@pytest.mark.parametrize("width", [0, 8], ids=["whole matrices", "by head"])
def test_three_steps_are_those_of_torchs_muon_and_adamw(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """torch computes in bfloat16, which is switched off here."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda x: x.clone())
    device = stepper(muon_by_head=width > 0)
    named = dict(device.model.named_parameters())
    reference = {name: p.detach().clone() for name, p in named.items()}
    inside = {n for n in named if n.startswith("layers.") and named[n].dim() == 2}
    assert len(inside) == 2 * 4, "qkv, out, up and down of both layers"
    pieces: dict[str, list[Tensor]] = {}
    for name in inside:
        of_heads = width if "qkv" in name else 0
        pieces[name] = [*reference[name].split(of_heads or reference[name].shape[1], 1)]
        pieces[name] = [piece.clone().requires_grad_() for piece in pieces[name]]
    rest = {n: x.requires_grad_() for n, x in reference.items() if n not in inside}
    matrices = [x for n, x in rest.items() if x.dim() > 1]
    vectors = [x for n, x in rest.items() if x.dim() == 1]
    optimizers = [
        torch.optim.Muon(
            [piece for each in pieces.values() for piece in each],
            lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(matrices, weight_decay=0.1, **ADAMW),
        torch.optim.AdamW(vectors, weight_decay=0.0, **ADAMW),
    ]  # fmt: skip
    for number in range(3):
        step(device, number)
        for name, x in rest.items():
            x.grad = named[name].grad
        for name, each in pieces.items():
            grad = named[name].grad
            assert grad is not None
            for piece, part in zip(each, grad.split(each[0].shape[1], 1), strict=True):
                piece.grad = part
        for optimizer in optimizers:
            optimizer.step()
        wanted = {**rest, **{name: torch.cat(each, 1) for name, each in pieces.items()}}
        for name, parameter in named.items():
            torch.testing.assert_close(parameter, wanted[name], rtol=0.0, atol=1e-13)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_singular_values_follow_the_polynomial(k: int, n: int, seed: int) -> None:
    x = torch.randn(3, k, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    got = orthogonalized(x, WHOLE, WHOLE)
    torch.testing.assert_close(got, (u * s.unsqueeze(-2)) @ vt, rtol=0.0, atol=1e-9)


def test_a_matrix_without_gradient_stays_but_for_its_decay() -> None:
    """So does that of an expert that no token has reached, and its momentum stays zero."""
    assert not orthogonalized(torch.zeros(1, 4, 6), WHOLE, WHOLE).any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    device = stepper(dtype="float32")
    step(device, 0)
    (muon, _), states = device.updates.units[-1].optimizers, device.updates.state
    assert isinstance(muon, Muon)
    mine = [p for p in states if p in muon.state]
    held = {p: (p.detach().clone(), states[p]["momentum"].clone()) for p in mine}
    muon.found_inf = torch.tensor(1.0)
    for parameter in held:
        parameter.grad = torch.full_like(parameter, bad)
    muon.step()
    for parameter, (value, momentum) in held.items():
        assert torch.equal(parameter, value)
        assert torch.equal(states[parameter]["momentum"], momentum)


@pytest.mark.parametrize("name", [name for name in MODELS if "fine" not in name])
def test_matrices_of_layers_are_updated_and_no_table_vector_or_head(name: str) -> None:
    size = {"n_layers": 2, "hidden_size": 24, "n_heads": 12, "vocab_size": 11, "max_seq_len": 4}
    model = stepper({**size, **MODELS[name]}).model
    matrices = muon_matrices(model, by_head=True)
    named = {id(p): n for n, p in model.named_parameters()}
    outside = ("tokens", "positions", "segments", "head", "bias", "norm", "labels", "pooler")
    for parameter, width in matrices.items():
        words = named[id(parameter)].split(".")
        assert "layers" in words
        assert not {*words} & {*outside}
        opens = {*words} & {"qkv", "q", "kv"}
        assert width == (2 if opens else 0), words
    left = [p for p in model.parameters() if p not in matrices and p.dim() > 1]
    assert not any("layers" in named[id(parameter)] for parameter in left)


class WithTable(Layer):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.table, self.product = nn.Embedding(3, 4), nn.Linear(4, 4)


def test_a_table_in_a_layer_of_another_network_is_adamws() -> None:
    layer = WithTable()
    assert [*muon_matrices(nn.ModuleList([layer]), False)] == [layer.product.weight]


def test_moments_in_bfloat16_take_half_the_memory_and_train_as_well() -> None:
    for optimizer in ("adamw", "muon"):
        whole, half = (
            stepper(dtype="float32", optimizer=optimizer, moments_dtype=dtype, beta2=0.95)
            for dtype in ("float32", "bfloat16")
        )
        for number in range(20):
            step(whole, number)
            step(half, number)
        for p, q in zip(whole.model.parameters(), half.model.parameters(), strict=True):
            kept, rounded = whole.updates.state[p], half.updates.state[q]
            assert kept.keys() == rounded.keys()
            for key in kept.keys() - {"step"}:
                assert rounded[key].dtype == torch.bfloat16
                assert rounded[key].nbytes * 2 == kept[key].nbytes
            # AdamW moves each element by about the learning rate a step.
            assert 0 < float((p - q).detach().abs().mean()) < 0.02, "rounded, and near"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"muon_by_head": True}}, "muon_by_head=true is for optimizer=muon"),
        (
            {"train": {"moments_dtype": "bfloat16", "beta2": 0.999}},
            "rounds away what beta2=0.999 changes in a step; use beta2=0.99 or less",
        ),
    ],
)
def test_settings_without_effect_or_sense_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_run({"model": MODEL, "data": {"path": "unused"}, **sections})
