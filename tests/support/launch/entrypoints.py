"""The entrypoints that workers run in tests of `launch`; each writes files named by its rank."""

import os
import resource
import signal
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from gridformer.launch import worker_process
from gridformer.mesh.launch_env import STORE_FILE
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.utils import signals
from gridformer.utils.errors import ConfigError, SaveError
from gridformer.utils.files import writing


def note(folder: Path, name: str, text: str = "") -> None:
    """Write a file that has its full text from the moment it exists."""
    path = folder / f"{name}{os.environ.get('RANK', '0')}"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


def begin(n: int) -> None:
    init_process_groups("cpu", n, 600.0)
    dist.barrier()


def sums(folder: Path, n: int) -> None:
    """Run a collective, and write what each worker sees."""
    world = init_process_groups("auto", n, 600.0)
    x = torch.ones(1)
    if n > 1:
        dist.all_reduce(x)
    note(folder, "allocator", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    note(folder, "sum", f"{world.rank}/{world.size} {x.item():g} {torch.get_num_threads()}")
    print(f"output of rank {world.rank}: {world.why}")
    close_process_groups()


def steps(folder: Path, n: int) -> None:
    """Run a training loop until told to stop, then save."""
    stop = signals.install()
    init_process_groups("cpu", n, 600.0)
    note(folder, "store", os.environ.get(STORE_FILE, ""))
    note(folder, "gloo", os.environ.get("GLOO_SOCKET_IFNAME", ""))
    note(folder, "nccl", os.environ.get("NCCL_SOCKET_IFNAME", ""))
    note(folder, "pid", str(os.getpid()))
    for _ in range(30_000):
        time.sleep(0.01)
        wanted = torch.tensor([float(stop.requested)])
        if n > 1:
            dist.all_reduce(wanted)
        if wanted.item():
            note(folder, "saved")
            break
    close_process_groups()


def fails_when_it_goes_on(folder: Path, n: int) -> None:
    """Meet gloo's time limit after SIGCONT."""

    def fail(*_: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 14000ms")

    signal.signal(signal.SIGCONT, fail)
    note(folder, "pid", str(os.getpid()))
    for _ in range(6000):  # another thread may take the signal
        time.sleep(0.1)


def one_long_step(folder: Path, n: int) -> None:
    """Rank 1 computes without looking at the stop flag; the others wait for it in a collective."""
    init_process_groups("cpu", n, 600.0)
    note(folder, "pid", str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def one_step_that_no_grace_ends(folder: Path, n: int) -> None:
    """The same, with a grace period as long as the step; see main.py."""
    one_long_step(folder, n)


def one_long_save(folder: Path, n: int) -> None:
    """Be told to stop in a save that takes longer than the grace period of 0.5 s."""
    stop = signals.install()
    init_process_groups("cpu", n, 600.0)
    with stop.held():
        note(folder, "pid", str(os.getpid()))
        while not stop.requested:
            time.sleep(0.01)
        while stop.seconds_left > -2.0:  # longer than the launcher's patience, too
            time.sleep(0.01)
        note(folder, "saved")
        dist.barrier()
        stop.saved()
    close_process_groups()


def one_is_killed(folder: Path, n: int) -> None:
    begin(n)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def config_error(folder: Path, n: int) -> None:
    """Fail, and check that descriptor 0, which may be of other use, stays open to the end."""
    end = signals.end_process
    patch.object(signals, "end_process", lambda code: (os.fstat(0), end(code))).start()
    raise ConfigError("first problem", "second problem")


def config_error_of_one_that_stops(folder: Path, n: int) -> None:
    """Rank 1 finds the error of rank 0, but only when it is told to stop because of that one."""
    stop = signals.install()
    stop.hold()  # so that it is not ended before it raises
    while os.environ["RANK"] == "1" and not stop.requested:
        time.sleep(0.01)
    config_error(folder, n)


def one_has_lost_another(folder: Path, n: int) -> None:
    """Rank 0 ends because of another rank, but none says that it is the one."""
    if os.environ["RANK"] == "0":
        raise SaveError("another rank could not save", elsewhere=True)
    time.sleep(600)


# Runs that fail before or soon after they begin, for tests of the fork server and of memory.


def killing_the_server(folder: Path, n: int) -> None:
    """Rank 0 kills the process that forks the others."""
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def with_a_full_disk(folder: Path, n: int) -> None:
    """Rank 1 cannot write; the others wait for it."""
    begin(n)
    if dist.get_rank() == 1:
        with writing(Path("/dev/full"), 1 << 20):
            Path("/dev/full").write_text("x")
    dist.all_reduce(torch.ones(1))


def with_a_full_folder(folder: Path, n: int) -> None:
    """The same, where rank 1 cannot write its report, either."""
    if os.environ["RANK"] == "1":
        patch.object(worker_process, "write_whole", side_effect=OSError).start()
    with_a_full_disk(folder, n)


def with_too_many_files(folder: Path, n: int) -> None:
    """Rank 1 may not open any more files; the others wait for it."""
    begin(n)
    kept = []
    while dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept.append(os.dup(0))
    dist.all_reduce(torch.ones(1))


def needing_memory(folder: Path, n: int) -> None:
    """Rank 1 takes memory until it gets no more; the others wait for it."""
    begin(n)
    if dist.get_rank() == 1:
        if more := int(os.environ.get("MORE_BYTES", "0")):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)
        kept = []
        while True:
            kept.append(torch.ones(16 << 20))
    dist.all_reduce(torch.ones(1))
