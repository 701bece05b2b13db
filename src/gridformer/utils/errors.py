"""Errors that a user can mend. The command line prints their text alone and exits with code 2."""

from collections.abc import Sequence


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what, where and the remedy."""


class ConfigError(UserError):
    """One or more problems of a run's configuration, all found at once.

    `problems` holds one sentence each: what is wrong, where, and the nearest value that works.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return ConfigError, (self.problems,)


class CheckpointError(UserError):
    """A checkpoint that must not be loaded: truncated, damaged, foreign or of another model."""


class DivergedError(UserError):
    """Loss or gradients are no longer finite; parameters are still those of the step before."""


class DataError(UserError):
    """Token files that are missing, damaged or do not fit the run."""
