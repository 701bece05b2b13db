"""A local run cannot be reached from outside: its sockets, its meeting place, and what it reads."""

import base64
import os
import pickle
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.launch.programs import Start, assert_gone, finish, processes, wait_for

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="sockets are found in /proc, which Linux has"
)
LISTENS = "0A"  # a state in /proc/net/tcp
ACCEPTS = 0x10000  # a flag in /proc/net/unix


class Leaves:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_local_run_cannot_be_reached_from_outside(start: Start, tmp_path: Path) -> None:
    process = start("steps", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    sockets = set(sockets_of(process.pid))
    listening = list(listening_at(sockets))
    assert len(listening) >= 2, "gloo listens in each worker"
    for address, port in listening:
        assert ip_address(address).is_loopback, f"{address}:{port} can be reached from outside"
    # gloo chooses loopback by itself only if the machine's own name means 127.0.0.1.
    for name in ("gloo0", "gloo1", "nccl0", "nccl1"):
        assert (tmp_path / name).read_text() == "lo", name
    for path in unix_sockets(sockets):
        assert path.startswith("/"), "an abstract socket has no permissions"
        assert is_private(Path(path).parent), path
    stores = [(tmp_path / f"store{rank}").read_text() for rank in range(2)]
    assert stores[0] == stores[1]
    assert is_private(Path(stores[0]).parent)

    traces = [tmp_path / f"trace{i}" for i in range(2 * len(listening))]
    for (address, port), raw, kept in zip(listening, traces[::2], traces[1::2]):
        send(address, port, pickle.dumps(Leaves(raw)))
        where = (port, f"gridformer-{process.pid}", pickle.dumps(Leaves(kept)))
        # torch waits without a limit for an answer from something that is not a store.
        threading.Thread(target=set_in_store, args=where, daemon=True).start()
    time.sleep(6.0)  # torch's elastic agent reads its store every 5 s
    assert not any(trace.exists() for trace in traces), "a pickle from outside has been read"
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert err.count("\n") == 1, err
    assert "SIGTERM" in err
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert_gone(pids)


def is_private(folder: Path) -> bool:
    return stat.S_IMODE(folder.stat().st_mode) == 0o700


def sockets_of(session: int) -> Iterator[str]:
    """Yield the inodes of all sockets of all processes of a session."""
    for folder in processes(session):
        with suppress(OSError):  # the process has ended
            yield from sockets_in(folder)


def sockets_in(folder: Path) -> list[str]:
    """Return the inodes of the sockets of one process, whose folder in /proc is given."""
    links = []
    for fd in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(fd))
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]


def listening_at(inodes: set[str]) -> Iterator[tuple[str, int]]:
    """Yield address and port of those TCP sockets that listen."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                digits, port = fields[1].split(":")
                words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                yield str(ip_address(b"".join(words))), int(port, 16)


def unix_sockets(inodes: set[str]) -> Iterator[str]:
    """Yield paths of those Unix sockets that listen; abstract ones begin with @."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & ACCEPTS and inode in inodes:
            yield path[0] if path else ""


def send(address: str, port: int, message: bytes) -> None:
    with socket.create_connection((address, port), timeout=120.0) as connection:
        connection.sendall(message)


def set_in_store(port: int, run: str, message: bytes) -> None:
    """Write to torch's store, if one listens there, as another process that knows torch would."""
    try:
        limit = timedelta(seconds=60)
        store = dist.TCPStore(
            "localhost", port, is_master=False, timeout=limit, wait_for_workers=False
        )
        store.set(f"torch.rendezvous.{run}", base64.b64encode(message).decode())
    except RuntimeError:  # something else listens
        return
