"""`gridformer launch`: scripts and manifests that start a run on many machines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.files import check_output, write_text

JobKind = StrEnum("JobKind", ["SLURM", "KUBERNETES", "TORCHRUN"])


class Tasks(StrEnum):
    """What one task of Slurm starts."""

    DEVICE = "device"
    NODE = "node"


class Rendezvous(StrEnum):
    """How the machines of torchrun find each other."""

    C10D = "c10d"
    STATIC = "static"


# The kinds that look at an option, where not all do.
_ONLY_FOR: Final = {
    **dict.fromkeys(("tasks", "sbatch", "before"), (JobKind.SLURM,)),
    **dict.fromkeys(("image", "claim", "memory_gib"), (JobKind.KUBERNETES,)),
    **dict.fromkeys(("rendezvous", "master"), (JobKind.TORCHRUN,)),
    "max_restarts": (JobKind.KUBERNETES, JobKind.TORCHRUN),
}


def launch(
    context: typer.Context,
    kind: Annotated[JobKind, typer.Argument()],
    run: Annotated[str, typer.Argument(metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    cluster: str = "",
    devices_per_node: Annotated[int | None, typer.Option(min=1)] = None,
    print_: bool = False,
    out: Path | None = None,
    run_dir: Path | None = None,
    hours: Annotated[float, typer.Option(min=0, max=87_600)] = 0.0,
    interface: str = "",
    tasks: Tasks = Tasks.DEVICE,
    sbatch: list[str] | None = None,
    before: str = "",
    image: str = "",
    claim: str = "gridformer",
    memory_gib: Annotated[float, typer.Option(min=0)] = 0.0,
    rendezvous: Rendezvous = Rendezvous.C10D,
    master: str = "",
    max_restarts: Annotated[int, typer.Option(min=0)] = 3,
) -> None:
    """Print what starts a run on many machines: a script, a manifest or a command.

    The number of nodes follows from the layout and from the devices of a node.
    Nothing is started or submitted. docs/how-to/clusters.md shows each kind.

    [bold]Examples:[/bold]

    gridformer launch slurm mine.yaml layout.dp=16 --cluster dgx-h100 --hours 24 | sbatch

    gridformer launch kubernetes mine.yaml --devices-per-node 8 --image registry/gridformer:0.2.0

    gridformer launch torchrun mine.yaml --devices-per-node 4 --master node01

    Args:
        kind: What starts the processes.
        run: A run file, or the name of a shipped one such as demo.
        overrides: Values that replace those of the run file.
        cluster: The name of a shipped cluster, or a cluster file, which says how many devices a
            node has. The default is the run's layout.cluster.
        devices_per_node: The number of devices of a node, without --cluster.
        print_: Print the script, which is the default.
        out: Write the script to this file instead.
        run_dir: The run directory. The default is runs/NAME.
        hours: The time limit of the job; by default it has none. A run without train.max_hours gets
            one a little below it.
        interface: The network interface for NCCL and gloo, where they choose a wrong one.
        tasks: For slurm: start one task for each device or node.
        sbatch: For slurm: a further option, such as --partition=long.
        before: For slurm: a line of shell that runs first, such as '. .venv/bin/activate'.
        image: For kubernetes: the image to run.
        claim: For kubernetes: the PersistentVolumeClaim with data and runs, which all pods share.
        memory_gib: For kubernetes: the memory of a pod in GiB. By default none is stated.
        rendezvous: For torchrun: one command for all machines (c10d), or one for each (static).
        master: For torchrun: the host of the first machine. Without it, the script reads it from
            MASTER_ADDR.
        max_restarts: For kubernetes and torchrun: after a failure, start all processes again, at
            most this number of times.
    """
    from gridformer import __version__
    from gridformer.cluster.file import cluster_path
    from gridformer.config import find_run_file, load_run
    from gridformer.launch.job_scripts import make_job, sbatch_script, torchrun_lines
    from gridformer.parallel.validation import check_layout

    if print_ and out is not None:
        raise UserError("--print and --out exclude each other: use one of them")
    sources = {name: context.get_parameter_source(name) for name in _ONLY_FOR}
    given = [name for name, one in sources.items() if one and one.name == "COMMANDLINE"]
    unused = [
        f"--{name.replace('_', '-')} is for {' and '.join(kinds)} and has no effect with {kind}: "
        "leave it out"
        for name, kinds in _ONLY_FOR.items()
        if kind not in kinds and name in given
    ]
    if unused:
        raise ConfigError(*unused)
    loaded = load_run(run, overrides or [])
    check_layout(loaded)
    if out is not None:
        named = cluster_path(cluster or loaded.layout.cluster)
        check_output("--out", out, [find_run_file(run), named or ""])
    n = devices_per_node or 0
    job = make_job(loaded, run, overrides or [], cluster, n, run_dir, hours, interface)
    if kind is JobKind.SLURM:
        text = sbatch_script(job, tasks.value, sbatch or [], before)
    elif kind is JobKind.KUBERNETES:
        from gridformer.launch.kubernetes import PodSettings, manifest

        image = image or f"gridformer:{__version__}"
        settings = PodSettings(image, claim, memory_gib=memory_gib, max_restarts=max_restarts)
        text = manifest(job, settings)
    else:
        text = torchrun_lines(job, rendezvous.value, master, max_restarts)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
