"""Runs an entrypoint given by its module's name, so that the launcher does not import it or
torch."""

import importlib
from pathlib import Path


def run_named(module: str, name: str, folder: Path, n: int) -> None:
    getattr(importlib.import_module(module), name)(folder, n)
