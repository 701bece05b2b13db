"""Packages that one command alone needs, and that are installed with it only when asked for."""

from __future__ import annotations

import importlib.util

from gridformer.utils.errors import UserError


def require(package: str, what: str, extra: str) -> None:
    """Raise UserError, with what to install, where `what` cannot go on without a package."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what} needs {package}: pip install 'gridformer[{extra}]'")
