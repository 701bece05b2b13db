"""The arguments of commands that look at a run without its data and without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridformer.utils.errors import ConfigError

if TYPE_CHECKING:
    from gridformer.mesh.process_group import DeviceChoice

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


def device_of(name: str) -> DeviceChoice:
    """Returns the value of --device.

    Raises:
        ConfigError: it is no device, or torch finds no GPU.
    """
    if name == "auto":
        return "auto"
    if name == "cpu":
        return "cpu"
    import torch

    if name != "cuda" or not torch.cuda.is_available():
        raise ConfigError([f"--device {name} is not available here: use --device cpu or auto"])
    return "cuda"
