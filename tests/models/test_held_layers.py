"""Models of which only some layers are built."""

from __future__ import annotations

import pytest
import torch

from gridformer.config import Family, ModelConfig
from gridformer.models import build_model
from gridformer.models.held_layers import only_layers
from gridformer.parallel.auto.products import Work
from gridformer.parallel.pipeline.partition import link_costs, model_outline


def model_of(family: Family, n_layers: int) -> ModelConfig:
    size = {"n_layers": n_layers, "hidden_size": 32, "n_heads": 2, "vocab_size": 64}
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


def test_only_named_layers_are_built_under_their_names() -> None:
    with torch.device("meta"), only_layers({"layers.2"}):
        model = build_model(model_of("gpt2", n_layers=4))
    layers = {name.split(".")[1] for name, _ in model.named_parameters() if "layers." in name}
    assert layers == {"2"}
