"""One save: every rank writes its file, and the first rank publishes the checkpoint.

A `Save` may run in a thread while training goes on. It uses no process group: ranks leave notes in
the draft (gridformer.checkpoint.place), so no order of messages can be disturbed.

    done-3              rank 3 has written its file; the note says its bytes, checksum and blocks
    trouble-3-0-28-4096 rank 3 could not write 4096 bytes in attempt 0, because of error 28
    again-0             the first rank has made room, and who had trouble tries again

The first rank looks for the notes of all ranks. Other ranks only look for an answer to trouble.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gridformer.checkpoint.block import TensorBlock
from gridformer.checkpoint.going_on import CopyPatience, going_on, until
from gridformer.checkpoint.index import BlockIndex, joined_index, part_of
from gridformer.checkpoint.manifest import FileEntry, Manifest, manifest_bytes
from gridformer.checkpoint.outcome import Kept, SaveOutcome, file_of, name_of
from gridformer.checkpoint.place import CheckpointPlace, Draft
from gridformer.checkpoint.remote import Remote
from gridformer.checkpoint.safetensors_file import write_file
from gridformer.checkpoint.side_files import write_side_files
from gridformer.utils.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST_S = 3.0  # to wait for the notes of other ranks, once a rank is known to be gone


@dataclass(frozen=True)
class _Told:
    """What one rank has told: bytes and checksum of its file, its part of the index, or trouble."""

    rank: int
    n_bytes: int = 0
    crc32: int = 0
    part: bytes = b""
    error: int = 0

    def content(self) -> bytes:
        part = base64.b64encode(self.part).decode()
        return json.dumps([self.n_bytes, self.crc32, part]).encode()

    @staticmethod
    def of(rank: int, content: bytes) -> _Told:
        n_bytes, crc32, part = json.loads(content)
        return _Told(rank, n_bytes, crc32, base64.b64decode(part))


class Save:
    """One save, as one rank takes part in it.

    Args:
        place: Where the checkpoints of the run are.
        manifest: The manifest without files and index.
        rank: This rank.
        n_ranks: How many ranks there are.
        kept: Which checkpoints stay.
        copy_to: A URL to which the first rank copies the checkpoint; empty for none.
        patience_s: The first rank gives up when no rank has left a note for this many seconds, and
            for much longer than its own part of the save took.
        hopeless: Returns whether a rank has failed or was killed. Its note may never come, and the
            other ranks may be about to be ended, so notes are then waited for only briefly.
    """

    def __init__(
        self,
        place: CheckpointPlace,
        manifest: Manifest,
        rank: int,
        n_ranks: int,
        kept: Kept,
        patience_s: float = 600.0,
        copy_to: str = "",
        hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hopeless = hopeless
        self.place, self.manifest, self.kept = place, manifest, kept
        self.copy_to = copy_to
        self.rank, self.n_ranks, self.patience_s = rank, n_ranks, patience_s
        self.draft: Draft = place.draft(name_of(manifest.step))
        self.began = time.monotonic()
        self.outcome = SaveOutcome(self.draft.target, manifest.step)
        self.no_draft = False  # whether the first rank could not begin
        self._own_s = 0.0

    def begin(self) -> bool:
        """Creates the draft. The first rank calls it before any rank calls `run`.

        Returns:
            Whether it succeeded; otherwise `outcome` says why not.
        """
        while True:
            try:
                self.draft.begin()
                return True
            except OSError as error:
                if not self._makes_room([_Told(0, error=error.errno or errno.EIO)]):
                    self.outcome.full = error.errno in _FULL
                    self._fails(f"{self.draft.target}: {error.strerror or error}")
                    return False

    def run(self, blocks: Callable[[], Mapping[str, TensorBlock]]) -> None:
        """Writes this rank's file and, on the first rank, publishes the checkpoint.

        Args:
            blocks: Returns what this rank writes, once it can be read.
        """
        attempt = 0
        told = self._write(blocks())
        while True:
            if self.rank == 0:
                if self._ends(told, attempt):
                    return
            else:
                self._tell(told, attempt)
                if not told.error or not self._again(attempt):
                    return
            attempt += 1
            if told.error:
                told = self._write(blocks())

    def has_ended(self) -> bool:
        """Whether the first rank has published or abandoned the draft, as far as `run` is over."""
        return self.rank == 0 or self.no_draft or not _exists(self.draft)

    def wait_for_the_end(self) -> None:
        """Waits until the first rank has published or abandoned the draft, once `run` is over.

        A copy to `copy_to` may take very much longer than the save itself.
        """
        began = time.monotonic()
        # The first rank waits for notes for at most this long, and then ends the save or leaves a
        # mark.
        patience = CopyPatience(self.draft, self.patience_s, 3 * self.patience_s)
        until(lambda: self.has_ended() or self._is_lost(began, 2) or patience.is_over())

    def _is_lost(self, since: float, times: int = 1) -> bool:
        """Returns whether to give up on what has not come since then, because a rank is gone."""
        waited_s = time.monotonic() - since
        return waited_s > times * max(_LOST_S, 10 * self._own_s) and self.hopeless()

    # ------------------------------------------------------------------ each rank

    def _write(self, blocks: Mapping[str, TensorBlock]) -> _Told:
        began = time.monotonic()
        name = file_of(self.rank)
        part = part_of(name, blocks)
        if not blocks:
            return _Told(self.rank, part=part)
        try:
            with self.draft.writing(name) as file:
                n_bytes, crc32 = write_file(file, blocks)
            return _Told(self.rank, n_bytes, crc32, part)
        except OSError as error:
            return self._troubled(error, blocks)
        except Exception as error:  # the other ranks must be told, whatever it is
            traceback.print_exception(error)
            return self._troubled(OSError(errno.EIO, ""), blocks)
        finally:
            self._own_s = max(self._own_s, time.monotonic() - began)

    def _troubled(self, error: OSError, blocks: Mapping[str, TensorBlock] | None = None) -> _Told:
        with contextlib.suppress(OSError):  # to make room for the notes
            self.draft.drop(file_of(self.rank))
        tensors = [block.tensor for block in (blocks or {}).values()]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return _Told(self.rank, needed, error=error.errno or errno.EIO)

    def _tell(self, told: _Told, attempt: int) -> None:
        """Leaves a note, as soon as there is room for it."""
        began = time.monotonic()

        def tells() -> bool:
            nonlocal told
            try:
                if told.error:
                    note = f"trouble-{self.rank}-{attempt}-{told.error}-{told.n_bytes}"
                    self.draft.tell(note)
                else:
                    self.draft.tell(f"done-{self.rank}", told.content())
                return True
            except OSError as error:
                if not told.error:
                    told = self._troubled(error)
                return not _exists(self.draft) or self._is_lost(began)

        until(tells, self.patience_s)

    def _again(self, attempt: int) -> bool:
        """Waits for the first rank's answer to trouble, and returns whether to try again."""
        again, began = False, time.monotonic()

        def answered() -> bool:
            nonlocal again
            with contextlib.suppress(OSError):
                again = f"again-{attempt}" in self.draft.told()
            return again or not _exists(self.draft) or self._is_lost(began, 2)

        until(answered, 3 * self.patience_s)
        return again

    # ------------------------------------------------------------------ the first rank

    def _ends(self, own: _Told, attempt: int) -> bool:
        """Returns whether the save has ended, well or not; otherwise there is room again."""
        try:
            told = self._all(own, attempt)
            troubles = [one for one in told if one.error]
            if not troubles:
                self._publish(told)
                return True
        except _LostError as lost:
            self._fails(str(lost))
            return True
        except Exception as error:
            if not isinstance(error, OSError):
                traceback.print_exception(error)
                self._fails(f"{self.draft.target}: {type(error).__name__}: {error}")
                return True
            troubles = [_Told(0, error=error.errno or errno.EIO)]
        if self._makes_room(troubles):
            try:
                self.draft.tell(f"again-{attempt}")
                return False
            except OSError as error:
                troubles = [_Told(0, error=error.errno or errno.EIO)]
        self.outcome.full = all(one.error in _FULL for one in troubles)
        self._fails(self._why(troubles))
        return True

    def _all(self, own: _Told, attempt: int) -> list[_Told]:
        """Waits until all ranks have left their notes, and returns what the notes say."""
        found = {0: own}
        last_news = time.monotonic()

        def looked() -> bool:
            nonlocal last_news
            for note in self.draft.told():
                kind, *numbers = note.split("-")
                if kind == "done" and (rank := int(numbers[0])) not in found:
                    found[rank] = _Told.of(rank, self.draft.read(note))
                    last_news = time.monotonic()
                elif kind == "trouble" and int(numbers[1]) == attempt:
                    rank, _, error, needed = map(int, numbers)
                    if rank not in found:
                        last_news = time.monotonic()
                    found[rank] = _Told(rank, needed, error=error)
            if len(found) == self.n_ranks:
                return True
            if time.monotonic() - last_news > _LOST_S:
                with self.draft.writing("probe"):  # raises if no rank can leave even a note
                    pass
                self.draft.drop("probe")
            patience_s = max(self.patience_s, 10 * self._own_s)
            if time.monotonic() - last_news > patience_s or self._is_lost(last_news):
                missing = [rank for rank in range(self.n_ranks) if rank not in found]
                some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
                raise _LostError(
                    f"{self.draft.target}: {len(missing)} of {self.n_ranks} ranks have not written "
                    f"their files (ranks {some})"
                )
            return False

        until(looked)
        return [found[rank] for rank in range(self.n_ranks)]

    def _publish(self, told: list[_Told]) -> None:
        files = {
            file_of(one.rank): FileEntry(bytes=one.n_bytes, crc32=one.crc32)
            for one in told
            if one.n_bytes
        }
        index = _index_of([one.part for one in told])
        side = write_side_files(self.place.side_files(), self.draft.writing)
        update = {"files": files, "side_files": side, "index": index}
        manifest = self.manifest.model_copy(update=update)
        marked = going_on(self.draft, self.patience_s) if self.copy_to else contextlib.nullcontext()
        with marked:
            self.draft.publish(manifest_bytes(manifest))
            self.outcome.n_bytes = sum(entry.bytes for entry in (*files.values(), *side.values()))
            if self.copy_to:
                self._copy()
        self._ended()
        with contextlib.suppress(OSError):  # what is too many can be removed after the next save
            names = self.place.complete()
            for name in self.kept.removable(names, self.kept.newest):
                self.place.remove(name)

    def _copy(self) -> None:
        """Copies the complete checkpoint to `copy_to`, and removes copies that are not kept."""
        try:
            Remote(self.copy_to).upload_newest(Path(self.draft.target), self.kept)
        except Exception as error:  # each file system has errors of its own
            self.outcome.not_copied = f"{type(error).__name__}: {error}"

    def _makes_room(self, troubles: list[_Told]) -> bool:
        """Removes the oldest checkpoint if all that is missing is space, and if it may."""
        if not self.kept.room or any(one.error not in _FULL for one in troubles):
            return False
        with contextlib.suppress(OSError):
            for name in self.kept.removable(self.place.complete(), 1)[:1]:
                self.place.remove(name)
                self.outcome.removed.append(name)
                return True
        return False

    def _why(self, troubles: list[_Told]) -> str:
        """Says in a sentence's words why nothing was saved."""
        worst = next((one for one in troubles if one.error not in _FULL), troubles[0])
        where = f" (rank {worst.rank})" if self.n_ranks > 1 else ""
        text = f"{self.draft.target}: {os.strerror(worst.error).lower()}{where}"
        if worst.error not in _FULL:
            return text
        needed, free = sum(one.n_bytes for one in troubles), self.place.free_bytes()
        if needed:
            text += f"; {format_bytes(needed)} more are needed"
        if free is not None:
            text += f"{',' if needed else ';'} {format_bytes(free)} are free"
        return text

    def _fails(self, why: str) -> None:
        self.outcome.failure = why
        self._ended()
        with contextlib.suppress(OSError):
            self.draft.abandon()

    def _ended(self) -> None:
        self.outcome.seconds = time.monotonic() - self.began


class _LostError(Exception):
    """Ranks have not written their files."""


# The index that was made last, for the parts of all ranks. Saves of one run have the same.
_last: tuple[int, BlockIndex] | None = None


def _index_of(parts: list[bytes]) -> BlockIndex:
    global _last
    key = 0
    for part in parts:
        key = zlib.crc32(part, key) + (len(part) << 32)
    if _last is None or _last[0] != key:
        _last = key, joined_index(parts)
    return _last[1]


def _exists(draft: Draft) -> bool:
    try:
        return draft.exists()
    except OSError:
        return True  # nobody knows
