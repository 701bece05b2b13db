"""Writes a page of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer


def write_page(parts: Sequence[str], out: Path | None) -> None:
    """Writes Markdown paragraphs to a file, or prints them if there is none."""
    text = "\n\n".join(parts) + "\n"
    if out is None:
        typer.echo(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
