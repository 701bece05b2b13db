"""Which documents are held out, and the two token files while they are being written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gridformer.data.tokenfolder import (
    LABEL_DTYPE,
    OFFSET_DTYPE,
    SPLITS,
    Kind,
    SplitEntry,
    SplitName,
    bin_name,
    labels_name,
    offsets_name,
)
from gridformer.utils.errors import DataError

_COPY_TOKENS = 1 << 22  # moved at a time when documents change places
MOST_LABELS = 10_000


def split_of(seed: int, document: int, val_fraction: float) -> SplitName:
    """The split of a document: a hash of (seed, document number), so that nothing is remembered."""
    digest = hashlib.blake2b(f"{seed}/{document}".encode(), digest_size=8, person=b"val split")
    return "val" if int.from_bytes(digest.digest(), "little") < val_fraction * 2.0**64 else "train"


class SplitWriter:
    """Appends documents to train.bin or val.bin in a folder; `finish` fills an empty split.

    The two documents of a pair go to the same split. `unit` documents change places together.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        eos_id: int,
        seed: int,
        val_fraction: float,
        kind: Kind = "text",
    ) -> None:
        labeled = kind == "labeled"
        self._files = {split: _Growing(folder, split, dtype, labeled) for split in SPLITS}
        self._eos_id = eos_id
        self._seed = seed
        self._val_fraction = val_fraction
        self._kind = kind
        self._open: _Growing | None = None
        self._labels: dict[str, int] = {}  # in the order in which they came
        self.documents = 0
        self.unit = 2 if kind == "pairs" else 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    @property
    def tokens(self) -> int:
        """Written so far, end-of-text tokens included."""
        return sum(file.tokens for file in self._files.values())

    def append(self, ids: Sequence[int], ends: bool, label: str | None = None) -> bool:
        """Continue the current document; whether that ended one. Without a token it is none.

        label: of the document, when it ends. Raises DataError at more than 10,000 of them.
        """
        if ids:
            if self._open is None:
                number = self.documents // self.unit
                split = split_of(self._seed, number, self._val_fraction)
                self._open = self._files[split]
            self._open.write(ids)
        if not ends or self._open is None:
            return False
        self._open.write([self._eos_id])
        self._open.end_document()
        if label is not None:
            self._open.write_label(self._number_of(label))
        self._open = None
        self.documents += 1
        return True

    def append_pair(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Append both texts of a pair, or neither where one is without a token."""
        if not source or not target:
            return False
        return self.append(source, True) and self.append(target, True)

    def finish(self) -> dict[SplitName, SplitEntry]:
        """Close the files, with at least one document, or a part of the only one, in each split.

        Needs a document. Where the hashes put all of several documents on one side, the one whose
        share of the tokens is nearest to what the other side should have moves there. Raises
        DataError for a single pair or labeled document, which cannot be cut.
        """
        assert self.documents >= 1
        assert self._open is None
        for file in self._files.values():
            file.close()
        train, val = self._files["train"], self._files["val"]
        if self.documents == self.unit:
            if self._kind != "text":
                what = {"pairs": "pair", "labeled": "labeled document"}[self._kind]
                raise DataError(
                    f"there is a single {what}: one to train on and one to hold out are needed, "
                    f"prepare more text"
                )
            whole, other = (train, val) if train.tokens else (val, train)
            tail = min(max(1, round(self._val_fraction * whole.tokens)), whole.tokens - 1)
            # The end goes to val, wherever the hash had put the whole.
            if whole is train:
                _move(train, val, train.tokens - tail, train.tokens)
            else:
                _move(val, train, 0, val.tokens - tail)
            for file in (whole, other):
                file.write_offsets(np.array([0, file.tokens]))
        elif not val.tokens:
            _move_unit(train, val, self._val_fraction, self.unit)
        elif not train.tokens:
            _move_unit(val, train, 1 - self._val_fraction, self.unit)
        return {split: file.entry() for split, file in self._files.items()}

    def finish_labels(self) -> tuple[str, ...]:
        """Names of labels, sorted, as numbers if all are; call after `finish`. Files follow."""
        by_number = all(name.isdecimal() for name in self._labels)
        names = sorted(self._labels, key=(lambda n: (int(n), n)) if by_number else None)
        if names:
            place = np.empty(len(names), dtype=np.int64)
            place[[self._labels[name] for name in names]] = np.arange(len(names))
            for file in self._files.values():
                file.write_labels(place[file.labels()])
        return tuple(names)

    def _number_of(self, label: str) -> int:
        number = self._labels.setdefault(label, len(self._labels))
        if number >= MOST_LABELS:
            raise DataError(
                f"there are more than {MOST_LABELS:,} different labels, for instance "
                f"'{label[:40]}': name the key of a label with --label-key"
            )
        return number


class _Growing:
    """A .bin file, its offsets and, if it is labeled, labels."""

    def __init__(self, folder: Path, split: SplitName, dtype: np.dtype[Any], labeled: bool) -> None:
        self.dtype = dtype
        self.path = folder / bin_name(split)
        self.offsets_path = folder / offsets_name(split)
        self.tokens = 0
        self._bin = self.path.open("wb")
        self._offsets = self.offsets_path.open("wb")
        self.labels_path = folder / labels_name(split) if labeled else None
        self._labels = self.labels_path.open("wb") if self.labels_path else None
        self.end_document()  # the first offset: 0

    def write(self, ids: Sequence[int]) -> None:
        self._bin.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)

    def end_document(self) -> None:
        self._offsets.write(np.array([self.tokens], dtype=OFFSET_DTYPE).tobytes())

    def write_label(self, label: int) -> None:
        assert self._labels is not None
        self._labels.write(np.array([label], dtype=LABEL_DTYPE).tobytes())

    def close(self) -> None:
        self._bin.close()
        self._offsets.close()
        if self._labels is not None:
            self._labels.close()

    def offsets(self) -> NDArray[np.int64]:
        return np.fromfile(self.offsets_path, dtype=OFFSET_DTYPE)

    def write_offsets(self, offsets: NDArray[np.int64]) -> None:
        self.offsets_path.write_bytes(offsets.astype(OFFSET_DTYPE).tobytes())

    def labels(self) -> NDArray[np.int32]:
        assert self.labels_path is not None
        return np.fromfile(self.labels_path, dtype=LABEL_DTYPE)

    def write_labels(self, labels: NDArray[Any]) -> None:
        assert self.labels_path is not None
        self.labels_path.write_bytes(labels.astype(LABEL_DTYPE).tobytes())

    def entry(self) -> SplitEntry:
        offsets_bytes = self.offsets_path.stat().st_size
        return SplitEntry(
            tokens=self.tokens,
            documents=offsets_bytes // OFFSET_DTYPE.itemsize - 1,
            bin_bytes=self.path.stat().st_size,
            offsets_bytes=offsets_bytes,
        )


def _move_unit(source: _Growing, target: _Growing, share: float, unit: int) -> None:
    """Move the `unit` documents whose length is nearest to `share` of all to the empty target."""
    offsets = source.offsets()
    lengths = np.diff(offsets)
    chosen = unit * int(np.abs(np.diff(offsets[::unit]) - share * source.tokens).argmin())
    moved = np.arange(chosen, chosen + unit)
    start, end = int(offsets[chosen]), int(offsets[chosen + unit])
    _move(source, target, start, end)
    source.write_offsets(np.concatenate(([0], np.delete(lengths, moved).cumsum())))
    target.write_offsets(np.concatenate(([0], lengths[moved].cumsum())))
    if source.labels_path is not None:
        labels = source.labels()
        source.write_labels(np.delete(labels, moved))
        target.write_labels(labels[moved])


def _move(source: _Growing, target: _Growing, start: int, end: int) -> None:
    """Move tokens [start, end) to the empty target and close the gap; offsets stay as they are."""
    size = source.dtype.itemsize
    with source.path.open("r+b") as from_file, target.path.open("wb") as to_file:
        for at in range(start, end, _COPY_TOKENS):
            from_file.seek(at * size)
            to_file.write(from_file.read(min(_COPY_TOKENS, end - at) * size))
        for at in range(end, source.tokens, _COPY_TOKENS):
            from_file.seek(at * size)
            block = from_file.read(_COPY_TOKENS * size)
            from_file.seek((at - (end - start)) * size)
            from_file.write(block)
        from_file.truncate((source.tokens - (end - start)) * size)
    source.tokens -= end - start
    target.tokens += end - start
