"""A cluster on one machine: each node is a network namespace with a rate-limited link to a switch.

    with network(4, mbit=100) as nodes:
        ...                    # in a process of a node: enter(nodes[2])

It needs root and the commands `ip` and `tc` of iproute2. Nothing of the machine's own network is
touched: the switch, too, is a bridge inside a namespace. All namespaces are removed at the end,
also when the command is interrupted, and those that a killed command left are removed by the next.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from gridformer.utils.errors import UserError

INTERFACE = "eth0"
_PREFIX = "gridformer"
_FOLDER = Path("/run/netns")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def problems() -> list[str]:
    """Returns why namespaces cannot be created here; empty if they can."""
    found = []
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        found.append("network namespaces need root: run the command as root")
    if not shutil.which("ip") or not shutil.which("tc"):
        found.append("the commands ip and tc are missing: apt-get install iproute2")
    return found


@contextmanager
def network(n_nodes: int, mbit: float) -> Iterator[list[str]]:
    """Creates nodes that are connected by a switch, and removes them at the end.

    Args:
        n_nodes: The number of nodes.
        mbit: Megabits a second of each node's link, in each direction.

    Yields:
        The name of each node's namespace.

    Raises:
        UserError: This machine cannot do it; the message says what is missing.
    """
    if found := problems():
        raise UserError("; ".join(found))
    _remove_leftovers()
    mine = f"{_PREFIX}-{os.getpid()}"
    switch, nodes = f"{mine}-switch", [f"{mine}-node{i}" for i in range(n_nodes)]
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for i, node in enumerate(nodes):
            port = f"port{i}"
            _run("ip", "netns", "add", node)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name",
                 INTERFACE, "netns", node)  # fmt: skip
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", node, "addr", "add", f"10.77.0.{i + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", node, "link", "set", INTERFACE, "up")
            _run("ip", "-n", node, "link", "set", "lo", "up")
            for where, interface in ((switch, port), (node, INTERFACE)):
                _run("tc", "-n", where, "qdisc", "add", "dev", interface, "root", "tbf", "rate",
                     f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms")  # fmt: skip
        yield nodes
    finally:
        for name in [*nodes, switch]:
            with suppress(UserError):
                _run("ip", "netns", "delete", name)
        signal.signal(signal.SIGTERM, before)


def enter(node: str) -> None:
    """Moves this process into a node. Call it before the process opens a socket."""
    library = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / node).open() as file:
        if library.setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {node}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _remove_leftovers() -> None:
    if not _FOLDER.is_dir():
        return
    for path in _FOLDER.glob(f"{_PREFIX}-*-*"):
        pid = path.name.split("-")[1]
        if not Path("/proc", pid).exists():
            with suppress(UserError):
                _run("ip", "netns", "delete", path.name)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
