"""Checks the arguments of commands, and prints their errors as sentences.

A `UserError` is a sentence and exit code 2. So is what else an input may cause and the user can
change: errors of the system that name a path, values that are nested too deep, text in no encoding.
Everything else is a mistake in gridformer: it keeps its traceback, and a line asks for a report.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import math
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer

from gridformer.utils.errors import ConfigError, UserError, visible
from gridformer.utils.process import never_fail_to_print
from gridformer.utils.units import LARGEST_INTEGER, LONGEST_PART, LONGEST_PATH

FAILED: Final = 1
BAD_INPUT: Final = 2
_MOST_PROBLEMS: Final = 20
_LONGEST: Final = 1500  # characters of a problem, which may quote what was given

# What fails because of the state of the machine, whatever was asked for.
_MACHINE: Final = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}


def check_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that refuses numbers and paths which no command can take.

    Python's numbers have no limits, and `--budget nan` passes every comparison.
    """

    @functools.wraps(command)
    def checking(*args: Any, **options: Any) -> None:
        for name, value in inspect.signature(command).bind(*args, **options).arguments.items():
            for one in value if isinstance(value, list) else [value]:
                _check(f"--{name.replace('_', '-')}", one)
        try:
            command(*args, **options)
        except KeyboardInterrupt:  # runs that can save answer it themselves
            sys.stdout.flush()
            print("gridformer: stopped by Ctrl-C (SIGINT)", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None

    return checking


def _check(name: str, value: object) -> None:
    if (
        isinstance(value, int | float) and not -LARGEST_INTEGER <= value <= LARGEST_INTEGER
    ):  # NaN is neither
        from gridformer.config.base import shortened_text

        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{name}: nan is not a number")
        what, most = ("large", "at most ") if value > 0 else ("small", "at least -")
        shown = shortened_text(value)
        raise UserError(f"{name}: {shown} is too {what}: use {most}{LARGEST_INTEGER}")
    if isinstance(value, Path):
        _check_path(value)


def _check_path(path: Path) -> None:
    """Refuses what is a path on no machine; whether something is there is the command's matter."""
    shown = _shortened(str(path), 80)
    long = any(len(part.encode("utf-8", "replace")) > LONGEST_PART for part in path.parts)
    if long or len(str(path)) > LONGEST_PATH:
        raise UserError(f"{shown}: is longer than a path can be")
    if any(unicodedata.category(letter) == "Cc" for letter in str(path)):
        raise UserError(f"{shown}: contains control characters")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{shown}: is a symbolic link that leads to itself") from None


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Turns errors of the block into sentences on standard error, and exits.

    Raises:
        SystemExit: The block has failed.
    """
    never_fail_to_print()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see `gridformer.__main__`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        _end(problems, error.exit_code)
    except BrokenPipeError:  # typer ends silently where it sees one; others come from other threads
        sys.exit(FAILED)
    except OSError as error:
        if sentence := _of_system(error):
            _end([sentence], FAILED if error.errno in _MACHINE else BAD_INPUT)
        _bug(error)
    except RecursionError as error:
        _end([f"what was given is nested too deep to be read ({_where(error)})"], BAD_INPUT)
    except UnicodeError as error:
        _end([f"a text is in no encoding that can be read: {error} ({_where(error)})"], BAD_INPUT)
    except MemoryError as error:
        _end([f"this process has no memory left for what was asked ({_where(error)})"], FAILED)
    except Exception as error:
        _bug(error)


def _of_system(error: OSError) -> str:
    """Returns a sentence about an error of the operating system; empty if nothing explains it."""
    from gridformer.launch.failures import cause_of

    if meaning := cause_of(error):
        return meaning
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename!s}: {reason[:1].lower()}{reason[1:]}"
    return f"{reason[:1].lower()}{reason[1:]}" if error.errno in _MACHINE else ""


def _where(error: BaseException) -> str:
    """Returns where in gridformer's code an error was, so that a mistake there can be found."""
    frames = traceback.extract_tb(error.__traceback__, limit=500)
    ours = [frame for frame in frames if "gridformer" in Path(frame.filename).parts]
    frame = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"


def _bug(error: Exception) -> None:
    traceback.print_exception(error)
    sentence = (
        "this is a mistake in gridformer, not in what was given to it: please report it with the "
        "command and the lines above"
    )
    _end([sentence], FAILED)


def _end(problems: list[str], code: int) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        typer.echo(text_of(problems), err=True)
    sys.exit(code)


def text_of(problems: list[str]) -> str:
    """Returns the text that is printed about some problems."""
    title = typer.style("error:", fg=typer.colors.RED, bold=True)
    shown = [_shortened(visible(problem, "\n"), _LONGEST) for problem in problems]
    if len(shown) == 1:
        return f"{title} {shown[0]}"
    if len(shown) > _MOST_PROBLEMS:
        shown = [*shown[:_MOST_PROBLEMS], f"and {len(problems) - _MOST_PROBLEMS} more"]
    return "\n".join([f"{title} {len(problems)} problems", *(f"  - {p}" for p in shown)])


def _shortened(text: str, at_most: int) -> str:
    half = at_most // 2
    return text if len(text) <= at_most else f"{text[:half]} ... {text[-half:]}"
