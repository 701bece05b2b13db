"""What several commands share: arguments, progress messages and a limit of time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, get_args

import typer

from gridformer.cli.errors import BAD_INPUT, text_of
from gridformer.utils.errors import ConfigError
from gridformer.utils.process import leave_progress_bar
from gridformer.utils.signals import end_process

if TYPE_CHECKING:
    from gridformer.config.train import DType
    from gridformer.mesh.process_group import DeviceChoice

_SECONDS: Final = 25.0
LONGEST: Final = 1e7  # seconds that an option may say
_LOOK_S: Final = 0.5

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

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Device = Annotated[str, typer.Option("--device", help="The device: cpu, cuda or auto.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.0,
        max=LONGEST,
        help="Give up after this number of seconds of the processor's time, by default 25; 0 means "
        "never.",
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
        raise ConfigError(f"--dtype {name} must be one of {', '.join(known)}")
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
        raise ConfigError(f"--device {name} is no device: use --device cpu, cuda or auto")
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"--device {name} is not available here: use --device cpu or auto")
    return "cuda"


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[str, str], None]]:
    """Yields a function `tell(result, doing)` that reports progress on standard error.

    A text `result` is printed for good unless it is empty. The text `doing` names the current
    activity: on a terminal it is a line with a spinner that disappears when the block ends,
    elsewhere it is printed.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    status = console.status("")

    def tell(result: str, doing: str) -> None:
        if result:
            console.print(Text(result), soft_wrap=True)
        if console.is_terminal:
            status.update(Text(doing))
            status.start()
        else:
            console.print(Text(doing))

    try:
        yield tell
    finally:
        status.stop()


@contextlib.contextmanager
def time_limit(seconds: float | None, instead: str) -> Iterator[None]:
    """Ends this process with an error once the block has taken that much of the processor's time.

    Time in which other programs have the processor does not count, so a busy machine changes
    nothing.

    Args:
        seconds: The limit; 0 means none, and None 25.
        instead: What takes less time, as a part of a sentence.
    """
    seconds = _SECONDS if seconds is None else seconds
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    began = _processor_s()

    def look(number: int, frame: FrameType | None) -> None:
        used = _processor_s()
        if max(now - began.get(pid, 0.0) for pid, now in used.items()) < seconds:
            return
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # this was the last look
        for pid in used.keys() - began.keys():  # processes that the block has started
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A spinner of rich stands before the stream, and would change control characters.
        stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        leave_progress_bar(stream)
        text = (
            f"this takes more than {seconds:g} seconds of the processor's time: {instead}, or "
            "allow more with --seconds, such as --seconds 600"
        )
        typer.echo(text_of([text]), stream)
        end_process(BAD_INPUT)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _processor_s() -> dict[int, float]:
    """Returns the seconds of the processor's time of this process and of each of its children."""
    used = {os.getpid(): time.process_time()}
    children = {child.pid for child in multiprocessing.active_children()}
    with contextlib.suppress(OSError):  # systems without /proc
        for task in Path("/proc/self/task").iterdir():
            children |= {int(pid) for pid in (task / "children").read_text().split()}
    for pid in children:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user, system = map(int, after_name[11:13])
            used[pid or 0] = (user + system) / os.sysconf("SC_CLK_TCK")
    return used
