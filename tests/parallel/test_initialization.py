"""Initial values depend only on seed and name, and have the right spread, in every layout."""

import math
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models.blocks import Init, new_parameter
from gridformer.parallel import build_parallel
from gridformer.parallel.build import initialize
from gridformer.parallel.sharding import ParamPlacement, shard_of, shard_parameter
from gridformer.utils import rng
from tests.support.layouts import LAYOUTS, name_of, ranks

CPU = torch.device("cpu")
CONFIG = ModelConfig(n_layers=2, hidden_size=48, n_heads=12, vocab_size=89, max_seq_len=25)


def values(
    config: ModelConfig = CONFIG, seed: int = 1, dtype: str = "float32"
) -> dict[str, Tensor]:
    model = build_parallel(config, LayoutConfig(), Axes(), seed, CPU, dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_block_is_cut_from_the_same_model(layout: LayoutConfig, dtype: str) -> None:
    """Blocks are equal bit by bit, and padding is zero."""
    whole = values(dtype=dtype)
    seen = set()
    for axes in ranks(layout.rows, layout.cols):
        model = build_parallel(CONFIG, layout, axes, 1, CPU, dtype)
        for name, parameter in model.named_parameters():
            want = shard_of(parameter).block_of(whole[name], parameter.shape)
            assert parameter.dtype == want.dtype
            assert torch.equal(parameter, want), name
            assert parameter.requires_grad
            seen.add(name)
    assert seen == whole.keys()


@pytest.mark.parametrize(
    ("stationary", "turned"),
    [
        ("auto", {"attention.out", "mlp.down"}),
        ("output", set()),
        ("input", {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
    ],
)
def test_weights_whose_input_stays_are_transposed(
    stationary: Literal["auto", "output", "input"], turned: set[str]
) -> None:
    layout = LayoutConfig(scheme="optimus", rows=2, cols=3, stationary=stationary)
    model = build_parallel(CONFIG, layout, next(ranks(2, 3)), 1, CPU)
    found = set()
    for name, parameter in model.named_parameters():
        if shard_of(parameter).transposed:
            assert parameter.t().is_contiguous()
            found.add(name.removeprefix("layers.0.").removeprefix("layers.1."))
        else:
            assert parameter.is_contiguous()
    assert found == {f"{name}.weight" for name in turned}


def test_nothing_but_seed_and_name_matters() -> None:
    """Another depth or vocabulary, or torch's own random state, changes no remaining value."""
    torch.manual_seed(5)
    first = values()
    torch.manual_seed(6)
    assert all(torch.equal(v, first[name]) for name, v in values().items())
    changes = {"n_heads": 4, "vocab_size": 97, "max_seq_len": 30, "dropout": 0.5}
    other = values(CONFIG.model_copy(update=changes))
    for name, value in other.items():
        rows = min(len(value), len(first[name]))
        assert torch.equal(value[:rows], first[name][:rows]), name


def test_values_are_the_stream_of_seed_and_name() -> None:
    got = values(seed=7, dtype="float64")["layers.1.mlp.up.weight"]
    key = rng.key(7, "layers.1.mlp.up.weight")
    want = rng.normal(key, torch.arange(48), torch.arange(192)) * 0.02
    torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("n_layers", "init_std"), [(1, 0.02), (8, 0.02), (2, 0.1)])
def test_spread(n_layers: int, init_std: float) -> None:
    """The spread is 0.02 by default, times 1/sqrt(2 N) for residual projections."""
    config = CONFIG.model_copy(update={"n_layers": n_layers, "init_std": init_std})
    for name, value in values(config).items():
        if value.dim() == 1:
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert (value == mean).all(), name
            continue
        std = init_std
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * n_layers)
        error = std / math.sqrt(value.numel())
        assert abs(float(value.mean())) < 4.5 * error, name
        assert abs(float(value.std()) - std) < 4.5 * error / math.sqrt(2), name
        assert float(value.abs().max()) < 4.2 * std


def test_filling_in_chunks_changes_nothing() -> None:
    want = values()
    with patch("gridformer.parallel.build._CHUNK", 100):
        assert all(torch.equal(v, want[name]) for name, v in values().items())


@pytest.mark.parametrize(("shape", "cut"), [((13,), ("col",)), ((13, 7), ("col", "row"))])
def test_any_spread_of_vectors_and_matrices(
    shape: tuple[int, ...], cut: tuple[str | None, ...]
) -> None:
    """Test means and spreads that GPT-2 does not use, in blocks that do not divide evenly."""

    def filled(axes: Axes, cut: tuple[str | None, ...]) -> nn.Parameter:
        module = nn.Module()
        with torch.device("meta"):
            module.weight = new_parameter(*shape, init=Init(mean=3.0, std=0.5))
        shard_parameter(module, "weight", ParamPlacement(cut), axes)
        initialize(module, 1, CPU, torch.float64)
        return module.get_parameter("weight")

    whole = filled(Axes(), (None,) * len(shape)).detach()
    assert 2.5 < float(whole.mean()) < 3.5
    assert 0.3 < float(whole.std()) < 0.7
    for axes in ranks(2, 3):
        block = filled(axes, cut)
        assert torch.equal(block, shard_of(block).block_of(whole, block.shape))


def test_values_can_be_left_to_whoever_loads_them_next() -> None:
    layout = LayoutConfig()
    model = build_parallel(CONFIG, layout, Axes(), 1, CPU, filled=False)
    assert not any(parameter.any() for parameter in model.parameters())
    filled = build_parallel(CONFIG, layout, Axes(), 1, CPU)
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in filled.named_parameters()
    ]
    assert any(parameter.any() for parameter in filled.parameters())
