"""The key-value store in which the processes of a run meet before they form a process group.

Through it they also agree on things that must be known before there is a group: which GPU each has,
and what rank 0 has planned. Values are plain text, so nothing that is read is unpickled.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from gridformer.mesh.launch_env import RankEnv
from gridformer.utils.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

# How long a process waits for another one. Processes may start late, and rank 0 may estimate the
# memory of a large run and look for settings that fit.
WAIT_S = 600.0
_LONGEST_PAUSE_S = 0.2  # between two polls; one process may serve a thousand ranks


def store_of(env: RankEnv) -> dist.Store:
    """Returns the store for the rendezvous, which is empty at every attempt.

    Workers that `launch` started use a file in a private folder, so no port is open. Those of
    torchrun and srun use a TCP port, which is open on all interfaces without authentication.
    """
    return _store(replace(env, size=0))  # of all that were started, however many take part


@cache  # the process that serves a TCP store can open its port only once
def _store(env: RankEnv) -> dist.Store:
    import torch.distributed as dist

    timeout = timedelta(seconds=WAIT_S)
    if env.store_file:
        # Without a number of workers, because with one the file is deleted when workers leave.
        file = dist.FileStore(env.store_file)
        file.set_timeout(timeout)
        return file
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        env.master_addr,
        env.master_port,
        is_master=env.rank == 0 and not agent_has_it,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = dist.PrefixStore(f"gridformer/{attempt}", store)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return of_this_attempt(shared, env.rank, size) if agent_has_it else shared


def of_this_attempt(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Returns the part of a store that belongs to this attempt of a run.

    torchrun's own store lives as long as its agent. After a restart it still holds the addresses of
    the previous attempt under the names that gloo uses, and if a restart is due to a change in the
    number of machines, torchrun does not even count it. So rank 0 draws a name for the attempt and
    sends it to each process that has announced a random name, which is new in each attempt.

    Raises:
        UserError: Rank 0 or another rank did not answer within ten minutes.
    """
    import torch.distributed as dist

    mine, deadline = secrets.token_hex(8), time.monotonic() + WAIT_S
    if rank:
        store.set(f"hello/{rank}", mine)
        _poll(lambda: store.check([f"attempt/{mine}"]), deadline, lambda: "rank 0", rank)
        name = store.get(f"attempt/{mine}").decode()
        store.add(f"{name}/here", 1)
        return dist.PrefixStore(name, store)
    answered: dict[int, str] = {}

    def all_are_here() -> bool:
        for other in range(1, size):
            if store.check([f"hello/{other}"]):
                name = store.get(f"hello/{other}").decode()
                if answered.get(other) != name:
                    answered[other] = name
                    store.set(f"attempt/{name}", mine)
        return store.add(f"{mine}/here", 0) == size - 1

    def missing() -> str:
        return f"rank {next((n for n in range(1, size) if n not in answered), 1)}"

    _poll(all_are_here, deadline, missing, rank)
    return dist.PrefixStore(mine, store)


def collect(env: RankEnv, name: str, text: str) -> list[str]:
    """Sends a text to rank 0, under a name that nothing else uses; all ranks call it once.

    Returns the texts of all ranks on rank 0, an empty list on the others.
    """
    store_of(env).set(f"{name}/{env.rank}", text)
    return [] if env.rank else gather(env, name, range(env.size))


def gather(env: RankEnv, name: str, ranks: Iterable[int]) -> list[str]:
    """Returns on rank 0 the texts that some ranks have shared, each under `NAME/RANK`.

    Raises:
        UserError: One did not share it within ten minutes.
    """
    return [_get(env, f"{name}/{rank}", f"rank {rank}") for rank in ranks]


def share(env: RankEnv, name: str, text: str) -> None:
    """Sends a text from rank 0 to all others, each of which calls `receive` with the same name."""
    store_of(env).set(name, text)


def receive(env: RankEnv, name: str) -> str:
    """Returns the text that rank 0 shares under this name.

    Raises:
        UserError: Rank 0 did not share it within ten minutes.
    """
    text = _get(env, name, "rank 0")
    store = store_of(env)
    if store.add(f"{name}/heard", 1) == env.size - 1:
        store.set(f"{name}/heard by all", "yes")
    return text


def share_result(env: RankEnv, name: str, text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Lets rank 0 judge the texts of all ranks, and returns its judgment on every rank."""
    texts = collect(env, name, text)
    if env.rank:
        return receive(env, name)
    share(env, name, result := judge(texts))
    return result


def wait_until_heard(env: RankEnv, name: str, timeout_s: float) -> None:
    """Waits on rank 0, which may serve the store, until all others have received a text."""
    with suppress(RuntimeError):  # torch's error for a timeout
        store_of(env).wait([f"{name}/heard by all"], timedelta(seconds=timeout_s))


def _get(env: RankEnv, key: str, source: str) -> str:
    store = store_of(env)
    _poll(lambda: store.check([key]), time.monotonic() + WAIT_S, lambda: source, env.rank)
    return store.get(key).decode()


def _poll(done: Callable[[], bool], deadline: float, source: Callable[[], str], rank: int) -> None:
    """Waits until something is done. It polls, because Ctrl-C does not interrupt torch's own wait.

    Raises:
        UserError: It was not done by the deadline, on the clock of `time.monotonic`.
    """
    pause = 0.005
    while not done():
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {rank} has waited {WAIT_S:g} s for {source()}, which has not started or "
                f"cannot be reached: see the output of {source()}, and try `gridformer doctor`"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
