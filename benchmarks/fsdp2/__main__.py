"""Tries whether torch's FSDP2 trains gridformer's models as one device does, on every layout.

    python -m benchmarks.fsdp2                        # all cells: 4 minutes on two cores
    python -m benchmarks.fsdp2 --only "pipeline, tied table"

`fully_shard` is put around each layer of tiny models (GPT-2, and T5 with its shared table and
biases) on 2 to 4 processes over gloo. Losses, gradient norms, every gradient of the first step and
every weight after four steps with AdamW are compared with one device, in float64, with dropout. A
cell passes if none differs by more than 1e-9 of the largest element of its tensor.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.machine import describe_machine
from benchmarks.fsdp2.cells import CELLS, Cell, compare
from benchmarks.gpu.report import table
from gridformer.launch import launch
from gridformer.launch.processes import warm_up


def main(
    only: Annotated[list[str] | None, typer.Option(help="A cell; may be repeated.")] = None,
) -> None:
    """Runs cells and prints a table as Markdown."""
    known = {cell.name: cell for cell in CELLS}
    if unknown := [name for name in only or () if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of: {'; '.join(known)}")
    warm_up("benchmarks.fsdp2.cells")
    machine = describe_machine("benchmarks.fsdp2")
    rows = []
    for cell in [known[name] for name in only or known]:
        rows.append([cell.name, str(cell.plan.n_processes), *_verdict(_run(cell))])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    place = f"{machine['date']}, commit {machine['commit']}, {machine['cpu']}"
    versions = f"torch {machine['torch']}, Python {machine['python']}"
    print(f"{place}, {versions}\n\n`{machine['command']}`\n")
    print(table(["cell", "processes", "result", "largest difference", "messages a step"], rows))


def _run(cell: Cell) -> dict[str, Any]:
    """Returns what the rank found that explains the most."""
    with tempfile.TemporaryDirectory() as folder:
        launch(compare, (cell.name, Path(folder)), cell.plan.n_processes)
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    errors = [one for one in found if "error" in one]
    # After an error on one rank, the others wait for it until they fail, too.
    errors.sort(key=lambda one: "DistBackendError" in one["error"] or "gloo" in one["error"])
    if errors:
        return dict(errors[0])
    return dict(max(found, key=lambda one: max(one["worst"].values())))


def _verdict(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        lines = found["error"].strip().splitlines()
        return [f"failed: {lines[0][:300]}".replace("|", "/"), "", ""]
    messages = ", ".join(f"{n} {kind}" for kind, n in sorted(found["messages"].items()))
    return [
        "passed" if found["passed"] else "failed",
        f"{max(found['worst'].values()):.1e}",
        messages,
    ]


if __name__ == "__main__":
    typer.run(main)
