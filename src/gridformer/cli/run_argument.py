"""The arguments that several commands have: a run that is not started, or a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from gridformer.cli.patience import LONGEST
from gridformer.utils.errors import ConfigError

if TYPE_CHECKING:
    from gridformer.config.train import DType
    from gridformer.mesh.process_group import DeviceChoice

RunFile = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.yaml", help="A run file, or the name of a shipped model such as gpt2-1.5b."
    ),
]
RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="RUNDIR",
        help="A run directory, one of its checkpoints, or a URL like train.checkpoint_to.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the run file."),
]

TrainedModel = Annotated[
    Path,
    typer.Argument(
        metavar="RUNDIR|FOLDER",
        help="A run directory, one of its checkpoints, a URL like train.checkpoint_to, or a folder "
        "of Hugging Face.",
    ),
]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="The type of the computation: float32, bfloat16, float16 or float64. The default is "
        "that of training. Weights are read as they are and cast.",
    ),
]

Beams = Annotated[
    int | None,
    typer.Option(
        "--beams",
        help="For t5 and transformer: the number of beams, where 1 is greedy search. The "
        "default is 4.",
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        help="For t5 and transformer: values above 0 favor longer texts. The default is 1.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1.0,
        max=LONGEST,
        help="On several processes: one that waits for another for this number of seconds ends the "
        "command and names the cause. The default is 600, and 21600 for lm-eval tasks, whose data "
        "one process may have to prepare.",
    ),
]


def dtype_option(name: str) -> DType | None:
    """Returns the value of --dtype, or None if there is none.

    Raises:
        ConfigError: It is no type of a computation.
    """
    from gridformer.config.train import DType

    known: dict[str, DType] = {one: one for one in get_args(DType)}
    if name and name not in known:
        raise ConfigError([f"--dtype {name} must be one of {', '.join(known)}"])
    return known.get(name)


def device_option(name: str) -> DeviceChoice:
    """Returns the value of --device.

    Raises:
        ConfigError: It is no device, or torch finds no GPU.
    """
    if name == "auto":
        return "auto"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise ConfigError([f"--device {name} is no device: use --device cpu, cuda or auto"])
    import torch

    if not torch.cuda.is_available():
        raise ConfigError([f"--device {name} is not available here: use --device cpu or auto"])
    return "cuda"
