"""A pool of persistent worker processes for tests that need several ranks.

Starting Python and importing torch takes seconds per process, so the processes are forked from a
server that has torch loaded, and are kept between tests together with their process group. A test
defines what one rank does as a function at the top level of its module and calls

    results = pool.run(4, what_one_rank_does, "an argument", option=True)

A failure (an exception, a dead worker, a timeout) raises `RankFailed` in the test and discards the
processes, since the peers may be stuck in a collective; the next call starts new ones.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from gridformer.mesh.gpus import gpus_are_shared

Result = TypeVar("Result")

MAX_RANKS = 16
# Calls times ranks for which one process group is used. Every subgroup that tests make from it has
# threads on every rank: after hundreds of layouts 16 processes had 5,000 threads and ran ten times
# slower.
GROUP_SERVES = 96


class RankFailed(Exception):  # noqa: N818 - reads as a sentence in pytest.raises
    """A rank raised, died or hung. `rank` says which one; the text holds its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


_group_cache: dict[Any, Any] = {}


def group_cache() -> dict[Any, Any]:
    """Return a dictionary inside a worker that lives as long as the default process group.

    Keep device meshes and subgroups here: creating them costs more than most tests.
    """
    return _group_cache


@dataclass(frozen=True)
class _Group:
    store: str
    size: int
    backend: str


def _join_group(group: _Group, rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _group_cache.clear()
    gc.collect()  # a group in a reference cycle would keep its threads
    store = dist.FileStore(group.store, group.size)
    gpu = None
    if group.backend == "nccl":
        if gpus_are_shared():  # else the buffers of all processes and groups would not fit
            os.environ.update(NCCL_MAX_NCHANNELS="1", NCCL_BUFFSIZE="262144")
        gpu = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        group.backend, store=store, rank=rank, world_size=group.size, device_id=gpu
    )


class _OnOneDevice(dist.ProcessGroupGloo):
    """Groups whose processes each use one shared thread to look for messages.

    By default each group has its own thread, which wakes up every 10 ms: after 40 layouts, these
    threads took 28% of two cores while nothing ran (AMD EPYC), against 1% for a shared one.
    """

    device: ClassVar[Any] = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        if _OnOneDevice.device is None:
            _OnOneDevice.device = dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [_OnOneDevice.device]
        super().__init__(store, rank, size, options)


