"""Times between and beyond the rows of a calibrated machine's tables."""

from __future__ import annotations

import pytest

from gridformer.cluster.tables import MemoryRow, MessageRow, ProductRow, Tables


def product(m: int, us: float, processes: int = 1, order: str = "nn") -> ProductRow:
    return ProductRow("float32", processes, 1, m, m, m, order, us)  # type: ignore[arg-type]


def test_a_product_between_rows_has_a_rate_between_theirs() -> None:
    tables = Tables(products=(product(64, 64**3 / 10), product(1024, 1024**3 / 100)))
    assert tables.product_s(1, "float32", (1, 64, 64, 64)) == pytest.approx(64**3 / 10 / 1e6)
    between = tables.product_s(1, "float32", (1, 256, 256, 256))
    assert between is not None
    assert 10 < 256**3 / between / 1e6 < 100
    assert tables.product_s(1, "bfloat16", (1, 64, 64, 64)) is None


def test_an_unknown_order_takes_the_mean_over_orders() -> None:
    tables = Tables(products=(product(64, 10.0), product(64, 30.0, order="tn")))
    assert tables.product_s(1, "float32", (1, 64, 64, 64), "tn") == pytest.approx(30e-6)
    assert tables.product_s(1, "float32", (1, 64, 64, 64)) == pytest.approx(20e-6)


def test_the_slowdown_of_many_processes_applies_to_shapes_measured_with_few() -> None:
    rows = (product(64, 10.0), product(512, 100.0), product(64, 40.0, processes=8))
    tables = Tables(products=rows)
    assert tables.product_s(8, "float32", (1, 512, 512, 512)) == pytest.approx(400e-6)
    assert tables.product_s(16, "float32", (1, 512, 512, 512)) == pytest.approx(800e-6)


def test_kernels_that_were_not_measured_take_the_time_of_an_addition() -> None:
    rows = (
        MemoryRow("add", "float32", 1, 1e3, 1.0),
        MemoryRow("add", "float32", 1, 1e5, 100.0),
        MemoryRow("gelu", "float32", 1, 1e3, 7.0),
    )
    tables = Tables(memory=rows)
    assert tables.memory_s(1, "gelu", 1e3) == pytest.approx(7e-6)
    assert tables.memory_s(1, "sin", 1e4) == pytest.approx(10e-6)
    assert tables.memory_s(1, "add", 1e6) == pytest.approx(1e-3)
    assert Tables().memory_s(1, "add", 1e6) is None
    both = Tables(memory=(*rows, MemoryRow("gelu", "bfloat16", 1, 1e3, 9.0)))
    assert both.memory_s(1, "gelu", 1e3, "bfloat16") == pytest.approx(9e-6)
    assert both.memory_s(1, "gelu", 1e3, "int64") == pytest.approx(7e-6)


def test_messages_between_sizes_members_and_numbers_of_processes() -> None:
    rows = (
        MessageRow("broadcast", 4, 4, 1, 1, 1e3, 10.0),
        MessageRow("broadcast", 4, 4, 1, 1, 1e5, 1000.0),
        MessageRow("broadcast", 16, 4, 1, 1, 1e5, 4000.0),
        MessageRow("broadcast", 16, 16, 2, 3, 1e5, 9000.0),
    )
    tables = Tables(messages=rows)
    assert tables.message_s(4, "broadcast", 4, 1, 1, 1e4) == pytest.approx(100e-6)
    assert tables.message_s(8, "broadcast", 4, 1, 1, 1e5) == pytest.approx(2000e-6)
    assert tables.message_s(16, "broadcast", 16, 2, 3, 1e5) == pytest.approx(9000e-6)
    assert tables.message_s(16, "broadcast", 16, 2, 1, 1e5) is None
    assert tables.message_s(4, "reduce", 4, 1, 1, 1e4) is None


def test_empty_tensors_take_no_more_than_small_ones() -> None:
    memory = tuple(
        MemoryRow("add", "float32", n, size, n * size / 1e3)
        for n, sizes in ((1, (1e3, 1e5)), (8, (1e3,)))
        for size in sizes
    )
    tables = Tables(memory=memory, products=(product(64, 10.0), product(64, 40.0, processes=8)))
    assert tables.memory_s(8, "add", 0) == tables.memory_s(8, "add", 1) == pytest.approx(4e-6)
    assert tables.product_s(8, "float32", (1, 64, 0, 64)) == 0
