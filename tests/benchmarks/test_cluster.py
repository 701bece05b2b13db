"""The report on a cluster: its layouts and its measure of overlap."""

import math
from pathlib import Path

import pytest
from benchmarks.gpu import cluster
from benchmarks.gpu.layouts import layouts_of
from benchmarks.gpu.overlap import Span, covered, overlap_of
from hypothesis import given
from hypothesis import strategies as st

from gridformer.config import LayoutConfig

spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda x: (float(x[0]), float(sum(x))))
)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_every_layout_uses_all_devices_and_is_valid(n: int) -> None:
    for quick in (True, False):
        options = cluster.Options("megatron-1.2b", 4, 3, (), 0.0, Path(), "cpu", quick)
        for title, layout in layouts_of(n).items():
            assert LayoutConfig(**layout).n_processes == n, title
            if n <= 8 or not quick:
                cluster._run_of(layout, options)  # which checks it


def test_a_number_of_devices_that_layouts_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"6 devices: .* a multiple of 8; use --processes 4$"):
        layouts_of(6)
    with pytest.raises(ValueError, match=r"1 devices: .* a multiple of 8$"):
        layouts_of(1)


@given(spans, spans)
def test_overlap_is_that_of_single_ticks(computing: list[Span], communicating: list[Span]) -> None:
    """Time spans have whole microseconds here, so that they can be counted one by one."""

    def ticks(some: list[Span]) -> set[int]:
        return {t for begin, end in some for t in range(int(begin), int(end))}

    found = overlap_of(computing, communicating)
    busy, sending = ticks(computing), ticks(communicating)
    assert round(found.computing_s * 1e6) == len(busy) == covered(computing)
    assert round(found.communicating_s * 1e6) == len(sending)
    assert round(found.exposed_s * 1e6) == len(sending - busy)
    if sending:
        assert found.hidden == pytest.approx(1 - len(sending - busy) / len(sending))
    else:
        assert math.isnan(found.hidden)
