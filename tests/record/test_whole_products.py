"""A product of many tokens with a weight is one product, and not one of each sequence."""

from typing import Any

import pytest

from gridformer.config import RunConfig
from gridformer.parallel.validation import check_layout
from gridformer.record import trace_rank
from gridformer.record.events import Kernel
from tests.support.fake_gpu import InProcess
from tests.support.multirank.matrix import MODELS, SCHEMES
from tests.support.multirank.memory import a_run

CELLS = [(model, scheme) for model in MODELS for scheme in SCHEMES]
VOCAB = 40  # no other number of columns or rows


def batched(run: RunConfig) -> tuple[list[Any], int]:
    """Return the products of several matrices that read or make logits, and all products."""
    trace = trace_rank(run, 0, kernels=True)
    assert trace.complete, trace.troubles
    found = [e for e in trace.unfolded() if isinstance(e, Kernel) and e.kind == "product"]
    return [(e.op, e.shape, e.place.module) for e in found if e.shape[0] > 1], len(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "scheme"), CELLS)
def test_a_chunk_of_the_loss_is_one_product(
    gpu: InProcess, model: str, scheme: str, dtype: str
) -> None:
    layout = SCHEMES[scheme][0]
    changes = {"n_layers": 2, "max_seq_len": 12, **MODELS[model]}
    run = a_run(layout, changes, {"dtype": dtype, "loss_chunk_tokens": 6, "global_batch": 4})
    check_layout(run)
    found, n = gpu(batched, run)
    assert n > 0
    assert not found
