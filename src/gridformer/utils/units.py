"""Numbers: how they are printed, and how large those may be that a user gives."""

from __future__ import annotations

from typing import Final

MIB = 2**20
GIB = 2**30

# Numbers of keys with no bound of their own. Up to 2^53 an integer is exact as a float, too, which
# schedules compute with; a float of up to 1e30 can be squared and added up.
LARGEST_INTEGER: Final = 2**53
LARGEST_FLOAT: Final = 1e30

# Sizes of a model. Each is far above any model, and with them every size of a tensor is computed in
# 64 bits and everything that grows with layers or processes takes seconds.
MOST_LAYERS: Final = 1024
WIDEST: Final = 2**24  # features of a layer
MOST_TOKENS: Final = 2**31 - 1  # of a vocabulary or a sequence: what a 32-bit index can count
MOST_IDS: Final = 2**24  # of a tokenizer: the largest vocabularies have a million
MOST_PROCESSES: Final = 2**20

LONGEST_NAME: Final = 200  # of a file: most file systems allow 255 bytes, and prefixes are added
LONGEST_PART: Final = 255  # bytes between two slashes of a path
LONGEST_PATH: Final = 4095
ESTIMATED_TOKENS: Final = 8192  # of a sequence at most, in estimates if nothing says how many


def format_bytes(n_bytes: float) -> str:
    """Formats bytes with three digits in GiB or MiB, and below that as they are.

    Examples: `1.5 GiB`, `320 MiB`, `20,480 bytes`.
    """
    if n_bytes < MIB:
        return f"{n_bytes:,.0f} byte{'s' * (round(n_bytes) != 1)}"
    size, name = byte_unit(n_bytes)
    return f"{three_digits(n_bytes / size)} {name}"


def byte_unit(n_bytes: float) -> tuple[int, str]:
    """Returns the size in bytes and the name of the unit in which to print a number of bytes."""
    return (GIB, "GiB") if n_bytes >= GIB else (MIB, "MiB")


def three_digits(value: float) -> str:
    """Formats a number with three digits, or more for large numbers: 0.0123, 1.5, 48, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def format_count(count: float) -> str:
    """Formats 1234567 as `1.23M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:  # which three digits round to one of the unit
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def counted(n: int, noun: str) -> str:
    """Formats a number of things: `1 layout`, `2 processes`, `1,024 devices`."""
    return f"{n:,} {noun}{'' if n == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def format_value(value: object) -> str:
    """Formats a value as in run files and overrides: `true`, not `True`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_setting(key: str, value: object) -> str:
    """Formats a setting as an override: `layout.rows=2`, `layout.sequence_parallel=true`."""
    return f"{key}={format_value(value)}"
