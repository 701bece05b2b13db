"""Models of which only some layers are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gridformer.config import Family, ModelConfig
from gridformer.models import build_model, count_parameters, in_few_layers
from gridformer.models.model import only_layers
from gridformer.parallel.auto.products import Work, products_of
from gridformer.parallel.auto.products import _built as products_of_all_layers
from gridformer.parallel.pipeline.partition import link_costs, model_outline


def model_of(family: Family, n_layers: int, **changes: Any) -> ModelConfig:
    size = {"n_layers": n_layers, "hidden_size": 32, "n_heads": 2, "vocab_size": 64, **changes}
    more = {"n_decoder_layers": n_layers} if family in ("t5", "transformer") else {}
    return ModelConfig.model_validate({"family": family, **size, **more})


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "transformer", "llama"])
def test_an_outline_has_the_links_and_costs_of_the_whole_model(family: Family) -> None:
    config = model_of(family, n_layers=3)
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
    config = model_of(family, n_layers=5, norm_position=norm)
    if config.two_stacks:
        config = config.model_copy(update={"n_decoder_layers": 4})
    with torch.device("meta"):
        whole = build_model(config)
    assert count_parameters(config) == sum(p.numel() for p in whole.parameters())
    assert products_of(config) == products_of_all_layers(config)
    assert sum(times for times, _ in in_few_layers(config)) == 1


def test_only_named_layers_are_built_under_their_names() -> None:
    with torch.device("meta"), only_layers({"layers.2"}):
        model = build_model(model_of("gpt2", n_layers=4))
    layers = {name.split(".")[1] for name, _ in model.named_parameters() if "layers." in name}
    assert layers == {"2"}
