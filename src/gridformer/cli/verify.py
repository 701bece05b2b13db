"""`gridformer verify`: whether a run directory is intact."""

from __future__ import annotations

from typing import Annotated

import typer

from gridformer.cli.shared import RunDirectory, waiting


def verify(
    run_dir: RunDirectory,
    finite: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Check every file of a run directory; exit with 0 if all is well and with 1 if not.

    It verifies the manifests, files and checksums of all checkpoints, and that the
    config, metrics, tokenizer and data belong to them. It changes nothing, and works
    while a run trains.

    [bold]Example:[/bold]

    gridformer verify runs/demo

    gridformer verify s3://bucket/run

    Args:
        finite: Check besides that all numbers in checkpoints are finite.
        as_json: Print JSON instead of a table.
    """
    import json
    from dataclasses import asdict

    from gridformer.checkpoint.copies import url_of
    from gridformer.launch.verify_run import verify_copies, verify_run

    url = url_of(run_dir)
    with waiting() as tell:

        def doing(what: str) -> None:
            tell("", what)

        if url:
            findings = verify_copies(url, finite, doing)
        else:
            findings = verify_run(run_dir, finite, doing)
    ok = all(finding.ok for finding in findings)
    if as_json:
        found = [asdict(finding) for finding in findings]
        typer.echo(
            json.dumps({"run_dir": url or str(run_dir), "ok": ok, "findings": found}, indent=2)
        )
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.what:{width}}  {'ok ' if finding.ok else 'BAD'}  {finding.note}")
    if not ok:
        raise typer.Exit(1)
