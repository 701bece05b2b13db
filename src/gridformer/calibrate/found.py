"""Measurements before they become a cluster file. Processes exchange them as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gridformer.cluster.tables import Tables


@dataclass
class Measurements:
    """Measurements of one machine.

    Attributes:
        rows: Rows of `cluster.tables`, by table.
        failures: Sentences on what could not be measured.
        backend: The backend of messages; empty if none were sent.
        host: Seconds per operator and per step, see `host.HostTime`; empty if not measured.
    """

    rows: dict[str, list[list[Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    backend: str = ""
    host: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._timed: list[list[Any]] = []

    def add(self, table: str, values: dict[str, Any], processes: int, seconds: float) -> None:
        """Adds a row.

        Args:
            table: Field of `Tables`.
            values: The other columns of the row, in their order.
            processes: How many processes measured at the same time.
            seconds: The time.
        """
        row = [*values.values(), round(1e6 * seconds, 3)]
        place = 0
        for name in ("dtype", "op"):
            if name in values:
                place = max(place, list(values).index(name) + 1)
        row.insert(place, processes)
        self.rows.setdefault(table, []).append(row)
        self._timed.append(row)

    def add_host(self, processes: int) -> None:
        """Adds `host` as a row."""
        if self.host:
            launch_us, step_us = (1e6 * seconds for seconds in self.host)
            row = [processes, round(launch_us, 3), round(step_us, 1)]
            self.rows.setdefault("host", []).append(row)

    def times(self) -> list[float]:
        """Returns the microseconds of all rows, in the order in which they were added."""
        return [row[-1] for row in self._timed]

    def set_times(self, times: list[float]) -> None:
        """Replaces the microseconds, for example by their mean over processes."""
        for row, us in zip(self._timed, times, strict=True):
            row[-1] = round(us, 3)

    def extend(self, other: Measurements) -> None:
        """Adds what another process has found."""
        for table, rows in other.rows.items():
            self.rows.setdefault(table, []).extend(rows)
        self.failures += [f for f in other.failures if f not in self.failures]
        self.backend = self.backend or other.backend

    def tables(self, source: str) -> Tables:
        """Returns the tables of a cluster file."""
        return Tables.model_validate({"source": source, **self.rows})

    def write(self, path: Path) -> None:
        """Writes the measurements as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Measurements:
        """Returns the measurements that `write` has written."""
        return Measurements(**json.loads(path.read_text(encoding="utf-8")))
