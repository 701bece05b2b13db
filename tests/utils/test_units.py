"""Numbers formatted for people."""

import pytest

from gridformer.utils.units import GIB, MIB, counted, format_bytes, format_count, format_setting


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        *((0, "0 bytes"), (1, "1 byte"), (MIB // 64, "16,384 bytes")),
        *((MIB - 0.25, "1,048,576 bytes"), (MIB, "1 MiB"), (1.5 * MIB, "1.5 MiB")),
        *((1000 * MIB, "1,000 MiB"), (GIB, "1 GiB"), (998.4 * GIB, "998 GiB")),
        (12345 * GIB, "12,345 GiB"),
    ],
)
def test_bytes(n_bytes: float, text: str) -> None:
    assert format_bytes(n_bytes) == text


def test_counts() -> None:
    counts = (0, 999, 999_499, 999_500, 1234567, 175e9, 1e12)
    assert " ".join(map(format_count, counts)) == "0 999 999k 1M 1.23M 175B 1T"


def test_things_are_counted_in_the_singular_and_the_plural() -> None:
    said = counted(1, "sample"), counted(2, "process"), counted(4096, "branch"), counted(0, "row")
    assert said == ("1 sample", "2 processes", "4,096 branches", "0 rows")


def test_settings() -> None:
    assert format_setting("layout.sequence_parallel", True) == "layout.sequence_parallel=true"
    assert format_setting("train.recompute", "full") == "train.recompute=full"
