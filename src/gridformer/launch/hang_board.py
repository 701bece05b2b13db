"""Where the ranks of a run tell each other that it hangs, and what each of them sees.

This is the store of the rendezvous, which a thread asks that may be left behind: the process that
serves the store may be the one that hangs.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gridformer.launch.hang_report import RankReport, reports
from gridformer.launch.worker_process import at_failure
from gridformer.mesh.launch_env import RankEnv
from gridformer.mesh.rendezvous import store_of

_ASKS_S = 2.0  # between two questions to the store of the run, or more if it is large
_ANSWER_S = 4.0  # the store answers within milliseconds, or hangs itself


class HangBoard:
    """What the ranks of a run tell each other.

    Args:
        place: The place of this process in the run.

    Raises:
        TimeoutError: From every method, when the store does not answer.
    """

    def __init__(self, place: RankEnv) -> None:
        self.place = place
        store: Any = store_of(place)
        self._store = store.clone()  # a connection of its own
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._ask, name="hang board", daemon=True).start()
        # `launch` ends its processes itself; torchrun and srun do so on their own machine or late.
        if not place.store_file:
            at_failure.append(self.tell_failed)

    def register(self, path: Path | None) -> None:
        """Tells where others on this machine may read the progress of this rank."""
        self._set("place", self.place.rank, json.dumps([socket.gethostname(), str(path or "")]))

    def is_claimed(self) -> bool:
        """Returns whether a rank has found that the run hangs."""
        return bool(self._get("hang"))

    def failed(self) -> str:
        """Returns which rank has failed, or nothing."""
        return self._get("failed")

    def tell_failed(self) -> None:
        """Tells the others that this rank has failed, who over NCCL spin in messages to it."""
        with suppress(TimeoutError):
            self._set("failed", "", f"rank {self.place.rank} on {socket.gethostname()}")
            if self.place.rank == 0 and self.place.by == "srun":
                # The store of the run is in this process. All ranks ask it in this time.
                time.sleep(1.5 * asks_s(self.place.size))

    def claim(self) -> bool:
        """Says that the run hangs. Returns whether this rank is the first to do so."""
        first = self._answer(lambda: self._store.add("watch/claims", 1)) == 1
        self._set("hang", "", str(self.place.rank))
        return first

    def publish(self, report: RankReport) -> None:
        """Tells what this rank sees."""
        self._set("seen", self.place.rank, reports().dump_json(report).decode())

    def published(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """Returns what the given ranks see, for those of them that have published it."""
        texts = {rank: self._get("seen", rank) for rank in ranks}
        return {rank: reports().validate_json(text) for rank, text in texts.items() if text}

    def neighbors(self) -> dict[int, Path]:
        """Returns where the progress of each other rank of this machine can be read."""
        here, found = socket.gethostname(), {}
        for rank in {*range(self.place.size)} - {self.place.rank}:
            host, path = json.loads(self._get("place", rank) or '["", ""]')
            if host == here and path:
                found[rank] = Path(path)
        return found

    def _set(self, what: str, rank: int | str, text: str) -> None:
        self._answer(lambda: self._store.set(f"watch/{what}/{rank}", text))

    def _get(self, what: str, rank: int | str = "") -> str:
        """Returns a text, or an empty one if there is none."""
        key = f"watch/{what}/{rank}"

        check, get = self._store.check, self._store.get
        return str(self._answer(lambda: get(key).decode() if check([key]) else ""))

    def _answer(self, question: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._asked.put((question, answer))
        try:
            return answer.result(_ANSWER_S)
        except Exception:  # torch's many errors of a lost connection, or no answer in time
            raise TimeoutError("the store of the run does not answer") from None

    def _ask(self) -> None:
        while True:
            question, answer = self._asked.get()
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)


def asks_s(size: int) -> float:
    """Returns after how many seconds each of `size` ranks asks the store of the run again.

    The store of a large run answers about a thousand questions a second.
    """
    return max(_ASKS_S, size / 250)
