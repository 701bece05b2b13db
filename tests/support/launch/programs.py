"""Programs that launch one of entrypoints.py and are watched from outside, for tests of `launch`.

They wait for seconds at most; the limits are far longer, because others may use the machine.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIMIT_S = 150.0
# `start("steps", 2)` runs an entrypoint of entrypoints.py in its own session. Further words go to
# the interpreter, and `env` adds to the environment.
Start = Callable[..., subprocess.Popen[str]]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Programs started inside the block write their files to `folder` and end with the block."""
    started = []

    def start(
        name: str, n: int, *before: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        dropped = [k for k in os.environ if k.startswith("OMP_") or k.endswith("ALLOC_CONF")]
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        process = subprocess.Popen(
            [sys.executable, *before, "-m", "tests.support.launch.main", name, str(n), folder],
            cwd=ROOT,
            env=kept | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as under a terminal
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(folder: Path, names: list[str], process: subprocess.Popen[str]) -> list[str]:
    """Return the texts of files that workers write, once all of them exist."""
    deadline = time.monotonic() + LIMIT_S
    while not all((folder / name).exists() for name in names):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [(folder / name).read_text() for name in names]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def assert_gone(pids: list[str]) -> None:
    """Check that processes end long before their work (600 s) would, even under load."""
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "workers are still there"
        time.sleep(0.02)


def still_runs(pid: str) -> bool:
    """Return whether a process has not ended, though its parent may not know yet that it has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def processes(session: int) -> Iterator[Path]:
    """Yield the folders in /proc of the processes of a session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getsid(int(folder.name)) == session:
                    yield folder
            except ProcessLookupError:
                continue


def pid_of(session: int, rank: int) -> int | None:
    """Return the process of a rank, which keeps a file that only ranks have; None without one."""
    for folder in processes(session):
        with suppress(OSError):
            if re.search(rf"/progress-{rank}$", (folder / "maps").read_text(), re.MULTILINE):
                return int(folder.name)
    return None
