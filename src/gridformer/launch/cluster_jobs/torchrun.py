"""`gridformer launch torchrun`: what to type on each machine."""

from __future__ import annotations

from typing import Literal

from gridformer.launch.cluster_jobs.job import PORT, ClusterJob, one_word
from gridformer.launch.cluster_jobs.shell import Raw, command, comments

_MASTER = '"${MASTER_ADDR:?set it to the host of the first machine}"'
Rendezvous = Literal["c10d", "static"]
_SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"]  # which torchrun passes on unasked


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
    notes = comments(["Written by `gridformer launch torchrun`.", *job.notes])
    exports = [f"export {name}={value}" for name, value in job.environment.items()]
    train = ["-m", "gridformer", *job.train_words()]
    each = ["torchrun", f"--nproc-per-node={job.per_node}", f"--max-restarts={max_restarts}"]
    each.append(f"--shutdown-timeout={job.grace_s}")  # of its own it would be 30 s
    signals = [*_SIGNALS, *(name for name in job.run.train.stop_signals if name not in _SIGNALS)]
    if signals != _SIGNALS:
        each.append(f"--signals-to-handle={','.join(signals)}")
    if job.nodes == 1:
        return _text(["#!/bin/sh", *notes, *exports, command([*each, "--standalone", *train])])
    host = one_word("--master", master) or _MASTER
    elastic = job.run.train.elastic and rendezvous == "c10d"
    each.append(f"--nnodes={'1:' * elastic}{job.nodes}")
    if rendezvous == "c10d":
        each += [
            "--rdzv-backend=c10d",
            Raw(f"--rdzv-endpoint={host}:{PORT}"),
            f"--rdzv-id={job.label}",
        ]
        what = comments([f"Run this on each of the {job.nodes} machines."])
        return _text(["#!/bin/sh", *notes, *what, *exports, command([*each, *train])])
    lines = [*notes, *comments(["Run each of these commands on its own machine."]), *exports]
    for number in range(job.nodes):
        place = [f"--node-rank={number}", Raw(f"--master-addr={host}"), f"--master-port={PORT}"]
        lines += ["", f"# machine {number}", command([*each, *place, *train])]
    return _text(lines)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
