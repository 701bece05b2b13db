"""The peak of a rank with many layers follows from models with few of them."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridformer.config import RunConfig
from gridformer.memory import fewer_layers, layers_per_cycle, ranks
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.fewer_layers import peak_of_rank
from gridformer.memory.ranks import fullest_ranks, largest_ranks
from gridformer.parallel.auto.decisions import decide_run
from gridformer.trace.repeated_products import NotRepeatableError
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

PIPELINE = {"pp": 2, "micro_batches": 4}
REPLICAS = {"dp": 2}
# A layout, the model and training settings. One layer is a tenth of a large one, so that its
# gradients fill buckets; see `peaks`.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"scheme": "megatron", "cols": 2, **PIPELINE, **REPLICAS}, {}, {"dtype": "bfloat16"}),
    ({"scheme": "optimus", "rows": 2, "cols": 2}, {"family": "llama"}, {"recompute": "full"}),
    ({**PIPELINE, **REPLICAS, "dp_mode": "fsdp"}, {"family": "llama"}, {"recompute": "selective"}),
    ({**REPLICAS, "dp_mode": "zero1"}, {"family": "t5", "n_decoder_layers": 20}, {}),
    ({"scheme": "subgraph", "branches": 2, **PIPELINE}, {}, {}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, **REPLICAS}, {}, {"loss_chunk_tokens": 0}),
    ({"scheme": "megatron", "cols": 2, "sequence_parallel": True, **PIPELINE}, {}, {}),
    ({**PIPELINE, "stages_per_rank": 2}, {"dropout": 0.1}, {"async_save": True, "save_every": 1}),
    ({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 4}, {"family": "t5"}, {}),
]


def run_of(layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    n_layers = 20 * layout.get("pp", 1) * layout.get("stages_per_rank", 1)
    decoder = {"n_decoder_layers": n_layers} if model.get("family") == "t5" else {}
    return a_run(layout, {"n_layers": n_layers, **decoder, **model}, train)


@pytest.mark.parametrize(
    ("layout", "model", "train"),
    full_unless(lambda case: case in CASES[:3], CASES, unpack=True),
    ids=str,
)
def test_peaks_are_those_of_all_layers(
    layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any]
) -> None:
    run = run_of(layout, model, train)
    decisions = decide_run(run)
    # In buckets of one byte each gradient travels alone, as that of a large layer does.
    alone = patch.multiple("gridformer.parallel.data.buckets", BUCKET_BYTES=1)
    always = patch.object(layers_per_cycle, "_WORTH", 2.0)
    with alone, always, patch.object(fewer_layers, "_SMALL", fewer_layers._PLACEHOLDER):
        for rank in largest_ranks(run, decisions):
            whole = estimate_rank(run, rank, decisions, timeline=False).needed
            with (
                patch.object(fewer_layers, "BUCKET_BYTES", 1),
                patch.object(fewer_layers, "_NOTICEABLE", 1.0),
                patch.object(fewer_layers, "estimate_rank", side_effect=AssertionError),
            ):
                found = peak_of_rank(run, rank, decisions)
            assert whole <= found <= whole * 1.001


def test_all_layers_are_run_if_buckets_hold_gradients_of_several_ones() -> None:
    run = run_of({"scheme": "megatron", "cols": 2, **REPLICAS}, {}, {})
    decisions = decide_run(run)
    with patch.object(fewer_layers, "_extended", side_effect=AssertionError):
        assert peak_of_rank(run, 0, decisions) == estimate_rank(run, 0, decisions).needed


Changes = NDArray[np.int64]
changes = st.lists(st.sampled_from([-3, -2, -1, 1, 2, 3, 1000, -1000]), max_size=6)
phases = st.lists(st.tuples(changes, changes), min_size=1, max_size=3)


def with_layers(phase: list[tuple[list[int], list[int]]], n: int) -> Changes:
    """Return a phase with loops over n layers, each after something else."""
    return np.array([x for before, each in phase for x in (*before, *each * n)], dtype=np.int64)


@given(phases, st.integers(1, 9))
def test_what_is_inserted_is_inserted_again(
    phase: list[tuple[list[int], list[int]]], more: int
) -> None:
    shorter, longer, whole = (with_layers(phase, n) for n in (3, 4, 4 + more))
    total = peak = 0
    for part in fewer_layers._parts(shorter, longer):
        total, peak = part.after(total, peak, more)
    assert total == whole.sum()
    assert peak == max(0, whole.cumsum().max(initial=0))


def test_what_does_not_repeat_is_refused() -> None:
    shorter = np.array([5, -5, 7, -7], dtype=np.int64)
    longer = np.array([5, -5, 7, -7, 9, -9, 7, -7], dtype=np.int64)
    with pytest.raises(NotRepeatableError, match="do not repeat"):
        fewer_layers._parts(shorter, longer)


def test_a_single_change_grows_along_a_line() -> None:
    shorter, longer = (np.array([5, n * 4, -n * 4, -5], dtype=np.int64) for n in (3, 4))
    (part,) = fewer_layers._parts(shorter, longer)
    assert part.grown(6) == [40, -40]
    assert part.after(0, 0, 6) == (0, 45)


MIB = 1 << 20


def log_of(n: int, held: int) -> fewer_layers._Log:
    """Return a log with n layers, which join 8 MiB each, while the first phase holds some bytes."""
    bucket = 8 * MIB * n
    before = np.array([held], dtype=np.int64)
    phases = [
        np.array([5 * MIB, bucket, -bucket, -5 * MIB], dtype=np.int64),
        np.array([7 * MIB, -7 * MIB], dtype=np.int64),
    ]
    return fewer_layers._Log(before, phases, ["sums", "update"], 0)


def test_buckets_that_may_come_one_after_the_other_count_as_one() -> None:
    held = 1000 * 1024 * MIB
    found = fewer_layers._extended(log_of(3, held), log_of(4, held), 96, 8)
    assert found == held + 5 * MIB + 800 * MIB
    assert found < held * 1.001


def test_buckets_that_take_a_noticeable_part_are_refused() -> None:
    held = 10 * 1024 * MIB
    with pytest.raises(NotRepeatableError, match="buckets"):
        fewer_layers._extended(log_of(3, held), log_of(4, held), 96, 8)


def test_a_bucket_that_is_freed_is_freed_as_a_whole() -> None:
    """What a phase frees may be large, and then the phase is not the fullest one."""
    frees = np.array([-100 * MIB, 30 * MIB], dtype=np.int64)
    part = fewer_layers._Part(frees, grows={0: -50 * MIB, 1: 20 * MIB})
    assert part.after(0, 0, 2) == (-130 * MIB, 0)
    assert part.after(0, 0, 2, 40 * MIB) == (-160 * MIB, 0)


def test_a_model_with_a_large_table_follows_from_few_layers_under_fsdp() -> None:
    """The table travels with what is not in layers, and vectors of all layers."""
    wide = {"vocab_size": 50_304, "hidden_size": 1600, "n_heads": 25}
    run = run_of({**REPLICAS, "dp_mode": "fsdp"}, wide, {"dtype": "bfloat16", "device": "cuda"})
    decisions = decide_run(run)
    whole = estimate_rank(run, 0, decisions, timeline=False).needed
    with patch.object(fewer_layers, "estimate_rank", side_effect=AssertionError):
        assert whole <= peak_of_rank(run, 0, decisions) <= whole * 1.001


def test_a_bucket_with_a_large_table_stays_as_large_as_it_is() -> None:
    """It is larger than a bucket may be, and what further layers add to it may go elsewhere."""
    begins = np.array([100 * MIB, 30 * MIB, -130 * MIB], dtype=np.int64)
    part = fewer_layers._Part(begins, grows={0: 50 * MIB, 1: 20 * MIB})
    assert part.after(0, 0, 2)[1] == 270 * MIB
    assert part.after(0, 0, 2, 40 * MIB)[1] == 140 * MIB


def test_buckets_of_vectors_may_be_larger_than_vectors() -> None:
    run = run_of({"scheme": "subgraph", "branches": 2, **PIPELINE}, {}, {"recompute": "full"})
    decisions, rank = decide_run(run), 2
    with (
        patch.multiple("gridformer.parallel.data.buckets", BUCKET_BYTES=1024),
        patch.multiple(fewer_layers, BUCKET_BYTES=1024, _NOTICEABLE=1.0, _SMALL=64),
        patch.object(layers_per_cycle, "_WORTH", 2.0),
        patch.object(fewer_layers, "estimate_rank", side_effect=AssertionError),
    ):
        whole = estimate_rank(run, rank, decisions, timeline=False).needed
        found = peak_of_rank(run, rank, decisions)
        with (
            patch.object(fewer_layers, "_BUCKETS", 1),
            pytest.raises(AssertionError),  # all layers would be run
        ):
            peak_of_rank(run, rank, decisions)
    assert whole <= found <= whole * 1.001


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4, "micro_batches": 8},
        {"scheme": "megatron", "cols": 2, "pp": 4, "micro_batches": 8, "stages_per_rank": 2},
        {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 4, "micro_batches": 4},
    ],
    ids=str,
)
def test_the_fullest_rank_is_among_those_that_formulas_leave(layout: dict[str, Any]) -> None:
    run = run_of(layout, {"vocab_size": 512}, {})
    decisions = decide_run(run)
    needed = {rank: estimate_rank(run, rank).needed for rank in largest_ranks(run, decisions)}
    left = fullest_ranks(run, decisions)
    assert max(needed.values()) == max(needed[rank] for rank in left)


def test_ranks_that_hold_far_less_are_left_out() -> None:
    run = run_of({"pp": 8, "micro_batches": 16}, {}, {})
    decisions = decide_run(run)
    assert [*largest_ranks(run, decisions)] == [0, 1, 7]
    with patch.object(ranks, "_CLEARLY", 100.0):
        assert fullest_ranks(run, decisions) == [0, 1]
        with patch.object(ranks, "_CLOSE", 0.0):
            assert fullest_ranks(run, decisions) == [0, 1, 7]


def test_a_rank_with_less_in_each_stage_than_an_earlier_one_is_left_out() -> None:
    """The first rank has as many layers as the second, a table, and one micro-batch more."""
    run = run_of({"pp": 8, "micro_batches": 16}, {}, {})
    decisions = decide_run(run)
    with patch.object(ranks, "_CLOSE", 0.0):
        assert fullest_ranks(run, decisions) == [0, 7], "only the last one has the head"
    assert estimate_rank(run, 0).needed > estimate_rank(run, 1).needed


def test_a_rank_with_more_in_one_stage_is_not_left_out() -> None:
    run = run_of({"pp": 8, "micro_batches": 16}, {}, {})
    held = {0: [Counter(layers=9), Counter(layers=1)], 1: [Counter(layers=2), Counter(layers=2)]}
    held[7] = [Counter(layers=2), Counter(layers=2)]
    with (
        patch.object(ranks, "quick_peaks", lambda *_: [100.0, 50.0, *[0.0] * 5, 40.0]),
        patch.object(ranks, "_held", lambda run, decisions, pp: held[pp]),
        patch.object(ranks, "_CLOSE", 0.0),
    ):
        assert fullest_ranks(run, decide_run(run)) == [0, 1], "the last one is like the second"
