"""The blocks of all ranks hold each element of the global tensor once; padding is zero."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model, build_model
from gridformer.models.blocks import Init, new_parameter, with_init
from gridformer.parallel import parallelize, sharding
from tests.support.layouts import LAYOUTS, name_of, ranks

AXIS = st.sampled_from([None, "row", "col"])


def placed(shape: tuple[int, ...], placement: sharding.ParamPlacement, axes: Axes) -> nn.Parameter:
    module = nn.Module()
    with torch.device("meta"):
        module.weight = new_parameter(*shape, init=Init(std=0.5))
    sharding.shard_parameter(module, "weight", placement, axes)
    return module.get_parameter("weight")


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Return 1, 2, 3 ...: all elements differ, and none is zero."""
    return torch.arange(1, math.prod(shape) + 1).reshape(shape)


def tile(whole: Tensor, held: list[tuple[sharding.ParamShard, torch.Size]]) -> Tensor:
    """Check the blocks' values, and return how many blocks hold each element of `whole`."""
    times = torch.zeros_like(whole)
    for shard, shape in held:
        local = shard.block_of(whole, shape)
        assert local.shape == shape
        part = shard.valid(local)
        here = tuple(slice(o, o + n) for o, n in zip(shard.offset, part.shape))
        if part.numel():
            assert torch.equal(part, whole[here])
            times[here] += 1
        part.zero_()  # `part` is a view: what is left of the block is padding
        assert not local.any(), "padding is not zero"
    return times


@given(
    shape=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    cut=st.sampled_from([(None, None), ("row", None), (None, "col"), ("col", None), ("row", "col")])
    | st.tuples(AXIS, AXIS).filter(lambda cut: cut[0] != cut[1]),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pads=st.tuples(st.booleans(), st.booleans()),
)
def test_blocks_tile_the_whole(
    shape: tuple[int, int],
    cut: tuple[str | None, ...],
    grid: tuple[int, int],
    pads: tuple[bool, bool],
) -> None:
    """Each rank of the axes that do not shard holds every element once, for any sizes."""
    rows, cols = grid
    pad = tuple(math.lcm(rows, cols) if each else 0 for each in pads)
    placement = sharding.ParamPlacement(cut=cut, pad=pad)
    held, shapes = [], set()
    for axes in ranks(rows, cols):
        parameter = placed(shape, placement, axes)
        assert parameter.is_meta
        held.append((sharding.shard_of(parameter), parameter.shape))
        shapes.add(tuple(parameter.shape))
        assert sharding.shard_of(parameter).size == shape
    assert len(shapes) == 1, "collectives need equal blocks"
    copies = math.prod(n for name, n in (("row", rows), ("col", cols)) if name not in cut)
    assert (tile(numbered(shape), held) == copies).all()
    for dim, name in enumerate(cut):
        n = {"row": rows, "col": cols, None: 1}[name]
        padded = next(iter(shapes))[dim] * n
        multiple = 1 if name is None else (pad[dim] or n)
        assert padded % multiple == 0
        assert padded - shape[dim] < multiple


@given(
    size=st.integers(1, 30),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    copies=st.sampled_from(["row", "col", "grid"]),
    partial=st.booleans(),
)
def test_one_copy_is_the_owner(
    size: int, grid: tuple[int, int], copies: str, partial: bool
) -> None:
    rows, cols = grid
    cut = {"row": "col", "col": "row", "grid": None}[copies]
    held = []
    for axes in ranks(rows, cols):
        parameter = placed(
            (size,), sharding.ParamPlacement((cut,), copies=copies, partial=partial), axes
        )
        shard = sharding.shard_of(parameter)
        assert shard.copies == (copies if axes[copies].size > 1 else None)
        assert shard.partial == (partial and axes[copies].size > 1)
        if shard.owned:
            held.append((shard, parameter.shape))
    assert (tile(numbered((size,)), held) == 1).all()


def test_placing_keeps_type_and_initial_values() -> None:
    axes = next(ranks(2, 2))
    module = nn.Module()
    weight: Any = nn.Parameter(torch.empty(4, 6, dtype=torch.float64, device="meta"))
    with_init(weight, Init(mean=1.0, std=0.5))
    module.weight = weight
    sharding.shard_parameter(module, "weight", sharding.ParamPlacement(("row", "col")), axes)
    local: Any = module.get_parameter("weight")
    assert local.dtype == torch.float64
    assert sharding.info_of(local).init == Init(mean=1.0, std=0.5)
    assert local.shape == (2, 3)


def test_a_plain_parameter_is_whole_and_owned() -> None:
    parameter = nn.Parameter(torch.zeros(3, 5))
    shard = sharding.shard_of(parameter)
    assert shard == sharding.ParamShard(size=(3, 5), offset=(0, 0))
    assert shard.owned
    assert shard.valid(parameter).shape == (3, 5)
    whole = numbered((3, 5))
    assert torch.equal(shard.block_of(whole, whole.shape), whole)


def shards_of(layout: LayoutConfig, vocab_size: int, max_seq_len: int) -> list[Model]:
    """Return the model as each device of the grid holds it, without allocation."""
    config = ModelConfig(
        n_layers=1, hidden_size=12, n_heads=12, vocab_size=vocab_size, max_seq_len=max_seq_len
    )
    models = []
    for axes in ranks(layout.rows, layout.cols):
        with torch.device("meta"):
            models.append(parallelize(build_model(config), layout, axes))
    return models


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize(("vocab_size", "max_seq_len"), [(89, 13), (97, 24), (12, 12), (5, 2)])
def test_owners_of_a_model_hold_each_element_once(
    layout: LayoutConfig, vocab_size: int, max_seq_len: int
) -> None:
    """Each rank updates what it owns: every element of every parameter, exactly once."""
    models = shards_of(layout, vocab_size, max_seq_len)
    plain = shards_of(LayoutConfig(), vocab_size, max_seq_len)[0]
    held: dict[str, list[tuple[sharding.ParamShard, torch.Size]]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            shard = sharding.shard_of(parameter)
            if shard.owned:
                held.setdefault(name, []).append((shard, parameter.shape))
    assert held.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert (tile(numbered(tuple(parameter.shape)), held[name]) == 1).all(), name


def test_other_networks_are_refused_with_what_can_be_sharded() -> None:
    layout = LayoutConfig(scheme="megatron", cols=2)
    with pytest.raises(TypeError, match=r"not a Linear.*Branches.*branches\.parallelize_branches"):
        parallelize(torch.nn.Linear(3, 3), layout, Axes())  # type: ignore[arg-type]
