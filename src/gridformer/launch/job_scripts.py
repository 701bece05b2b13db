"""Scripts for `gridformer launch slurm` and `gridformer launch torchrun`, and the job they start.

Every value is quoted, so that none is read as a command.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from gridformer.cluster.file import Cluster, load_cluster
from gridformer.config import NO_PATH, RunConfig, parse_run
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError
from gridformer.utils.signals import REQUEUE

PORT, PYTHON = 29500, "python3"
Tasks = Literal["device", "node"]
Rendezvous = Literal["c10d", "static"]
# A run is told to stop this number of seconds before it must be gone, plus train.stop_grace_s:
# time to save, and for what comes after the run in a script.
_AFTER_S = 60
# Of a time limit, this number of seconds is left for the start of the processes and the end.
_AROUND_S = 300.0
# When one task has ended, Slurm ends the others after this number of seconds.
_WAIT_S = 60
_MASTER = '"${MASTER_ADDR:?set it to the host of the first machine}"'
_SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]  # which torchrun passes on unasked


@dataclass(frozen=True)
class ClusterJob:
    """A run on nodes."""

    run: RunConfig  # the run, with all overrides
    file: str  # its file or shipped name, as the user typed it
    # `key=value` texts for the command line, first the user's and then our own
    overrides: tuple[str, ...]
    run_dir: Path
    nodes: int  # number of nodes
    per_node: int  # number of processes on each
    whole_nodes: bool  # whether these are all devices of a node
    gpus: bool  # whether each process needs a GPU
    cores: int = 0  # CPU cores for each process; 0 means that nothing is said
    hours: float = 0.0  # limit of the job in hours; 0 means none
    interface: str = ""  # network interface for NCCL and gloo; empty means that they find it
    notes: tuple[str, ...] = ()  # sentences for a comment at the top

    @property
    def label(self) -> str:
        """The run's name in lower-case letters, digits and hyphens, as all launchers accept it."""
        return re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:40].strip("-") or "run"

    @property
    def grace_s(self) -> int:
        """Seconds between the signal to stop and the moment when all processes must be gone."""
        return math.ceil(self.run.train.stop_grace_s) + _AFTER_S

    @property
    def stop_signal(self) -> str:
        """The signal after which the run asks to be requeued, such as `USR1`; empty if none."""
        signals = self.run.train.stop_signals
        # SIGUSR1 if possible, since Slurm kills what it has sent SIGTERM to.
        chosen = next((name for name in ("SIGUSR1", "SIGTERM", *signals) if name in signals), "")
        return chosen.removeprefix("SIG")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that the processes need."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        return {name: self.interface for name in names if self.interface and self.nodes > 1}

    def train_words(self, file: str | None = None) -> list[str]:
        """Returns the command line that trains; `file` is another run file with all overrides."""
        what = [self.file, *self.overrides] if file is None else [file]
        return ["train", *what, "--out", str(self.run_dir)]


