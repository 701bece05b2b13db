"""`gridformer schema`: what the keys of a file may be, for editors."""

from __future__ import annotations

import json
from typing import Literal

import typer


def schema(file: Literal["run", "cluster"] = "run") -> None:
    """Print the JSON schema of run files or cluster files, by which editors complete and check.

    The shipped files name it in their first line, as editors with a YAML language server read it:
    # yaml-language-server: $schema=PATH

    Try: gridformer schema --file cluster

    Args:
        file: The kind of file.
    """
    from gridformer.cluster.file import cluster_schema
    from gridformer.config.schema import run_schema

    whole = run_schema() if file == "run" else cluster_schema()
    typer.echo(json.dumps(whole, indent=1))
