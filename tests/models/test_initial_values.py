"""The spread of initial weights equals Hugging Face's and torch's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from tests.support.reference.shared import from_hugging_face, hugging_face


def config_of(family: str, **changes: Any) -> ModelConfig:
    """Return a config whose different widths tell one rule from another."""
    values = {"n_layers": 2, "hidden_size": 96, "n_heads": 3, "ffn_size": 700, "vocab_size": 300}
    return ModelConfig(**{**values, "family": family, "max_seq_len": 90, **changes})


def values(config: ModelConfig) -> dict[str, Tensor]:
    model = build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"))
    return {name: p.detach() for name, p in model.named_parameters()}


def parts_of(name: str, value: Tensor, d: int) -> dict[str, Tensor]:
    """Return a matrix, or its q, k and v parts; fused columns are ordered [n, parts, d]."""
    n = 3 if name.endswith("attention.qkv.weight") else 2 if name.endswith("kv.weight") else 1
    if n == 1:
        return {name: value}
    apart = value.unflatten(1, (-1, n, d))
    return {f"{name}, part {i}": apart[:, :, i] for i in range(n)}


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_spreads_are_those_of_hugging_face(family: str) -> None:
    """Freshly built models differ only by chance, matrix by matrix, since both are drawn."""
    config = config_of(family, head_dim=64 if family == "t5" else 0)
    torch.manual_seed(1)
    theirs = hugging_face(family, config, torch.float32)
    theirs.apply(theirs._init_weights)
    want = from_hugging_face(theirs.state_dict(), config)
    for name, value in values(config).items():
        if value.dim() == 1:
            assert torch.equal(value, want[name]), name
            continue
        expected = parts_of(name, want[name], config.head_width)
        for part, found in parts_of(name, value, config.head_width).items():
            # Two standard deviations, each with an error of std / sqrt(2 n).
            error = float(expected[part].std()) / math.sqrt(found.numel())
            assert abs(float(found.std()) - float(expected[part].std())) < 4.5 * error, part


def test_the_transformers_matrices_are_xaviers() -> None:
    """q, k, v and the other matrices have the spread of torch's own xavier_normal_.

    The table has variance 1 / h, because it is multiplied by h^1/2 when read and also makes logits.
    """
    config = config_of("transformer", head_dim=64)
    torch.manual_seed(1)
    for name, value in values(config).items():
        if value.dim() == 1:
            continue
        for part, found in parts_of(name, value, 64).items():
            if name == "tokens.weight":
                want = torch.tensor(96**-0.5)
            else:
                want = nn.init.xavier_normal_(torch.empty(found.shape[0], found[0].numel())).std()
            error = float(want) / math.sqrt(found.numel())
            assert abs(float(found.std()) - float(want)) < 4.5 * error, part
