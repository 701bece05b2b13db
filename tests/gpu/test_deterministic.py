"""`train.deterministic` makes two runs on one GPU equal to the bit, wherever a GPU is found."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.fake_gpu import InProcess, own_process
from tests.support.multirank.matrix import MODELS
from tests.support.twice import differing

if not torch.cuda.is_available():
    pytest.skip("train.deterministic on a GPU: torch finds none", allow_module_level=True)

TRAIN: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"dtype": "float32", "kernels": "torch"},
    {"dtype": "float16", "recompute": "full", "loss_chunk_tokens": 64},
)


@pytest.fixture
def fresh() -> Iterator[InProcess]:
    """A process that has not used a GPU, because cuBLAS reads its setting at the first use."""
    with own_process(imports_nothing=True) as call:
        yield call


@pytest.mark.parametrize("family", ["GPT-2", "BERT", "T5", "Llama"])
@pytest.mark.parametrize("train", TRAIN, ids=lambda train: train["dtype"])
def test_the_same_steps_twice_give_the_same_bits(
    fresh: InProcess, family: str, train: dict[str, Any]
) -> None:
    assert fresh(differing, "cuda", MODELS[family], train) == []
