"""One save: every rank writes its file, and the first rank publishes the checkpoint.

A `Save` may run in a thread while training goes on, so ranks send no messages but leave notes in
the draft: `done-3` says what rank 3 has written, and `trouble-3-28-4096` that it could not write
4096 bytes because of error 28. If room could be made for them, such ranks try again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gridformer.checkpoint.blocks import TensorBlock, joined_index, packed_part
from gridformer.checkpoint.manifest import FileEntry, Manifest, manifest_bytes
from gridformer.checkpoint.safetensors_file import write_file
from gridformer.checkpoint.side_files import write_side_files
from gridformer.checkpoint.store import Draft, Kept, LocalStore, RemoteStore, name_of
from gridformer.comm import progress
from gridformer.utils.errors import SaveError
from gridformer.utils.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST_S = 3.0  # to wait for the notes of other ranks, once a rank is known to be gone
_SHORTEST_S, _LONGEST_S = 0.002, 0.25  # between two looks
_RENEW_S = 5.0


def polling(timeout_s: float = float("inf"), draft: Draft | None = None) -> Iterator[None]:
    """Yields for each look at what is waited for, less and less often, until time is over.

    Time begins anew when a draft is renewed, as another rank does while it is at work. This rank's
    clock counts it, because the clocks of machines and of storage differ.
    """
    pause, renewed, ends = _SHORTEST_S, None, time.monotonic() + timeout_s
    while True:
        yield
        now = time.monotonic()
        if draft is not None and (last := draft.renewed_ns()) not in (None, renewed):
            renewed, ends = last, now + timeout_s
        if now >= ends:
            return
        if threading.current_thread() is threading.main_thread():
            progress.waits_on_purpose()
        time.sleep(pause)
        pause = min(_LONGEST_S, 1.5 * pause)


@contextlib.contextmanager
def renewing(draft: Draft, timeout_s: float) -> Iterator[None]:
    """Shows other ranks that this one works on a draft while the block runs, or raises OSError."""
    waits, ended = threading.current_thread() is threading.main_thread(), threading.Event()

    def renew() -> None:
        while not ended.wait(min(_RENEW_S, timeout_s / 4)):
            with contextlib.suppress(OSError):
                draft.renew()
            if waits:
                progress.waits_on_purpose()

    draft.renew()
    thread = threading.Thread(target=renew, name="renewing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # else it could make the folder of notes again


def file_of(rank: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"shard-{rank + 1:05d}.safetensors"


@dataclass
class SaveOutcome:
    """What became of a save. Only the first rank knows it."""

    target: str  # the path of the checkpoint
    step: int
    n_bytes: int = 0  # of all its files
    seconds: float = 0.0  # from its beginning to its end
    stalled_s: float = 0.0  # for how long training waited for it and for the save before it
    waited_s: float = 0.0  # how long of this it waited for the save before it
    failure: str = ""  # why there is no checkpoint; empty if it is complete
    full: bool = False  # whether all that was missing is space
    removed: list[str] = field(default_factory=list)  # checkpoints that made room
    not_copied: str = ""  # why it is not at `train.checkpoint_to`, if it should be


@dataclass(frozen=True)
class _Note:
    """What one rank tells: bytes and checksum of its file, its part of the index, or trouble."""

    rank: int
    n_bytes: int = 0
    crc32: int = 0
    part: bytes = b""
    error: int = 0

    @property
    def name(self) -> str:
        trouble = f"trouble-{self.rank}-{self.error}-{self.n_bytes}"
        return trouble if self.error else f"done-{self.rank}"

    def content(self) -> bytes:
        return b"" if self.error else b"%d %d %b" % (self.n_bytes, self.crc32, self.part)

    @staticmethod
    def of_trouble(rank: int, error: OSError, n_bytes: int = 0) -> _Note:
        return _Note(rank, n_bytes, error=error.errno or errno.EIO)

    @staticmethod
    def read(name: str, draft: Draft) -> _Note:
        kind, rank, *numbers = name.split("-")
        if kind == "trouble":
            error, needed = map(int, numbers)
            return _Note(int(rank), needed, error=error)
        n_bytes, crc32, part = draft.read(name).split(b" ", 2)
        return _Note(int(rank), int(n_bytes), int(crc32), part)


@dataclass
class Save:
    """One save, as one rank takes part in it."""

    store: LocalStore
    manifest: Manifest  # without files and index
    rank: int
    n_ranks: int
    kept: Kept
    # The first rank gives up when no rank has left a note for so long, and for much longer than its
    # own part of the save took.
    timeout_s: float = 600.0
    copy_to: str = ""  # a URL to which the first rank copies the checkpoint; empty for none
    # Whether a rank has failed or was killed. Its note may never come, and the other ranks may be
    # about to be ended, so notes are then waited for only briefly.
    hopeless: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.draft = self.store.draft(name_of(self.manifest.step))
        self.began = time.monotonic()
        self.outcome = SaveOutcome(str(self.draft.target), self.manifest.step)
        self.no_draft = False  # whether the first rank could not begin
        self._own_s = 0.0

    def begin(self) -> bool:
        """Creates the draft, or returns False. The first rank calls it before any calls `run`."""
        while True:
            try:
                self.draft.begin()
                return True
            except OSError as error:
                if not self._makes_room([_Note.of_trouble(0, error)]):
                    self.outcome.full = error.errno in _FULL
                    self._fails(f"{self.draft.target}: {error.strerror or error}")
                    return False

    def run(self, blocks: Mapping[str, TensorBlock]) -> None:
        """Writes this rank's file and, on the first rank, publishes the checkpoint."""
        note = self._write(blocks)
        if self.rank == 0:
            while not self._ends(note):
                note = self._write(blocks) if note.error else note
        else:
            while (note := self._tell(note)).error and self._may_retry(note):
                note = self._write(blocks)

    def has_ended(self) -> bool:
        """Whether the first rank has ended the save, as far as `run` is over."""
        return self.rank == 0 or self.no_draft or self.draft.renewed_ns() is None

    def wait_for_the_end(self) -> None:
        """Waits until the first rank has ended the save, once `run` is over.

        A copy to `copy_to` may take very much longer than the save itself.
        """
        for _ in self._polling(3 * self.timeout_s, 2):
            pass

    def _polling(self, timeout_s: float, times: int = 1) -> Iterator[None]:
        """Yields as `polling`, at most until the save has ended or a rank is gone."""
        began = time.monotonic()
        for _ in polling(timeout_s, self.draft):
            yield
            if self.has_ended() or self._is_lost(began, times):
                return

    def _is_lost(self, since: float, times: int = 1) -> bool:
        """Returns whether to give up on what has not come since then, because a rank is gone."""
        waited_s = time.monotonic() - since
        return waited_s > times * max(_LOST_S, 10 * self._own_s) and self.hopeless()

    # ------------------------------------------------------------------ each rank

    def _write(self, blocks: Mapping[str, TensorBlock]) -> _Note:
        began = time.monotonic()
        if not blocks:
            return _Note(self.rank)
        try:
            with self.draft.writing(file_of(self.rank)) as file:
                n_bytes, crc32 = write_file(file, blocks)
            return _Note(self.rank, n_bytes, crc32, packed_part(blocks))
        except OSError as error:
            return self._troubled(error, blocks)
        except Exception as error:  # the other ranks must be told, whatever it is
            traceback.print_exception(error)
            return self._troubled(OSError(errno.EIO, ""), blocks)
        finally:
            self._own_s = max(self._own_s, time.monotonic() - began)

    def _troubled(self, error: OSError, blocks: Mapping[str, TensorBlock]) -> _Note:
        with contextlib.suppress(OSError):  # to make room for the notes
            self.draft.drop(file_of(self.rank))
        return _Note.of_trouble(self.rank, error, sum(one.n_bytes for one in blocks.values()))

    def _tell(self, note: _Note) -> _Note:
        """Leaves a note, as soon as there is room for it, and returns it; maybe one of trouble."""
        for _ in self._polling(self.timeout_s):
            try:
                self.draft.tell(note.name, note.content())
                break
            except OSError as error:
                note = note if note.error else self._troubled(error, {})
        return note

    def _may_retry(self, trouble: _Note) -> bool:
        """Waits for the first rank's answer to trouble, and returns whether to try again."""
        for _ in self._polling(3 * self.timeout_s, 2):
            with contextlib.suppress(OSError):
                if trouble.name not in self.draft.told():
                    return True
        return False

    # ------------------------------------------------------------------ the first rank

    def _ends(self, own: _Note) -> bool:
        """Returns whether the save has ended, well or not; otherwise there is room again."""
        try:
            notes = self._all(own)
            troubles = [note for note in notes if note.error]
            if not troubles:
                self._publish(notes)
                return True
        except SaveError as lost:
            self._fails(str(lost))
            return True
        except OSError as error:
            troubles = [_Note.of_trouble(0, error)]
        except Exception as error:
            traceback.print_exception(error)
            self._fails(f"{self.draft.target}: {type(error).__name__}: {error}")
            return True
        if self._makes_room(troubles):
            with contextlib.suppress(OSError):  # who cannot try again is asked again
                for note in troubles:
                    self.draft.untell(note.name)
            return False
        self.outcome.full = all(note.error in _FULL for note in troubles)
        self._fails(self._why(troubles))
        return True

    def _all(self, own: _Note) -> list[_Note]:
        """Waits until all ranks have left their notes, and returns what the notes say."""
        notes, last_news = {own.rank: own}, time.monotonic()
        for _ in polling():
            for name in self.draft.told():
                if (rank := int(name.split("-")[1])) not in notes:
                    notes[rank], last_news = _Note.read(name, self.draft), time.monotonic()
            if len(notes) == self.n_ranks:
                break
            silent_s = time.monotonic() - last_news
            if silent_s > _LOST_S:
                with self.draft.writing("probe"):  # raises if no rank can leave even a note
                    pass
                self.draft.drop("probe")
            if silent_s > max(self.timeout_s, 10 * self._own_s) or self._is_lost(last_news):
                missing = [rank for rank in range(self.n_ranks) if rank not in notes]
                some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise SaveError(
                    f"{self.draft.target}: {len(missing)} of {self.n_ranks} ranks have not written "
                    f"their files (ranks {some})"
                )
        return [notes[rank] for rank in range(self.n_ranks)]

    def _publish(self, notes: list[_Note]) -> None:
        written = {file_of(note.rank): note for note in notes if note.n_bytes}
        files = {
            name: FileEntry(bytes=note.n_bytes, crc32=note.crc32) for name, note in written.items()
        }
        index = joined_index({name: note.part for name, note in written.items()})
        side = write_side_files(self.store.run_dir, self.draft.writing)
        update = {"files": files, "side_files": side, "index": index}
        content = manifest_bytes(self.manifest.model_copy(update=update))
        with renewing(self.draft, self.timeout_s) if self.copy_to else contextlib.nullcontext():
            self.draft.publish(content)
            self.outcome.n_bytes = sum(entry.bytes for entry in (*files.values(), *side.values()))
            if self.copy_to:
                try:
                    remote = RemoteStore(self.copy_to)
                    remote.upload(self.draft.target)
                    self.kept.prune(remote)
                except Exception as error:  # each file system has errors of its own
                    self.outcome.not_copied = f"{type(error).__name__}: {error}"
        self._close()
        with contextlib.suppress(OSError):  # what is too many can be removed after the next save
            self.kept.prune(self.store)

    def _makes_room(self, troubles: list[_Note]) -> bool:
        """Removes the oldest checkpoint if all that is missing is space, and if it may."""
        if not self.kept.room or any(note.error not in _FULL for note in troubles):
            return False
        with contextlib.suppress(OSError):
            for name in self.kept.removable(self.store.complete(), 1)[:1]:
                self.store.remove(name)
                self.outcome.removed.append(name)
                return True
        return False

    def _why(self, troubles: list[_Note]) -> str:
        """Says in a sentence's words why nothing was saved."""
        worst = next((note for note in troubles if note.error not in _FULL), troubles[0])
        where = f" (rank {worst.rank})" if self.n_ranks > 1 else ""
        text = f"{self.draft.target}: {os.strerror(worst.error).lower()}{where}"
        if worst.error not in _FULL:
            return text
        if needed := sum(note.n_bytes for note in troubles):
            text += f"; {format_bytes(needed)} more are needed"
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.store.folder).free
            text += f"{',' if needed else ';'} {format_bytes(free)} are free"
        return text

    def _fails(self, why: str) -> None:
        self.outcome.failure = why
        self._close()

    def _close(self) -> None:
        self.outcome.seconds = time.monotonic() - self.began
        self.draft.close()
