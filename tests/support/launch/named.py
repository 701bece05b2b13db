"""Runs an entrypoint by its module's name, so that the launcher imports neither it nor torch."""

import importlib
from pathlib import Path


def run_named(module: str, name: str, folder: Path, n: int) -> None:
    getattr(importlib.import_module(module), name)(folder, n)
