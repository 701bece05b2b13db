"""The settings of runs, and which of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from gridformer.report.reading import RunReading
from gridformer.utils.units import format_value

NOT_SET = "-"
_LONGEST = 200


def table(runs: Sequence[RunReading], differing: bool) -> list[tuple[str, list[str]]]:
    """Returns settings as rows: the key, and the value of each run.

    Args:
        runs: The runs.
        differing: Whether only settings are wanted in which runs differ.
    """
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in keys:
        values = [shown(run.settings[key]) if key in run.settings else NOT_SET for run in runs]
        raw = [run.settings.get(key, NOT_SET) for run in runs]
        if not differing or any(value != raw[0] for value in raw):
            rows.append((key, values))
    return rows


def shown(value: Any) -> str:
    """Returns a value as in a run file. Of absolute paths only the last part is shown.

    A page is sent to others, and where a machine keeps its files does not concern them.
    """
    if isinstance(value, list):
        return f"[{', '.join(shown(one) for one in value)}]"[:_LONGEST]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"[:_LONGEST]
    text = "null" if value is None else format_value(value)
    if isinstance(value, str) and PurePath(text).is_absolute():
        text = f".../{PurePath(text).name}"
    return text[:_LONGEST]