def _die_with_parent() -> None:
    """End this process when the test session's process is gone, whatever the main thread does."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(rank: int, pipe: Connection, stack_file: str) -> None:
    """Serve one pipe: receive (sys.path, group, function, arguments), answer (ok, value)."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Ctrl-C is for pytest, which then stops the workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # Hostnames often do not resolve on laptops and in containers; loopback always works.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]
    gc.freeze()  # imported objects stay alive, so the garbage collector can skip them
    gc.set_threshold(50_000)  # collecting every 700 objects took a tenth of the tests' time
    stack = open(stack_file, "w")  # noqa: SIM115 - must stay open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack)
    faulthandler.enable(stack)
    joined: _Group | None = None
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        try:
            path, group, body = pickle.loads(request)
            sys.path[:] = path  # must precede unpickling, which finds the function's module by name
            if group != joined:
                _join_group(group, rank)
                joined = group
            fn, args, kwargs = pickle.loads(body)
            torch.manual_seed(0)  # so that a test does not depend on the one before it
            value = fn(*args, **kwargs)
            # multiprocessing's own pickler would send tensors as shared memory handles
            answer = pickle.dumps((True, value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    stack_file: Path


class WorkerPool:
    """Persistent workers; see the module's docstring.

    Args:
        timeout_s: Seconds that one call of `run` may take; see also `limit`.
        backend: `gloo`, or `nccl`, which gives each rank a GPU of this machine, or shares them.
    """

    def __init__(self, timeout_s: float = 120.0, backend: str = "gloo") -> None:
        self.timeout_s, self.backend = timeout_s, backend
        self._folder = Path(tempfile.mkdtemp(prefix="gridformer-pool-"))
        self._context = get_context("forkserver")
        self._workers: list[_Worker] = []
        self._group: _Group | None = None
        self._n_groups = 0
        self._n_served = 0
        self._n_started = 0

    def run(
        self, world_size: int, fn: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> list[Result]:
        """Call `fn(*args, **kwargs)` on ranks 0 .. world_size-1 and return their results in order.

        `fn` must be defined at the top level of a module. Inside it `torch.distributed` has a
        default group of exactly `world_size` ranks. Results are pickled: return tensors, not
        DTensors.

        Raises:
            RankFailed: A rank raised (the text is its traceback), died, or did not finish within
                `timeout_s`.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_RANKS} ranks")
        # raises here, not in a worker, if something cannot be pickled
        body = pickle.dumps((fn, args, kwargs))
        if self.backend == "nccl" and self._group is not None and self._is_worn(world_size):
            self.discard()  # torch 2.11 crashes where the second world of a process is split
        self._grow(world_size)
        request = pickle.dumps((sys.path, self._group_of(world_size), body))
        workers = self._workers[:world_size]
        try:
            for rank, worker in enumerate(workers):
                try:
                    worker.pipe.send_bytes(request)
                except OSError:
                    raise _died(rank, worker) from None
            return self._collect(workers)
        # including KeyboardInterrupt: the workers are in the middle of a call
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def limit(self, timeout_s: float) -> Iterator[None]:
        """Use another timeout for the calls inside a `with` block."""
        before, self.timeout_s = self.timeout_s, timeout_s
        try:
            yield
        finally:
            self.timeout_s = before

    def discard(self) -> None:
        """Kill all workers; the next `run` starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()
        self._group = None

    def close(self) -> None:
        """Kill all workers and remove the temporary folder."""
        self.discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pids(self) -> list[int]:
        """Return the workers' process ids by rank."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _grow(self, n: int) -> None:
        dead = [w for w in self._workers if not w.process.is_alive()]
        if dead:  # workers killed between two tests
            self.discard()
        for rank in range(len(self._workers), n):
            ours, theirs = self._context.Pipe()
            stack_file = self._folder / f"stack{self._n_started}"
            self._n_started += 1
            process = self._context.Process(
                target=_work, args=(rank, theirs, str(stack_file)), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))

    def _is_worn(self, size: int) -> bool:
        """Whether a call with so many ranks needs a new group."""
        worn = self._n_served * size >= GROUP_SERVES
        return self._group is None or self._group.size != size or worn

    def _group_of(self, size: int) -> _Group:
        if self._group is None or self._is_worn(size):
            self._n_groups += 1
            self._n_served = 0
            store = str(self._folder / f"store{self._n_groups}")
            self._group = _Group(store, size, self.backend)
        self._n_served += 1
        return self._group

    def _collect(self, workers: list[_Worker]) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < len(workers):
            waiting = {r: w for r, w in enumerate(workers) if r not in results}
            failures = self._receive(waiting, max(0.0, deadline - time.monotonic()), results)
            if failures:
                # The root cause may arrive a moment after its effect on a peer.
                others = {r: w for r, w in waiting.items() if r not in results | failures}
                failures |= self._receive(others, 0.03, results)
                # A dead worker explains the connection errors of its peers.
                raise min(failures.values(), key=lambda f: not str(f).startswith("rank"))
            if time.monotonic() >= deadline and len(results) < len(workers):
                hung = {r: w for r, w in waiting.items() if r not in results}
                raise RankFailed(min(hung), _hang_report(hung, self.timeout_s))
        return [results[rank] for rank in range(len(workers))]

    @staticmethod
    def _receive(
        waiting: dict[int, _Worker], timeout_s: float, results: dict[int, Any]
    ) -> dict[int, RankFailed]:
        """Wait for the next message of some ranks; fill `results`, return failures by rank."""
        failures = {}
        ready = wait(
            [w.pipe for w in waiting.values()] + [w.process.sentinel for w in waiting.values()],
            timeout_s,
        )
        for rank, worker in waiting.items():
            if worker.pipe in ready:
                try:
                    ok, value = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = _died(rank, worker)
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = RankFailed(rank, f"on rank {rank}:\n\n{value}")
            elif worker.process.sentinel in ready:
                failures[rank] = _died(rank, worker)
        return failures


def _died(rank: int, worker: _Worker) -> RankFailed:
    worker.process.join(1.0)
    code = worker.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    stack = worker.stack_file.read_text() if worker.stack_file.exists() else ""
    return RankFailed(rank, f"rank {rank} (pid {worker.process.pid}) died: {how}\n{stack}".rstrip())


def _hang_report(hung: dict[int, _Worker], timeout_s: float) -> str:
    for worker in hung.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, signal.SIGUSR1)  # faulthandler writes the stack
    time.sleep(0.05)
    lines = [f"ranks {sorted(hung)} did not finish within {timeout_s} s"]
    for rank, worker in sorted(hung.items()):
        stack = worker.stack_file.read_text() if worker.stack_file.exists() else ""
        lines += [f"\nrank {rank} was at", stack or "(no stack)"]
    return "\n".join(lines)
