"""An entrypoint that is named by its module, so that the launcher need not import it, nor torch."""

import importlib
from pathlib import Path


def run_named(module: str, name: str, folder: Path, n: int) -> None:
    getattr(importlib.import_module(module), name)(folder, n)
