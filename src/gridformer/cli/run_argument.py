"""The arguments of commands that look at a run without its data and without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml", help="A run file, or the name of a shipped model such as gpt2-1.5b."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the run file."),
]
