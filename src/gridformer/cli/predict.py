"""`gridformer predict`: how long a step of a run takes on a cluster, and where the time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.patience import Seconds, time_limit
from gridformer.cli.run_argument import Overrides, RunFile
from gridformer.utils.process import last_work


@last_work()
def predict(
    run: RunFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="A cluster file, or the name of a shipped one such as dgx-h100.",
        ),
    ] = "",
    layers_only: Annotated[
        bool,
        typer.Option(
            "--layers-only",
            help="Count transformer layers alone, forward and backward: no embedding, head or "
            "update.",
        ),
    ] = False,
    forward_only: Annotated[
        bool,
        typer.Option("--forward-only", help="Predict the forward passes of a batch alone."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the timeline as a Chrome trace (Perfetto)."
        ),
    ] = None,
    seconds: Seconds = None,
) -> None:
    """Predict how long a step of a run takes on a cluster, and where the time goes.

    This runs the real code of one optimizer step for the ranks that differ, on
    fake tensors, and replays its kernels and messages with the times that the
    cluster file gives them. It needs neither the devices nor the data.

    [bold]Examples:[/bold]

    gridformer predict gpt2-124m train.global_batch=32 --cluster dgx-h100

    gridformer predict mine.yaml layout.cols=4 --cluster selene-a100 --json

    gridformer predict mine.yaml --cluster mine-cluster.yaml --trace step.json
    """
    from rich.console import Console

    from gridformer.cluster.file import cluster_names, cluster_path, load_cluster
    from gridformer.launch.plan import read_run_without_data
    from gridformer.utils.errors import ConfigError
    from gridformer.utils.files import check_output

    if not cluster:
        names = ", ".join(cluster_names())
        raise ConfigError([f"predict needs --cluster: a cluster file, or one of {names}"])
    if trace is not None:
        check_output("--trace", trace, [run, cluster_path(cluster) or cluster])
    machine = load_cluster(cluster)
    notes: list[str] = []
    checked = read_run_without_data(run, overrides or [], notes.append)

    from gridformer.plan.predict import predict as predicted
    from gridformer.plan.show import print_prediction

    less = "take fewer layers, stages or micro-batches"
    with time_limit(seconds, less), Console(stderr=True).status("tracing and replaying a step"):
        found = predicted(
            checked,
            machine,
            layers_only,
            not forward_only,
            timeline=trace is not None,
            on_all_cores=True,
        )
    found.warnings[:0] = notes
    if trace is not None:
        trace.write_text(json.dumps(found.chrome_trace()), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    print_prediction(checked, machine, found, Console(highlight=False))
    if trace is not None:
        typer.echo(f"Timeline: {trace}")
