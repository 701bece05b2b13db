"""A product of many tokens with a weight is one product, and not one of each sequence."""

import itertools
from typing import Any

import pytest

from gridformer.config import RunConfig
from gridformer.parallel.validation import check_layout
from gridformer.record import trace_rank
from gridformer.record.events import Kernel
from tests.support.fake_gpu import InProcess
from tests.support.marks import full_unless
from tests.support.multirank.matrix import MODELS, SCHEMES
from tests.support.multirank.memory import a_run

CELLS = [*itertools.product(MODELS, SCHEMES, ("float32", "bfloat16"))]


def quick(cell: tuple[str, str, str]) -> bool:
    """Three families meet each scheme, and every family several; casts are looked at in T5."""
    model, scheme, dtype = cell
    place = [*MODELS].index(model) + [*SCHEMES].index(scheme)
    return place % 3 == 0 and (dtype == "float32" or model == "T5")


def batched(run: RunConfig) -> tuple[list[Any], int]:
    """Return the products of a matrix for each sequence, and the number of all products.

    Over NCCL, Optimus multiplies what it sums over columns by a block of columns for each.
    """
    trace = trace_rank(run, 0, kernels=True)
    assert trace.complete, trace.troubles
    found = [e for e in trace.unfolded() if isinstance(e, Kernel) and e.kind == "product"]
    found = [e for e in found if not e.op.startswith("grouped")]  # of a matrix for each expert
    usual = (1, run.layout.cols if run.layout.scheme == "optimus" else 1)
    return [(e.op, e.shape, e.place.module) for e in found if e.shape[0] not in usual], len(found)


@pytest.mark.parametrize(("model", "scheme", "dtype"), full_unless(quick, CELLS, unpack=True))
def test_a_chunk_of_the_loss_is_one_product(
    gpu: InProcess, model: str, scheme: str, dtype: str
) -> None:
    layout = SCHEMES[scheme][0]
    changes = {"n_layers": 2, "max_seq_len": 12, **MODELS[model]}
    run = a_run(layout, changes, {"dtype": dtype, "loss_chunk_tokens": 6, "global_batch": 12})
    check_layout(run)
    found, n = gpu(batched, run)
    assert n > 0
    assert not found
