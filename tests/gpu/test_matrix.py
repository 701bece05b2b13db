"""The exactness matrix with NCCL: every layout on this machine's GPUs against one of them.

Cells, steps and tolerances are those of tests/multirank/test_matrix.py, where gloo carries the
messages. Each rank has a GPU, so a machine runs the cells that need no more GPUs than it has. What
does not run is skipped with the number of cells, and tests/conftest.py prints that at the end.

    NCCL_MULTI_RANK_GPU_ENABLE=1 pytest tests/gpu/test_matrix.py

runs the cells on the GPUs that there are, even if there is one, with NCCL 2.30 or newer.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.mesh.gpus import gpus_are_shared
from tests.support.marks import full_unless
from tests.support.multirank import matrix
from tests.support.multirank.exactness import compare, worst_of
from tests.support.multirank.pool import MAX_RANKS, WorkerPool

N_GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
if N_GPUS and gpus_are_shared():
    N_GPUS = MAX_RANKS


def cells(n_gpus: int) -> list[Any]:
    """Return the cells that these GPUs can run, and a skipped case that counts the others."""
    possible = [cell for cell in sorted(matrix.CELLS, key=matrix.n_of) if not matrix.refusal(cell)]
    here = [cell for cell in possible if matrix.n_of(cell) <= n_gpus] if n_gpus > 1 else []
    params = full_unless((matrix.QUICK | matrix.QUICK_ON_NCCL).__contains__, here)
    if len(here) < len(possible):
        why = "no cell runs on fewer than 2" if n_gpus < 2 else "they need more"
        left = f"{len(possible) - len(here)} of {len(possible)} cells of the exactness matrix"
        reason = f"NCCL was not tested on {left}: torch finds {n_gpus} GPUs for it, and {why}"
        params.append(pytest.param(None, marks=pytest.mark.skip(reason=reason), id="the_others"))
    return params


@pytest.fixture(scope="module")
def gpus() -> Iterator[WorkerPool]:
    """Processes with a GPU each, and NCCL between them."""
    workers = WorkerPool(300.0, "nccl")
    yield workers
    workers.close()


@pytest.mark.parametrize("cell", cells(N_GPUS), ids=lambda cell: cell.title)
def test_equals_one_gpu(gpus: WorkerPool, cell: matrix.Cell) -> None:
    how = cell.layout, cell.config, matrix.SETTINGS, matrix.QUICK_STEPS, cell.documents, cell.task
    worst_of(gpus.run(matrix.n_of(cell), compare, *how))


def test_cells_that_do_not_run_are_counted() -> None:
    n = len(cells(16))
    for n_gpus in (0, 1):
        (skipped,) = cells(n_gpus)
        (mark,) = skipped.marks
        assert f"{n} of {n} cells" in mark.kwargs["reason"]
        assert f"torch finds {n_gpus} GPUs" in mark.kwargs["reason"]
    *here, skipped = cells(4)
    (mark,) = skipped.marks
    assert f"{n - len(here)} of {n} cells" in mark.kwargs["reason"]
    assert len(here) > 100
