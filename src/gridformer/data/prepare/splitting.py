"""Splits documents into training and validation, and writes the token files of both."""

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

_COPY_TOKENS = 1 << 22  # tokens to copy at a time when documents move to the other split
MOST_LABELS = 10_000


def split_of(seed: int, document: int, val_fraction: float) -> SplitName:
    """Returns the split of a document, a function of a hash of (seed, document number)."""
    digest = hashlib.blake2b(f"{seed}/{document}".encode(), digest_size=8, person=b"val split")
    return "val" if int.from_bytes(digest.digest(), "little") < val_fraction * 2.0**64 else "train"


class SplitWriter:
    """Appends documents to train.bin or val.bin in a folder. Use it as a context manager.

    The two documents of a pair go to the same split. Call `finish`, then `finish_labels`, at the
    end.

    Args:
        folder: The folder.
        dtype: The dtype of the token files.
        eos_id: The id of the end-of-text token.
        seed: The seed that decides the split of a document.
        val_fraction: The fraction of the documents for validation.
        kind: The kind of the documents.
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
        self._labels: dict[str, int] = {}  # in order of appearance
        self.documents = 0
        self.unit = 2 if kind == "pairs" else 1  # documents that must stay in one split

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
        """The tokens written so far, end-of-text tokens included."""
        return sum(file.tokens for file in self._files.values())

    def append(self, ids: Sequence[int], ends: bool, label: str | None = None) -> bool:
        """Appends tokens to the current document. A document without tokens is not written.

        Args:
            ids: The tokens.
            ends: Whether they are the last of the document.
            label: The label of the document, if it ends.

        Returns:
            Whether a document was completed.

        Raises:
            DataError: There are more than 10,000 different labels.
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
        """Appends both texts of a pair, or neither if one has no tokens; returns whether it did."""
        if not source or not target:
            return False
        return self.append(source, True) and self.append(target, True)

    def finish(self) -> dict[SplitName, SplitEntry]:
        """Closes the files and makes sure that neither split is empty.

        If all documents are in one split, the document whose length is nearest to what the other
        split should have moves there. A single document is divided. At least one document must have
        been appended.

        Returns:
            The sizes of both splits.

        Raises:
            DataError: There is only one pair or labeled document, which cannot be divided.
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
                    f"there is only one {what}, but training and validation need one each: "
                    f"prepare more text"
                )
            whole, other = (train, val) if train.tokens else (val, train)
            tail = min(max(1, round(self._val_fraction * whole.tokens)), whole.tokens - 1)
            # The end goes to val, whichever split the hash chose.
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
        """Renumbers the labels in sorted order, also in the files. Call it after `finish`.

        Returns:
            The sorted names of the labels; they are sorted as numbers if all of them are numbers.
        """
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
                f"'{label[:40]}': name the key of the label with --label-key"
            )
        return number


class _Growing:
    """The .bin file of a split while it is written, with its offsets and, if any, its labels."""

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
    """Moves the `unit` documents whose length is nearest to `share` of all to an empty target."""
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
    """Moves tokens [start, end) to an empty target and closes the gap, but leaves offsets alone."""
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
