"""What several commands share: arguments, progress messages and a limit of time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from gridformer.cli.errors import BAD_INPUT, text_of
from gridformer.utils.process import leave_progress_bar
from gridformer.utils.signals import end_process

_SECONDS: Final = 25.0
LONGEST: Final = 10_000_000  # seconds that an option may say
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

Routing = Annotated[
    Path | None,
    typer.Option(
        "--routing",
        metavar="RUNDIR",
        help="For models with experts, assume the shares of tokens that this run has measured "
        "(metrics.jsonl). By default every expert gets as many.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0,
        max=LONGEST,
        help="Give up after this number of seconds of the processor's time, by default 25; 0 means "
        "never.",
    ),
]


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
    nothing. `instead` says, as a part of a sentence, what takes less time.
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
    with contextlib.suppress(OSError):  # systems without /proc
        tasks = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
        for pid in " ".join(tasks).split():
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                user, system = map(int, after_name[11:13])
                used[int(pid)] = (user + system) / os.sysconf("SC_CLK_TCK")
    return used


def in_dtype(run: Path | str, overrides: Sequence[str] | None, dtype: str) -> list[str]:
    """Returns the settings of a run; a shipped model alone, which has no type, gets this one."""
    from gridformer.config import model_names

    settings = [*(overrides or ())]
    alone = str(run) in model_names() and not Path(run).is_file()
    if alone and not any(setting.startswith("train.dtype=") for setting in settings):
        settings.append(f"train.dtype={dtype}")
    return settings


def state_routing(path: Path | None) -> None:
    """Lets all records of this command assume the shares of `--routing`."""
    if path is not None:
        from gridformer.record.routing import measured_routing, stated

        stated.set(measured_routing(path))
