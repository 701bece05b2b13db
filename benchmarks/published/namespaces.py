"""A cluster on one machine: each node is a network namespace with a rate-limited link to a switch.

    with network(4, mbit=100) as nodes:
        ...                    # in a process of a node: enter(nodes[2])

With racks, the nodes of each rack have a switch of their own, and a rate-limited trunk connects it
with a switch that joins the racks.

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
from gridformer.utils.process import n_cores

INTERFACE = "eth0"
_PREFIX = "gridformer"
_FOLDER = Path("/run/netns")
_GROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000  # in which a process may use its part of the cores
_SHARED = 0.8  # of the cores; the rest is for links and for the system
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
def network(
    n_nodes: int, mbit: float, racks: int = 1, trunk_mbit: float = 0.0
) -> Iterator[list[str]]:
    """Creates nodes that are connected by a switch, and removes them at the end.

    Args:
        n_nodes: The number of nodes.
        mbit: Megabits a second of each node's link, in each direction; 0 for no limit.
        racks: The number of racks, each of which holds the same number of neighboring nodes.
        trunk_mbit: Megabits a second of the trunk of each rack, in each direction.

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
        _add_bridges(switch, racks, trunk_mbit)
        for i, node in enumerate(nodes):
            port = f"port{i}"
            _run("ip", "netns", "add", node)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name",
                 INTERFACE, "netns", node)  # fmt: skip
            bridge = f"br{i * racks // n_nodes}"
            _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
            _run("ip", "-n", node, "addr", "add", f"10.77.0.{i + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", node, "link", "set", INTERFACE, "up")
            _run("ip", "-n", node, "link", "set", "lo", "up")
            if mbit:
                _limit(switch, port, mbit)
                _limit(node, INTERFACE, mbit)
        yield nodes
    finally:
        for name in [*nodes, switch]:
            with suppress(UserError):
                _run("ip", "netns", "delete", name)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def parts_of_cores(n_processes: int) -> Iterator[list[Path]]:
    """Creates a control group for each process, with an equal part of cores, and removes them.

    A process that waits then lends nothing to others, like a device: its group has a quota.

    Yields:
        The folder of each group, for `enter`.

    Raises:
        UserError: This machine has no control groups that may be written.
    """
    old = _GROUPS / "cpu"  # of version 1
    quota = int(_SHARED * _PERIOD_US * n_cores() / n_processes)
    limits = {"cpu.max": f"{quota} {_PERIOD_US}"}
    if old.is_dir():
        limits = {"cpu.cfs_period_us": f"{_PERIOD_US}", "cpu.cfs_quota_us": f"{quota}"}
    parent = old if old.is_dir() else _GROUPS
    folders = [parent / f"{_PREFIX}-{os.getpid()}-{i}" for i in range(n_processes)]
    try:
        try:
            for folder in folders:
                folder.mkdir()
                for name, value in limits.items():
                    (folder / name).write_text(value)
        except OSError as error:
            raise UserError(f"control groups cannot limit processors here: {error}") from None
        yield folders
    finally:
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


def _add_bridges(switch: str, racks: int, trunk_mbit: float) -> None:
    """Adds the bridge of each rack, and one that joins them if there are several."""
    for name in [*(f"br{i}" for i in range(racks)), *(["core"] if racks > 1 else [])]:
        _run("ip", "-n", switch, "link", "add", name, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", name, "up")
    for i in range(racks if racks > 1 else 0):
        ends = {f"up{i}": f"br{i}", f"down{i}": "core"}
        up, down = ends
        _run("ip", "-n", switch, "link", "add", up, "type", "veth", "peer", "name", down)
        for end, bridge in ends.items():
            _run("ip", "-n", switch, "link", "set", end, "master", bridge, "up")
            _limit(switch, end, trunk_mbit)


def _limit(namespace: str, interface: str, mbit: float) -> None:
    """Limits what an interface sends."""
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate",
         f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms")  # fmt: skip


def enter(node: str, part: Path | None = None) -> None:
    """Moves this process into a node, and into a part of the cores if one is given.

    Call it before the process opens a socket.
    """
    if part is not None:
        (part / "cgroup.procs").write_text(f"{os.getpid()}")
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
