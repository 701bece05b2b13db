"""The key-value store in which the processes of a run meet before they form a process group.

Through it they also agree on things that must be known before there is a group: which GPU each has,
and what rank 0 has planned. Values are plain text, so nothing that is read from the store is
unpickled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from gridformer.mesh.launch_env import Joined
from gridformer.utils.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

# How long a process waits for another one. Processes may start late, and rank 0 may estimate the
# memory of a large run and look for settings that fit.
WAIT_S = 600.0
_LONGEST_PAUSE_S = 0.2  # between two looks at the store, for which a thousand ranks ask one process


@cache  # the process that serves a TCP store can open its port only once
def store_of(place: Joined) -> dist.Store:
    """Returns the store for the rendezvous, which is empty at every attempt.

    Workers that `launch` started use a file in a private folder, so no port is open. Those of
    torchrun and srun use a TCP port, which is open on all interfaces without authentication.

    After an elastic restart, torchrun's own store still holds the addresses of the previous attempt
    under the names that gloo uses, so each attempt gets its own prefix.

    Args:
        place: the place of this process in the run.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=WAIT_S)
    if place.store_file:
        # Without a number of workers, because with one the file is deleted when workers leave.
        file = dist.FileStore(place.store_file)
        file.set_timeout(timeout)
        return file
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        place.master_addr,
        place.master_port,
        place.size,
        is_master=place.rank == 0 and not agent_has_it,
        timeout=timeout,
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"gridformer/{attempt}", store)


def share_result(place: Joined, name: str, text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Lets rank 0 judge what all ranks say, and returns its judgment on every rank.

    All ranks call it with the same name, once. Each sends and receives one text, whatever the
    number of ranks.

    Args:
        place: the place of this process in the run.
        name: a name in the store.
        text: what this rank says.
        judge: makes the result from the texts of all ranks.
    """
    texts = collect(place, name, text)
    if place.rank == 0:
        result = judge(texts)
        share(place, name, result)
        return result
    return receive(place, name)


def collect(place: Joined, name: str, text: str) -> list[str]:
    """Sends a text to rank 0. All ranks call it with the same name, once.

    Returns:
        The texts of all ranks on rank 0, an empty list on the others.
    """
    store = store_of(place)
    store.set(f"{name}/{place.rank}", text)
    if place.rank:
        return []
    return [_get(place, f"{name}/{rank}", f"rank {rank}") for rank in range(place.size)]


def share(place: Joined, name: str, text: str) -> None:
    """Sends a text from rank 0 to all others, each of which calls `receive` with the same name."""
    store_of(place).set(name, text)


def receive(place: Joined, name: str) -> str:
    """Returns the text that rank 0 shares under this name.

    Raises:
        UserError: rank 0 did not share it within ten minutes.
    """
    text = _get(place, name, "rank 0")
    store = store_of(place)
    if store.add(f"{name}/heard", 1) == place.size - 1:
        store.set(f"{name}/heard by all", "yes")
    return text


def wait_until_heard(place: Joined, name: str, timeout_s: float) -> None:
    """Waits on rank 0 until all others have received a text, at most `timeout_s` seconds.

    Rank 0 may serve the store, which ends with it.
    """
    with suppress(RuntimeError):  # torch's error for a timeout
        store_of(place).wait([f"{name}/heard by all"], timedelta(seconds=timeout_s))


def _get(place: Joined, key: str, source: str) -> str:
    """Returns a value as soon as another rank has set it.

    It polls, because Ctrl-C does not interrupt torch's own wait.
    """
    store, pause, deadline = store_of(place), 0.005, time.monotonic() + WAIT_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {place.rank} has waited {WAIT_S:g} s for {source}, which has not started or "
                f"cannot be reached: see the output of {source}, and try `gridformer doctor`"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return store.get(key).decode()
