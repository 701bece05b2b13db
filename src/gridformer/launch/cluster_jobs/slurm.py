"""`gridformer launch slurm`: an sbatch script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from gridformer.launch.cluster_jobs.job import ClusterJob, sbatch_option
from gridformer.launch.cluster_jobs.shell import PYTHON, command, comments
from gridformer.utils.signals import REQUEUE

Tasks = Literal["device", "node"]
# When one task has ended, Slurm ends the others after this number of seconds.
_WAIT_S = 60


def sbatch_script(
    job: ClusterJob, tasks: Tasks = "device", directives: Sequence[str] = (), before: str = ""
) -> str:
    """Returns an sbatch script that starts a run and puts it into the queue again when it asks.

    Args:
        job: What to start.
        tasks: Slurm starts every process (`device`), or one task on each node that starts the
            processes there (`node`).
        directives: Further options of sbatch, each a single word such as `--partition=long`.
        before: Lines of shell that run before the run starts, such as the activation of a virtual
            environment. They are taken as they are.
    """
    lines = ["#!/bin/bash", *comments(["Written by `gridformer launch slurm`.", *job.notes])]
    options = [*_options(job, tasks), *map(sbatch_option, directives)]
    lines += [f"#SBATCH {option}" for option in options]
    lines += ["", *before.splitlines()] if before else [""]
    lines += [f"export {name}={value}" for name, value in job.environment.items()]
    if job.stop_signal:
        names = " ".join(dict.fromkeys((job.stop_signal, "TERM")))
        lines += [
            "# Slurm sends stop signals to the processes. This script has to outlive them.",
            f"trap ':' {names}",
        ]
    lines += [
        "",
        "# The processes end together. --wait ends those that are left when one has failed, but",
        "# only after a while, so that none is stopped while it saves.",
        command([*_srun(job, tasks), *_program(job, tasks)]),
        "code=$?",
        "",
        f"# {REQUEUE}: the run has saved its work and wants to be started again.",
        f'if [ "$code" -eq {REQUEUE} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: ClusterJob, tasks: Tasks) -> list[str]:
    options = [f"--job-name={job.label}", f"--nodes={job.nodes}"]
    options.append(f"--ntasks-per-node={_tasks_per_node(job, tasks)}")
    if job.gpus:
        options.append(f"--gpus-per-node={job.per_node}")
    if job.cores:
        options.append(f"--cpus-per-task={_cores(job, tasks)}")
    if job.whole_nodes:
        options += ["--exclusive", "--mem=0"]
    if job.hours:
        options.append(f"--time={_time(job.hours)}")
    if job.stop_signal:
        options.append(f"--signal={job.stop_signal}@{job.grace_s}")
    return [*options, "--requeue", "--open-mode=append", "--output=%x-%j.out"]


def _tasks_per_node(job: ClusterJob, tasks: Tasks) -> int:
    return job.per_node if tasks == "device" else 1


def _cores(job: ClusterJob, tasks: Tasks) -> int:
    return job.cores * job.per_node // _tasks_per_node(job, tasks)


def _srun(job: ClusterJob, tasks: Tasks) -> list[str]:
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={_WAIT_S}"]
    if job.gpus:
        words.append("--gpu-bind=none")  # NCCL needs to see the GPUs of its neighbors on a node
    if job.cores:
        words.append(f"--cpus-per-task={_cores(job, tasks)}")  # srun does not inherit it
    return words


def _program(job: ClusterJob, tasks: Tasks) -> list[str]:
    if tasks == "device" or job.nodes == 1:
        return [PYTHON, "-m", "gridformer", *job.train_words()]
    return [PYTHON, "-m", "gridformer.launch.node", f"--processes={job.per_node}", "--",
            *job.train_words()]  # fmt: skip


def _time(hours: float) -> str:
    """Returns hours as Slurm writes them, `D-HH:MM:SS`, rounded down to whole minutes."""
    minutes = max(1, math.floor(hours * 60 + 1e-6))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