def make_job(
    run: RunConfig,
    file: str,
    overrides: Sequence[str] = (),
    cluster: str = "",
    per_node: int = 0,
    run_dir: Path | None = None,
    hours: float = 0.0,
    interface: str = "",
) -> ClusterJob:
    """Divides a run over nodes. The run has the overrides; a job with hours stops before its limit.

    Raises:
        ConfigError: The number of processes fits no number of nodes, the options contradict each
            other, the layout has problems, or the run has no data yet.
    """
    if run.data.path.name == NO_PATH:
        raise ConfigError(
            f"data.path={NO_PATH} names no data: set data.path to a folder that `gridformer "
            "prepare` wrote, as the machines of the job see it"
        )
    name = cluster or run.layout.cluster
    there = load_cluster(name) if name else None
    n, k = run.layout.n_processes, _devices_per_node(run, there, per_node)
    if there and n > there.size:
        raise ConfigError(f"the layout needs {n} devices, but {there.name} has {there.size}")
    if n > k and n % k:
        smaller, larger = n // k * k, (n // k + 1) * k
        fits = max(d for d in range(1, k) if n % d == 0)
        raise ConfigError(
            f"{n} processes do not fill nodes of {k} devices: use a layout of {smaller} or "
            f"{larger} processes, or --devices-per-node {fits} for {n // fits} nodes that are "
            "used in part"
        )
    nodes, on_each = (n // k, k) if n > k else (1, n)
    own: list[str] = []
    notes = [f"{n} processes: {nodes} node{'s' * (nodes > 1)} with {on_each} each"]
    if nodes > 1 and not run.layout.devices_per_node:
        own.append(f"layout.devices_per_node={k}")
        notes.append(f"{own[-1]} is added, which places the ranks that exchange most on one node")
    if hours and run.train.max_hours is None:
        stop = max(hours / 2, hours - _AROUND_S / 3600)
        own.append(f"train.max_hours={math.floor(100 * stop) / 100:.10g}")
        notes.append(f"{own[-1]} is added: the run saves and stops before the limit of {hours:g} h")
    changed = parse_run(run.model_dump(mode="json"), own)
    check_layout(changed)
    cores = int(there.host.cores.value) // there.node_size if there and there.host.cores else 0
    return ClusterJob(
        run=changed,
        file=file,
        overrides=(*overrides, *own),
        run_dir=run_dir or Path("runs") / run.name,
        nodes=nodes,
        per_node=on_each,
        whole_nodes=on_each == k,
        gpus=run.train.device != "cpu" and (there is None or there.device.kind == "cuda"),
        cores=cores,
        hours=hours,
        interface=one_word("--interface", interface),
        notes=tuple(notes),
    )


def _devices_per_node(run: RunConfig, cluster: Cluster | None, asked: int) -> int:
    """Returns the devices of a node from where they are known; all that know must agree."""
    sources = {
        "--devices-per-node": asked,
        f"the cluster {cluster.name}" if cluster else "": cluster.node_size if cluster else 0,
        "layout.devices_per_node": run.layout.devices_per_node,
    }
    known = {name: k for name, k in sources.items() if k}
    if not known:
        raise ConfigError(
            "how many devices a node has is not known: add --cluster with the name or file of "
            "a cluster, or --devices-per-node"
        )
    (first, k), *rest = known.items()
    for name, other in rest:
        if other != k:
            raise ConfigError(
                f"{first} says {k} devices per node, but {name} says {other}: use one of them"
            )
    return k


def one_word(option: str, text: str) -> str:
    """Returns a text that a script can contain as it is.

    Raises:
        ConfigError: It has characters that names of machines, partitions and images do not have.
    """
    if text and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,:=@/+^-]*", text):
        raise ConfigError(
            f"{option} {text!r}: use letters, digits and the characters _ . , : = @ / + ^ - only"
        )
    return text


def sbatch_option(text: str) -> str:
    """Returns an option of sbatch that is one word.

    Raises:
        ConfigError: It is not one.
    """
    name, _, value = text.partition("=")
    if not re.fullmatch(r"--[a-z][a-z-]*", name) or text.endswith("="):
        raise ConfigError(f"--sbatch {text!r}: write an option of sbatch as --name or --name=value")
    one_word("--sbatch", value)
    return text


class _Raw(str):
    """A word of ours that the shell is to expand, such as "$SLURM_JOB_ID" in double quotes."""


def sbatch_script(
    job: ClusterJob, tasks: Tasks = "device", directives: Sequence[str] = (), before: str = ""
) -> str:
    """Returns an sbatch script that starts a run and puts it into the queue again when it asks.

    Slurm starts every process (`device`), or one task on each node that starts the processes there
    (`node`). `before` is shell code that runs first, taken as it is.
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
    """Returns a shell script, or with `static` one command for each machine."""
    train = ["-m", "gridformer", *job.train_words()]
    each = ["torchrun", f"--nproc-per-node={job.per_node}", f"--max-restarts={max_restarts}"]
    notes = ["Written by `gridformer launch torchrun`.", *job.notes]
    if tuple(map(int, version("torch").split(".")[:2])) >= (2, 13):
        each.append(f"--shutdown-timeout={job.grace_s}")  # of its own it would be 30 s
    else:
        notes.append(
            "This torchrun kills what still saves 30 s after a signal; torch 2.13 can wait."
        )
    head = comments(notes)
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
