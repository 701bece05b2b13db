"""How models are divided into stages, and what each rank then holds."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import Family, LayoutConfig, ModelConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import build_model, count_parameters, in_few_layers
from gridformer.models.model import only_layers
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.products import Work, products_of
from gridformer.parallel.auto.products import _built as products_of_all_layers
from gridformer.parallel.pipeline.partition import link_costs, model_outline, partition, stages_of
from gridformer.parallel.sharding import shard_of

FAMILIES: tuple[Family, ...] = ("gpt2", "bert", "t5", "transformer")


def model_of(family: Family, **changes: object) -> ModelConfig:
    size = {"n_layers": 4, "hidden_size": 32, "n_heads": 4, "vocab_size": 64, "max_seq_len": 16}
    return ModelConfig.model_validate({"family": family, **size, **changes})


def every_cut(n: int, n_stages: int) -> list[list[range]]:
    return [
        [range(a, b) for a, b in itertools.pairwise((0, *inner, n))]
        for inner in itertools.combinations(range(1, n), n_stages - 1)
    ]


@settings(max_examples=100)
@given(
    costs=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), stages=st.integers(1, 9)
)
def test_no_cut_has_a_smaller_largest_stage(costs: list[float], stages: int) -> None:
    """Among the cuts with as small a largest stage, none has a smaller sum of squares."""
    if stages > len(costs):
        with pytest.raises(ValueError, match="cannot form"):
            partition(costs, stages)
        return

    def worth(cut: list[range]) -> tuple[float, float]:
        sums = [sum(costs[i] for i in stage) for stage in cut]
        return max(sums), sum(value * value for value in sums)

    found = [*partition(costs, stages)]
    assert [i for stage in found for i in stage] == [*range(len(costs))]
    assert min(map(len, found)) > 0
    assert worth(found) == min(map(worth, every_cut(len(costs), stages)))


def test_costs_are_the_operations_of_a_forward_pass() -> None:
    """The batch has two sequences of 8 tokens and sources of 12."""
    work = Work(tokens=16, source=24, sequences=2)
    h, f, v = 32, 128, 64
    feed_forward, projections = 4 * h * f, 8 * h * h
    with torch.device("meta"):
        gpt2 = link_costs(build_model(model_of("gpt2", n_labels=3)), work)
        t5 = link_costs(build_model(model_of("t5", n_decoder_layers=2)), work)
        bert = link_costs(build_model(model_of("bert")), work)
    layer = 16 * (feed_forward + projections + 4 * 8 * h)
    # the pooler reads one token per sequence
    assert gpt2 == [0, *[layer] * 4, 2 * 16 * h * v + 2 * 2 * h * h]
    assert bert == [0, *[layer] * 4, 2 * 16 * (h * v + h * h) + 2 * 2 * h * h]
    encoder = 24 * (feed_forward + projections + 4 * 12 * h)
    crossed = 16 * (4 * h * h + 4 * 12 * h) + 24 * 4 * h * h
    assert t5 == [0, *[encoder] * 4, 0, *[layer + crossed] * 2, 2 * 16 * h * v]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_links_is_known_without_a_model(family: Family) -> None:
    with torch.device("meta"):
        config = model_of(family, n_labels=3) if family in ("gpt2", "bert") else model_of(family)
        assert config.n_links == len(build_model(config).links())


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    work = Work(tokens=1024, sequences=1)
    small = stages_of(model_of("gpt2", n_layers=8), 2, work)
    large = stages_of(model_of("gpt2", n_layers=8, vocab_size=50_000), 2, work)
    assert [len(stage) for stage in small] == [5, 5]
    assert [len(stage) for stage in large] == [9, 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pp", "k"), [(3, 1), (3, 2)])
def test_ranks_hold_their_stages_and_nothing_else(family: Family, pp: int, k: int) -> None:
    """Parameters keep their usual names, and shared ones are marked on all their stages."""
    config = model_of(family)
    layout = LayoutConfig(pp=pp, stages_per_rank=k, micro_batches=pp)
    whole = build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"))
    want = dict(whole.named_parameters())
    holders: dict[str, list[int]] = {name: [] for name in want}
    models = [
        build_parallel(config, layout, Axes(pp=Axis("pp", pp, rank)), 1, torch.device("cpu"))
        for rank in range(pp)
    ]
    for rank, model in enumerate(models):
        for name, parameter in model.named_parameters():
            holders[name].append(rank)
            assert torch.equal(parameter, want[name]), name
    assert all(holders.values()), "every parameter is somewhere"
    shared = {name: tuple(ranks) for name, ranks in holders.items() if len(ranks) > 1}
    for model in models:
        for name, parameter in model.named_parameters():
            assert shard_of(parameter).stages == shared.get(name, ())
    biases = {"encoder.bias.weight", "decoder.bias.weight"} if family == "t5" else set()
    assert {"tokens.weight"} <= shared.keys() <= {"tokens.weight"} | biases
    assert shared["tokens.weight"][0] == 0


def deep(family: Family, n_layers: int, **changes: object) -> ModelConfig:
    more = {"n_decoder_layers": n_layers} if family in ("t5", "transformer") else {}
    return model_of(family, n_layers=n_layers, **more, **changes)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "transformer", "llama"])
def test_an_outline_has_the_links_and_costs_of_the_whole_model(family: Family) -> None:
    config = deep(family, 3)
    work = Work(tokens=64, source=32 * (family in ("t5", "transformer")), sequences=4)
    with torch.device("meta"):
        whole = build_model(config)
    outline = model_outline(config)
    assert outline.links() == whole.links()
    assert link_costs(outline, work) == link_costs(whole, work)
    built = {name for name, _ in outline.named_parameters()}
    assert built < {name for name, _ in whole.named_parameters()}


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        *[(family, "pre") for family in ("gpt2", "bert", "t5", "transformer", "llama")],
        *[(family, "post") for family in ("bert", "transformer")],
    ],
)
def test_few_layers_tell_what_a_deep_model_has(family: Family, norm: str) -> None:
    config = deep(family, 5, norm_position=norm)
    if config.two_stacks:
        config = config.model_copy(update={"n_decoder_layers": 4})
    with torch.device("meta"):
        whole = build_model(config)
    assert count_parameters(config) == sum(p.numel() for p in whole.parameters())
    assert products_of(config) == products_of_all_layers(config)
    assert sum(times for times, _ in in_few_layers(config)) == 1


def test_only_named_layers_are_built_under_their_names() -> None:
    with torch.device("meta"), only_layers({"layers.2"}):
        model = build_model(model_of("gpt2"))
    layers = {name.split(".")[1] for name, _ in model.named_parameters() if "layers." in name}
    assert layers == {"2"}
