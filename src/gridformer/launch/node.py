"""Starts the processes of one node, where the cluster starts a single task or container there.

torchrun ends with exit code 1 whatever its processes end with, and then nobody learns that a run
wants to be started again (75) or was given bad input (2). Nothing listens on a port but the store
of rank 0. Number and address of the node come from what started the tasks: srun, Kubernetes
(JOB_COMPLETION_INDEX and MASTER_ADDR), or others (NODE_RANK and MASTER_ADDR).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from gridformer.launch.processes import handled
from gridformer.mesh.launch_env import rank_env
from gridformer.utils.errors import UserError
from gridformer.utils.signals import REQUEUE

# Signals that are passed on to the processes. Not SIGINT: a terminal sends it to all of them, and a
# second one means that the user has lost patience.
_SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT]
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# After the first process has failed, the others have this long to notice it and to say why they
# end, and then this long after SIGTERM.
_NOTICE_S, _END_S = 60.0, 15.0
_POLL_S = 0.1


class Node(NamedTuple):
    """One of several nodes: its number, and where the processes of all of them meet."""

    number: int
    nodes: int
    master_addr: str
    master_port: str


def node_of(nodes: int | None, environ: Mapping[str, str]) -> Node:
    """Returns which of `nodes` nodes this is; None means as many as srun has started tasks.

    Raises:
        UserError: The environment does not say it.
    """
    ranked = {k: v for k, v in environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    task = rank_env(ranked)
    if task and task.by == "srun":
        if nodes not in (None, task.size):
            raise UserError(f"--nodes={nodes}, but srun started {task.size} tasks: leave it out")
        return Node(task.rank, task.size, task.master_addr, str(task.master_port))
    number = environ.get("NODE_RANK") or environ.get("JOB_COMPLETION_INDEX") or ""
    if nodes is None or not number.isdecimal() or not environ.get("MASTER_ADDR"):
        raise UserError(
            "which of the nodes this is is not known: start one task on each node with srun, or "
            "set --nodes, NODE_RANK (or JOB_COMPLETION_INDEX) and MASTER_ADDR"
        )
    if int(number) >= nodes:
        raise UserError(f"node {number} of {nodes} is impossible: nodes are numbered from 0")
    return Node(int(number), nodes, environ["MASTER_ADDR"], environ.get("MASTER_PORT") or "29500")


def environments(
    node: Node, processes: int, environ: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yields the environment of each process of a node, as torchrun would set it."""
    for local in range(processes):
        yield {
            **environ,
            "RANK": str(node.number * processes + local),
            "WORLD_SIZE": str(node.nodes * processes),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": node.master_addr,
            "MASTER_PORT": node.master_port,
        }


def run_node(command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> int:
    """Runs a command once in each environment and returns the exit code for all."""
    started: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        _send(started, signum)

    # A SIGINT has reached the processes, too, and this one outlives it.
    with handled(_SIGNALS, pass_on), handled([signal.SIGINT], lambda signum, frame: None):
        try:
            for environ in environs:
                started.append(
                    subprocess.Popen(command, env=dict(environ), preexec_fn=_end_with_parent)
                )
                if received:  # by the processes that had been started before
                    _send(started[-1:], received[0])
            _wait(started)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return exit_code([process.returncode for process in started])


def exit_code(codes: Sequence[int]) -> int:
    """Returns the exit code of a node from its processes' codes; -N means killed by signal N.

    75 if all that failed ask for it, since a single failure may mean that nothing was saved.
    Otherwise 2 and 1 come before the signals with which the other processes were ended.
    """
    failed = [code for code in codes if code]
    if {*failed} <= {REQUEUE}:
        return REQUEUE if failed else 0
    order = [2, 1, *(code for code in failed if code != REQUEUE)]
    first = next(code for code in order if code in failed)
    return first if first > 0 else 128 - first


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for all; once one has failed, the others are left to notice it and then stopped."""
    while None in (codes := _codes(started)) and not codes - {None, 0, REQUEUE}:
        time.sleep(_POLL_S)
    for seconds in (_NOTICE_S, _END_S):
        until = time.monotonic() + seconds
        while None in _codes(started) and time.monotonic() < until:
            time.sleep(_POLL_S)
        _send(started, signal.SIGTERM)


def _codes(started: Sequence[subprocess.Popen[bytes]]) -> set[int | None]:
    return {process.poll() for process in started}


def _end_with_parent() -> None:
    """Lets the system kill this process when its parent was killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(started: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    for process in started:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signum)


def main() -> None:
    """Parses the command line and runs this node's processes."""
    parser = argparse.ArgumentParser(prog="python -m gridformer.launch.node", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="processes on this node")
    parser.add_argument("--nodes", type=int, help="nodes of the run; not needed under srun")
    parser.add_argument("words", nargs="+", help="arguments of gridformer, such as train mine.yaml")
    options = parser.parse_args()
    try:
        node = node_of(options.nodes, os.environ)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, "-m", "gridformer", *options.words]
    sys.exit(run_node(command, [*environments(node, options.processes, os.environ)]))


if __name__ == "__main__":
    main()
