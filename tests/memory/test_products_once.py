"""Products over chunks or panels run once for each shape; the log is that of the complete step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from gridformer.memory import estimate
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.ranks import largest_ranks
from gridformer.trace.repeated_products import RepeatedProducts
from tests.support.chunks import in_three
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

BRANCHES = {"scheme": "subgraph", "branches": 2}
SEQUENCE = {"scheme": "megatron", "cols": 2, "sequence_parallel": True}
GRID = {"scheme": "optimus", "rows": 2, "cols": 2}
PIPELINE = {"pp": 2, "micro_batches": 6}
MIXED = {"dtype": "bfloat16", "recompute": "full"}
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (BRANCHES, MIXED, {"family": "llama"}),
    ({**BRANCHES, **PIPELINE, "stages_per_rank": 2}, MIXED, {}),
    ({**SEQUENCE, "micro_batches": 2}, MIXED, {}),
    ({**SEQUENCE, **PIPELINE, "dp": 2}, {"dtype": "bfloat16"}, {}),
    ({**SEQUENCE, "dp": 2, "dp_mode": "zero1"}, {}, {"family": "t5", "n_decoder_layers": 2}),
    (GRID, MIXED, {}),
    ({**GRID, **PIPELINE}, {"recompute": "selective"}, {"family": "llama"}),
    ({**GRID, "rows": 1, "cols": 3, "micro_batches": 2}, {"device": "cuda"}, {}),
    ({**GRID, "schedule": "broadcast"}, MIXED, {}),
    ({**GRID, "schedule": "pipelined", "stationary": "input"}, {}, {"family": "bert"}),
]
IN_MAKE_TEST = (CASES[0], CASES[1], CASES[8])


@pytest.mark.parametrize("case", full_unless(IN_MAKE_TEST.__contains__, CASES), ids=str)
def test_the_log_is_that_of_the_complete_step(case: Any) -> None:
    layout, train, model = case
    train = {"global_batch": 48, "loss_chunk_tokens": 0, **train}
    run = a_run(layout, {"n_layers": 4, **model}, train)
    real, again = RepeatedProducts._repeat, 0

    def repeat(*args: Any) -> Any:  # a mock would keep the arguments
        nonlocal again
        again += 1
        return real(*args)

    with in_three():
        for rank in largest_ranks(run):
            with patch.object(RepeatedProducts, "_repeat", repeat):
                once = estimate_rank(run, rank)
            assert once == estimate_rank(run, rank, once=False)
    assert again, "some products are repeated"


def test_a_repeated_product_frees_the_gathered_weight_when_the_first_one_did() -> None:
    run = a_run(GRID, {"n_layers": 4}, {"global_batch": 48, "loss_chunk_tokens": 0, **MIXED})
    real, freed, logs = RepeatedProducts._repeat, 0, []

    def repeat(once: Any, recorded: Any, schedule: Any, into: Any, operand: Any, alone: Any) -> Any:
        nonlocal freed
        freed += len(alone)
        found = real(once, recorded, schedule, into, operand, alone)
        assert not alone, "the caller holds nothing, so its memory is free"
        return found

    def log(*args: Any) -> Any:
        logs.append(1)
        return real_log(*args)

    real_log = estimate._log
    with in_three():
        with (
            patch.object(RepeatedProducts, "_repeat", repeat),
            patch.object(estimate, "_log", log),
        ):
            once = estimate_rank(run, 0)
        assert once == estimate_rank(run, 0, once=False)
    assert freed, "gradients of norms are repeated"
    assert len(logs) == 1, "the first way to repeat things is possible"
