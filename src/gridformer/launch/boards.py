"""Where the ranks of a run tell each other that it hangs, and what each of them sees.

Ranks that `launch` started use files in the run's private folder. Those of torchrun and srun use
the store of the rendezvous, from a thread that may be left behind: the process that serves the
store may be the one that hangs.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from gridformer.mesh.launch_env import Joined
from gridformer.mesh.rendezvous import store_of

_FAILED = "watch/failed"
_ASKS_S = 2.0  # between two questions to the store of the run, or more if it is large
_ANSWER_S = 4.0  # the store answers within milliseconds, or hangs itself
Report = dict[str, Any]
_in_store: StoreBoard | None = None  # the board of this process, if it is in a store


class Board(Protocol):
    """What `launch.watch` needs of the other ranks."""

    def register(self, path: Path | None) -> None:
        """Tells where others on this machine may read the progress of this rank."""

    def is_claimed(self) -> bool:
        """Returns whether a rank has found that the run hangs."""

    def failed(self) -> str:
        """Returns what is known of a rank that has failed, or nothing."""

    def claim(self) -> bool:
        """Says that the run hangs. Returns whether this rank is the first to do so."""

    def publish(self, report: Report) -> None:
        """Tells what this rank sees."""

    def published(self, ranks: Iterable[int]) -> dict[int, Report]:
        """Returns what the given ranks see, for those of them that have published it."""

    def neighbors(self) -> dict[int, Path]:
        """Returns where the progress of each rank of this machine can be read."""


def board_of(place: Joined) -> Board:
    """Returns the board of a run."""
    global _in_store
    if place.store_file:
        return FolderBoard(Path(place.store_file).parent, place.rank, place.size)
    _in_store = StoreBoard(place)
    return _in_store


def tell_failed() -> bool:
    """Tells the other ranks that this one has failed, if nobody else would.

    Over NCCL they spin in messages to this rank, and notice nothing. `launch` ends its processes
    itself; torchrun and srun do so on their own machine or after a while.

    Returns:
        Whether they can read it, as long as the store is there.
    """
    if _in_store is None:
        return False
    try:
        _in_store.tell_failed()
    except TimeoutError:
        return False
    return True


class FolderBoard:
    """A board of files in a folder that only this user can open.

    Args:
        folder: The folder.
        rank: This rank.
        size: Number of ranks, all of which are on this machine.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size

    def progress_file(self, rank: int) -> Path:
        """The file in which a rank keeps its progress."""
        return self.folder / f"progress-{rank}"

    def register(self, path: Path | None) -> None:
        """Does nothing: everyone knows the names of the files."""

    def is_claimed(self) -> bool:
        return (self.folder / "hang").exists()

    def failed(self) -> str:
        return ""  # `launch` ends the others

    def claim(self) -> bool:
        try:
            (self.folder / "hang").open("x").close()
        except FileExistsError:
            return False
        return True

    def publish(self, report: Report) -> None:
        unfinished = self.folder / f"seen-{self.rank}.unfinished"
        unfinished.write_text(json.dumps(report), encoding="utf-8")
        unfinished.rename(self._seen(self.rank))

    def published(self, ranks: Iterable[int]) -> dict[int, Report]:
        return {
            rank: json.loads(self._seen(rank).read_text(encoding="utf-8"))
            for rank in ranks
            if self._seen(rank).exists()
        }

    def neighbors(self) -> dict[int, Path]:
        return {rank: self.progress_file(rank) for rank in range(self.size)}

    def _seen(self, rank: int) -> Path:
        return self.folder / f"seen-{rank}.json"


class StoreBoard:
    """A board in the store of the rendezvous.

    Raises:
        TimeoutError: From every method, when the store does not answer.
    """

    def __init__(self, place: Joined) -> None:
        self.rank, self.size = place.rank, place.size
        store: Any = store_of(place)
        self._store = store.clone()  # a connection of its own
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._asked = queue.SimpleQueue()
        threading.Thread(target=self._ask, name="hang board", daemon=True).start()

    def register(self, path: Path | None) -> None:
        text = json.dumps([socket.gethostname(), str(path or "")])
        self._answer(lambda: self._store.set(f"watch/place/{self.rank}", text))

    def is_claimed(self) -> bool:
        return bool(self._answer(lambda: self._store.check(["watch/hang"])))

    def failed(self) -> str:
        def get() -> str:
            return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else ""

        return str(self._answer(get))

    def tell_failed(self) -> None:
        """Tells the others that this rank has failed, who may wait for it in messages."""
        text = f"rank {self.rank} on {socket.gethostname()}"
        self._answer(lambda: self._store.set(_FAILED, text))

    def claim(self) -> bool:
        first = self._answer(lambda: self._store.add("watch/claims", 1)) == 1
        self._answer(lambda: self._store.set("watch/hang", str(self.rank)))
        return first

    def publish(self, report: Report) -> None:
        self._answer(lambda: self._store.set(f"watch/seen/{self.rank}", json.dumps(report)))

    def published(self, ranks: Iterable[int]) -> dict[int, Report]:
        return {rank: json.loads(text) for rank in ranks if (text := self._get("seen", rank))}

    def neighbors(self) -> dict[int, Path]:
        here, found = socket.gethostname(), {}
        for rank in range(self.size):
            host, path = json.loads(self._get("place", rank) or '["", ""]')
            if host == here and path:
                found[rank] = Path(path)
        return found

    def _get(self, what: str, rank: int) -> str:
        """Returns a text of a rank, or an empty one."""
        key = f"watch/{what}/{rank}"

        def get() -> str:
            return self._store.get(key).decode() if self._store.check([key]) else ""

        return str(self._answer(get))

    def _answer(self, question: Callable[[], Any]) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((question, answer))
        try:
            found = answer.get(timeout=_ANSWER_S)
        except queue.Empty:
            found = None
        if found is None:
            raise TimeoutError("the store of the run does not answer")
        return found[0]

    def _ask(self) -> None:
        while True:
            question, answer = self._asked.get()
            try:
                answer.put((question(),))
            except Exception:  # torch's many errors of a lost connection
                answer.put(None)


def asks_s(size: int) -> float:
    """Returns after how many seconds each of `size` ranks asks the store of the run again.

    The store of a large run answers about a thousand questions a second.
    """
    return max(_ASKS_S, size / 250)


def process_state(pid: int) -> str:
    """Returns the state of a process of this machine: a letter of proc(5), or "" if it is gone.

    It is "?" where the system does not say.
    """
    if not Path("/proc/self/stat").exists():
        return "?"
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
