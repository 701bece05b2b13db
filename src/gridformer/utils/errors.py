"""Errors that a user can fix. The command line prints only their text, without a traceback."""

import importlib.util
import unicodedata


class UserError(Exception):
    """A request that cannot be fulfilled; the message says what is wrong, where, and the remedy.

    Attributes:
        exit_code: The exit code of the command: 2 for errors that are found before work begins.
    """

    exit_code = 2


class ConfigError(UserError):
    """Problems of a run's configuration: what is wrong, where, the nearest value that works."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = [*problems]

    def __str__(self) -> str:
        return "\n".join(self.problems)


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: truncated, damaged, foreign or of another model."""


class RemovedError(CheckpointError):
    """A checkpoint that was removed while it was read."""


class DivergedError(UserError):
    """Loss or gradients are no longer finite. Parameters are still those of the previous step.

    Args:
        message: What is not finite.
        step: Counted from 0; -1 if only the caller knows it.
        done: Whether the step is done, so that it cannot be left out.
    """

    exit_code = 1  # found in the middle of the work

    def __init__(self, message: str, step: int = -1, done: bool = False) -> None:
        super().__init__(message)
        self.step, self.done = step, done


class DataError(UserError):
    """Data that is missing, damaged or does not fit the run."""


class SaveError(Exception):
    """A checkpoint after which a run ends could not be written: exit code 1, as work is lost."""

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere  # another rank says why, and this one does not know it


def visible(text: str, kept: str = "") -> str:
    """Writes control characters as escapes, so that no quoted value can steer the terminal."""
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Cs", "Cf") and letter not in kept
        else letter
        for letter in text
    )


def installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, what: str, extra: str) -> None:
    """Checks that a package of an extra is installed, which `what`, an option or command, needs.

    Raises:
        UserError: The package is missing; the message says how to install it.
    """
    if not installed(package):
        raise UserError(f"{what} needs {package}: pip install 'gridformer[{extra}]'")
