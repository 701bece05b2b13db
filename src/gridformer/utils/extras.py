"""Optional packages, which only one command needs and which are installed as an extra."""

from __future__ import annotations

import importlib.util

from gridformer.utils.errors import UserError


def installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, what: str, extra: str) -> None:
    """Checks that an optional package is installed.

    Args:
        package: Name of the package to import.
        what: The option or command that needs it, for the message.
        extra: The extra of gridformer that installs it.

    Raises:
        UserError: The package is missing; the message says how to install it.
    """
    if not installed(package):
        raise UserError(f"{what} needs {package}: pip install 'gridformer[{extra}]'")
