"""After how many layers the buckets of gradients repeat themselves."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridformer.memory import fewer_layers, layers_per_cycle
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.fewer_layers import peak_of_rank
from gridformer.memory.layers_per_cycle import Gradient, LeftOut, layers_left_out, stacks_of
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.data.buckets import buckets
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

MIB = 1 << 20
LAYERS = (0, "layers.")
KEPT = 4


def model(n: int, of_layer: list[int], table: int = 100 * MIB) -> list[Gradient]:
    """Return the gradients of a model whose table comes first."""
    inside = [Gradient(layer, "dp", n_bytes) for layer in range(n) for n_bytes in of_layer]
    return [Gradient(None, "dp", table), *inside, Gradient(None, "dp", MIB)]


def left_out(of_layer: list[int], n: int = 96, **given: Any) -> LeftOut:
    gradients = model(KEPT, of_layer)
    return layers_left_out(gradients, {LAYERS: KEPT}, {LAYERS: n}, KEPT, 2, **given)


def test_a_gradient_that_travels_alone_makes_each_layer_a_cycle() -> None:
    assert left_out([MIB, 30 * MIB]) == (92, 1)


def test_layers_whose_sums_are_in_flight_are_not_left_out() -> None:
    few, whole = {LAYERS: 1}, {LAYERS: 96}
    assert layers_left_out([], few, whole, 1, 2) == (95, 1)
    gradients = model(1, [MIB, 30 * MIB])
    assert layers_left_out(gradients, few, whole, 1, in_flight=1) == (93, 1)
    assert layers_left_out(gradients, few, whole, 1, in_flight=2) == (92, 1)


def test_two_layers_that_fill_a_bucket_are_a_cycle() -> None:
    layers, cycle = left_out([4 * MIB, 8 * MIB])
    assert cycle == 2
    assert layers % 2 == 0


def test_nothing_is_left_out_if_a_cycle_is_long() -> None:
    assert left_out([MIB], n=30).layers == 0


def test_small_models_whose_buckets_grow_are_run_as_they_are() -> None:
    gradients = model(KEPT, [2048, 4096], table=1024)
    assert layers_left_out(gradients, {LAYERS: KEPT}, {LAYERS: 96}, KEPT, 2).layers == 0


def test_an_axis_of_vectors_has_no_cycles() -> None:
    of_layer = [MIB // 2]
    assert left_out(of_layer).layers == 0
    assert left_out(of_layer, negligible=64 * MIB) == (92, 1)


def starts_of(gradients: list[Gradient]) -> list[list[int]]:
    """Return for each layer, the last one first, which of its gradients begin buckets."""

    class Bytes(int):
        dtype = torch.uint8

        def numel(self) -> int:
            return int(self)

        def element_size(self) -> int:
            return 1

    places: list[tuple[int | None, int]] = []
    of_layer: dict[int | None, int] = {}
    for one in gradients:
        places.append((one.layer, of_layer.setdefault(one.layer, 0)))
        of_layer[one.layer] += 1
    backward = [*reversed([(place, Bytes(g.n_bytes)) for place, g in zip(places, gradients)])]
    n = 1 + max(one.layer for one in gradients if one.layer is not None)
    found: list[list[int]] = [[] for _ in range(n)]
    at = 0
    for bucket in buckets([size for _, size in backward], sum(g.n_bytes for g in gradients) // 4):
        layer, number = backward[at][0]
        if layer is not None:
            found[n - 1 - layer].append(number)
        at += len(bucket)
    return found


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(40, 120))
def test_layers_that_are_left_out_repeat_the_cycle_before_them(of_layer: list[int], n: int) -> None:
    """In the whole model, buckets begin where they begin in the shorter one with more cycles."""
    sizes = [size * MIB for size in of_layer]
    layers, cycle = left_out(sizes, n)
    if not layers:
        return
    whole, shorter = starts_of(model(n, sizes)), starts_of(model(n - layers, sizes))
    assert layers % cycle == 0
    assert whole[: n - layers] == shorter
    for at in range(n - layers, n):
        assert whole[at] == whole[at - cycle]


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"dp": 2, "dp_mode": "fsdp"}, {}),
    ({"dp": 2, "dp_mode": "zero1"}, {"dtype": "bfloat16"}),
    ({"dp": 2, "pp": 2, "micro_batches": 4}, {}),
    ({"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2}, {}),
]


@pytest.mark.parametrize(
    ("layout", "train"), full_unless(lambda case: case in CASES[:2], CASES, unpack=True), ids=str
)
def test_peaks_are_those_of_all_layers_whose_gradients_share_buckets(
    layout: dict[str, Any], train: dict[str, Any]
) -> None:
    n = 40 * layout.get("pp", 1)
    run = a_run(layout, {"n_layers": n}, train)
    decisions = decide_run(run)
    (of_layer,) = {
        sum(g.n_bytes for g in gradients if g.layer == 1)
        for gradients in [gradients_of_rank(run, decisions)]
    }
    cycles: list[LeftOut] = []
    real = fewer_layers.layers_left_out

    def noted(*given: Any, negligible: int, **named: Any) -> LeftOut:
        cycles.append(real(*given, **named))  # vectors are not negligible in so small a model
        return cycles[-1]

    limit = 2 * of_layer
    with (
        patch.object(layers_per_cycle.data.buckets, "BUCKET_BYTES", limit),
        patch.object(fewer_layers, "layers_left_out", noted),
        patch.object(fewer_layers, "_SMALL", fewer_layers._PLACEHOLDER),
        patch.object(fewer_layers, "_NOTICEABLE", 1.0),
    ):
        whole = estimate_rank(run, 0, decisions, timeline=False).needed
        with patch.object(fewer_layers, "estimate_rank", side_effect=AssertionError):
            found = peak_of_rank(run, 0, decisions)
    assert cycles[0].cycle > 1
    assert whole <= found <= whole * 1.001


def gradients_of_rank(run: Any, decisions: Any) -> list[Gradient]:
    """Return the gradients of rank 0 that are summed in buckets."""

    class EnoughError(Exception):
        pass

    found: list[Gradient] = []

    def before(stepper: Any) -> None:
        found.extend(layers_per_cycle.gradients_of(stepper))
        raise EnoughError

    with pytest.raises(EnoughError):
        fewer_layers.read_log(run, 0, decisions, lambda log: None, before=before)
    return found


def test_stacks_are_counted_in_each_stage() -> None:
    run = a_run(
        {"pp": 2, "stages_per_rank": 2, "micro_batches": 2},
        {"family": "t5", "n_layers": 6, "n_decoder_layers": 6},
        {},
    )
    decisions = decide_run(run)
    first, second = (stacks_of(run, rank, decisions) for rank in (0, 1))
    assert {stack for _, stack in first} | {stack for _, stack in second} == {
        "encoder.layers.",
        "decoder.layers.",
    }
    assert sum(first.values()) + sum(second.values()) == 12


def test_updates_in_the_backward_pass_share_no_bucket() -> None:
    run = a_run({"dp": 2}, {"n_layers": 2}, {"update": "in_backward", "clip_norm": 0.0})
    assert gradients_of_rank(run, decide_run(run)) == []
