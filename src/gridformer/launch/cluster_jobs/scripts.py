"""Scripts for `gridformer launch slurm` and `gridformer launch torchrun`.

Every value is quoted, so that none is read as a command.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Literal

from gridformer.launch.cluster_jobs.job import PORT, ClusterJob, one_word, sbatch_option
from gridformer.utils.signals import REQUEUE

PYTHON = "python3"
Tasks = Literal["device", "node"]
Rendezvous = Literal["c10d", "static"]
# When one task has ended, Slurm ends the others after this number of seconds.
_WAIT_S = 60
_MASTER = '"${MASTER_ADDR:?set it to the host of the first machine}"'
_SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]  # which torchrun passes on unasked


class _Raw(str):
    """A word of ours that the shell is to expand, such as "$SLURM_JOB_ID" in double quotes."""


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
    per_node = job.per_node if tasks == "device" else 1
    cpus = f"--cpus-per-task={job.cores * job.per_node // per_node}" if job.cores else ""
    options = [
        f"--job-name={job.label}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={per_node}",
        f"--gpus-per-node={job.per_node}" if job.gpus else "",
        cpus,
        *(("--exclusive", "--mem=0") if job.whole_nodes else ()),
        f"--time={_time(job.hours)}" if job.hours else "",
        f"--signal={job.stop_signal}@{job.grace_s}" if job.stop_signal else "",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
        *map(sbatch_option, directives),
    ]
    trap = [
        "# Slurm sends stop signals to the processes. This script has to outlive them.",
        f"trap ':' {' '.join(dict.fromkeys((job.stop_signal, 'TERM')))}",
    ]
    program = ["-m", "gridformer"]
    if tasks == "node" and job.nodes > 1:
        program = ["-m", "gridformer.launch.node", f"--processes={job.per_node}", "--"]
    # NCCL needs to see the GPUs of its neighbors on a node, and srun does not inherit the cores.
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={_WAIT_S}", "--gpu-bind=none" * job.gpus, cpus]
    words = [word for word in srun if word] + [PYTHON, *program, *job.train_words()]
    return f"""\
#!/bin/bash
{comments(["Written by `gridformer launch slurm`.", *job.notes])}\
{_lines(f"#SBATCH {option}" for option in options if option)}
{_lines(before.splitlines())}{_exports(job)}{_lines(trap) if job.stop_signal else ""}
# The processes end together. --wait ends those that are left when one has failed, but
# only after a while, so that none is stopped while it saves.
{_command(words)}
code=$?

# {REQUEUE}: the run has saved its work and wants to be started again.
if [ "$code" -eq {REQUEUE} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def torchrun_lines(
    job: ClusterJob, rendezvous: Rendezvous = "c10d", master: str = "", max_restarts: int = 0
) -> str:
    """Returns a shell script, or with `static` one command for each machine.

    Args:
        job: What to start.
        rendezvous: With `c10d` the same command runs on every machine, and each gets its number
            when it arrives. With `static` each command states its machine's number.
        master: Host of the first machine; empty leaves it to the variable MASTER_ADDR.
        max_restarts: How many failures torchrun meets by starting all processes again.
    """
    head = comments(["Written by `gridformer launch torchrun`.", *job.notes])
    train = ["-m", "gridformer", *job.train_words()]
    each = ["torchrun", f"--nproc-per-node={job.per_node}", f"--max-restarts={max_restarts}"]
    each.append(f"--shutdown-timeout={job.grace_s}")  # of its own it would be 30 s
    signals = [*_SIGNALS, *(name for name in job.run.train.stop_signals if name not in _SIGNALS)]
    if signals != _SIGNALS:
        each.append(f"--signals-to-handle={','.join(signals)}")
    if job.nodes == 1:
        return f"#!/bin/sh\n{head}{_exports(job)}{_command([*each, '--standalone', *train])}\n"
    host = one_word("--master", master) or _MASTER
    elastic = job.run.train.elastic and rendezvous == "c10d"
    each.append(f"--nnodes={'1:' * elastic}{job.nodes}")
    if rendezvous == "c10d":
        meet = [_Raw(f"--rdzv-endpoint={host}:{PORT}"), f"--rdzv-id={job.label}"]
        what = comments([f"Run this on each of the {job.nodes} machines."])
        command = _command([*each, "--rdzv-backend=c10d", *meet, *train])
        return f"#!/bin/sh\n{head}{what}{_exports(job)}{command}\n"
    text = head + comments(["Run each of these commands on its own machine."]) + _exports(job)
    for number in range(job.nodes):
        place = [f"--node-rank={number}", _Raw(f"--master-addr={host}"), f"--master-port={PORT}"]
        text += f"\n# machine {number}\n{_command([*each, *place, *train])}\n"
    return text


def comments(sentences: Iterable[str]) -> str:
    """Returns comment lines. A sentence with a line break would end the comment, so it has none."""
    return _lines(f"# {' '.join(sentence.split())}" for sentence in sentences)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _exports(job: ClusterJob) -> str:
    return _lines(f"export {name}={value}" for name, value in job.environment.items())


def _command(words: Sequence[str]) -> str:
    """Returns a command with quoted words: one line if it is short, else a line for each option."""
    quoted = [word if isinstance(word, _Raw) else shlex.quote(word) for word in words]
    line = " ".join(quoted)
    if len(line) <= 100:
        return line
    lines = [quoted[0]]
    for word in quoted[1:]:
        program = word == PYTHON or (word == "-m" and lines[-1] != PYTHON)
        if program or word.startswith("--") or len(lines[-1]) + len(word) > 95:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join(lines)


def _time(hours: float) -> str:
    """Returns hours as Slurm writes them, `D-HH:MM:SS`, rounded down to whole minutes."""
    minutes = max(1, math.floor(hours * 60 + 1e-6))
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
