"""Splits documents into training and validation, and writes the files of both."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gridformer.config import Config
from gridformer.data.indexed import LONGEST_DOCUMENT, write_index
from gridformer.data.tokenfolder import SPLITS, Kind, SplitEntry, SplitName
from gridformer.data.tokensplit import LABEL_COLUMN, LABELS, Column
from gridformer.utils.errors import DataError

MOST_LABELS = 10_000
Ids = Sequence[int] | NDArray[Any]
_ONE = {"pairs": "pair", "labeled": "labeled document", "chat": "conversation"}
_LENGTH = np.dtype("<i8")


class Document(NamedTuple):  # which workers send faster than a dataclass
    """One document, or the next tokens of a long one."""

    ids: Ids  # without the end-of-text token, which is added
    # The values of columns by name: those of the document, and for columns of tokens one for each
    # of `ids`, or one more that belongs to the end-of-text token (otherwise 0).
    values: Mapping[str, object] | None = None
    label: str | None = None  # its name
    split: SplitName | None = None  # None lets a hash decide; all documents have one or none has
    n_bytes: int = 0  # of its text as UTF-8, for the summary
    ends: bool = True  # whether the document ends with these tokens


def split_of(seed: int, document: int, val_fraction: float) -> SplitName:
    """Returns the split of a document, a function of a hash of (seed, document number)."""
    digest = hashlib.blake2b(f"{seed}/{document}".encode(), digest_size=8, person=b"val split")
    return "val" if int.from_bytes(digest.digest(), "little") < val_fraction * 2.0**64 else "train"


class WriterState(Config):
    """What a `SplitWriter` has written, between two documents: the bytes of each file by name."""

    documents: int = 0
    labels: tuple[str, ...] = ()  # in order of appearance
    files: dict[SplitName, dict[str, int]] = Field(default_factory=dict)
    splits_given: bool = False


class SplitWriter:
    """Appends documents to train.bin or val.bin in a folder. Use it as a context manager.

    Pairs are appended as two documents each, which go to the same split. Call `finish` at the end.

    Args:
        eos_id, bos_id: The tokens with which every document ends and begins, if there are any.
        columns: The columns to write beside the tokens; labeled documents have labels as well.
        state: What `state` returned in a process that was stopped; None begins with empty files.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        eos_id: int | None,
        seed: int,
        val_fraction: float,
        kind: Kind = "text",
        columns: Mapping[str, Column] | None = None,
        bos_id: int | None = None,
        state: WriterState | None = None,
    ) -> None:
        state = state or WriterState()
        labels = {LABELS: LABEL_COLUMN} if kind == "labeled" else {}
        self.columns = {**(columns or {}), **labels}
        self._files = {
            split: _SplitFile(folder, split, dtype, self.columns, state.files.get(split, {}))
            for split in SPLITS
        }
        self._eos = [] if eos_id is None else [eos_id]
        self._bos = [] if bos_id is None else [bos_id]
        self._seed, self._val_fraction = seed, val_fraction
        self.kind: Kind = kind
        self._unit = 2 if kind == "pairs" else 1  # documents that must stay in one split
        self._open: _SplitFile | None = None
        self._labels = {name: place for place, name in enumerate(state.labels)}
        self.documents, self.splits_given = state.documents, state.splits_given

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for split in self._files.values():
            split.close()

    @property
    def tokens(self) -> int:
        """The tokens written so far, end-of-text tokens included."""
        return sum(file.tokens for file in self._files.values())

    @property
    def is_between(self) -> bool:
        """Whether the last document has ended."""
        return self._open is None

    @property
    def rewrites(self) -> bool:
        """Whether finishing changes what is written, instead of adding to it."""
        return bool(self._labels or self.empty_splits)

    @property
    def empty_splits(self) -> tuple[SplitName, ...]:
        """The splits without a document."""
        return tuple(split for split, file in self._files.items() if not file.tokens)

    def state(self) -> WriterState:
        """Returns what is written, after waiting until it is on disk."""
        assert self.is_between
        return WriterState(
            documents=self.documents,
            labels=tuple(self._labels),
            files={split: file.synced() for split, file in self._files.items()},
            splits_given=self.splits_given,
        )

    def append(self, document: Document) -> None:
        """Appends a document, or the next tokens of one. One without tokens is not written."""
        ids, ends = document.ids, document.ends
        begin: list[int] = []
        if len(ids) and self._open is None:
            self.splits_given = document.split is not None
            number = self.documents // self._unit
            split = document.split or split_of(self._seed, number, self._val_fraction)
            self._open, begin = self._files[split], self._bos
        if self._open is None:
            return
        values = dict(document.values or {})
        if ends and document.label is not None:
            number = self._labels.setdefault(document.label, len(self._labels))
            if number >= MOST_LABELS:
                raise DataError(
                    f"there are more than {MOST_LABELS:,} different labels, for instance "
                    f"'{document.label[:40]}': name the key of the label with --label-key"
                )
            values[LABELS] = number
        end = self._eos if ends else []
        tokens = np.concatenate([begin, ids, end]) if begin or end else ids
        self._open.write(tokens, self._rows(values, len(begin), len(ids), len(end), ends))
        if ends:
            self._open.end_document()
            self._open = None
            self.documents += 1

    def _rows(
        self, given: Mapping[str, object], n_begin: int, n_ids: int, n_end: int, ends: bool
    ) -> dict[str, NDArray[Any]]:
        """Returns the rows of all columns for some tokens and, if it ends, their document."""
        all_rows: dict[str, NDArray[Any]] = {}
        for name, column in self.columns.items():
            try:
                if column.per == "document":
                    if ends:
                        all_rows[name] = column.rows(given[name], 1)
                    continue
                rows = np.asarray(given[name])
                missing = n_end if rows.size == n_ids * column.width else 0
                rows = np.pad(rows.ravel(), (n_begin * column.width, missing * column.width))
                all_rows[name] = column.rows(rows, n_begin + n_ids + n_end)
            except (KeyError, ValueError) as error:
                why = "no values" if isinstance(error, KeyError) else error
                raise DataError(
                    f"column {name} of document {self.documents}: {why}, and each {column.per} "
                    f"has {column.width} of {column.dtype}"
                ) from None
        return all_rows

    def finish(self) -> tuple[dict[SplitName, SplitEntry], tuple[str, ...]]:
        """Closes the files, makes sure that neither split is empty, and sorts the labels.

        If all documents are in one split, the document whose length is nearest to what the other
        split should have moves there. A single document is divided: its end is for validation.

        Returns:
            The sizes of both splits, and the names of the labels, in the order of their numbers.
        """
        assert self.documents >= 1
        assert self.is_between
        train, val = self._files.values()
        for file in (train, val):
            file.close()
        if not val.tokens:
            self._fill(val, train, self._val_fraction)
        elif not train.tokens:
            self._fill(train, val, 1 - self._val_fraction)
        by_number = all(name.isdecimal() for name in self._labels)
        names = sorted(self._labels, key=(lambda n: (int(n), n)) if by_number else None)
        if names:
            ranks = np.argsort([self._labels[name] for name in names])
            for file in (train, val):
                path = file.column_path(LABELS)
                ranks[np.fromfile(path, LABEL_COLUMN.item)].astype(LABEL_COLUMN.item).tofile(path)
        entries = {split: file.entry() for split, file in self._files.items()}
        for file in (train, val):  # only now, because a preparation that goes on needs them
            file.lengths_path.unlink()
        return entries, tuple(names)

    def _fill(self, empty: _SplitFile, full: _SplitFile, share: float) -> None:
        """Moves a document, or a part of the only one, to an empty split, which gets a share."""
        lengths, n = np.array(full.lengths()), full.tokens
        if self.documents > self._unit:
            units = lengths.reshape(-1, self._unit).sum(axis=1)
            first = self._unit * int(np.abs(units - share * n).argmin())
            start, end = (int(lengths[:to].sum()) for to in (first, first + self._unit))
            full.move_tokens(empty, start, end)
            for (path, size), to in zip(full.per_document.items(), empty.per_document):
                _move_rows(path, to, first * size, (first + self._unit) * size)
            return
        if self.kind != "text" or n < 2:
            what = "token" if self.kind == "text" else _ONE[self.kind]
            raise DataError(
                f"there is only one {what}, but training and validation need one each: prepare "
                f"more text"
            )
        cut = n - min(max(1, round(self._val_fraction * n)), n - 1)
        full.move_tokens(empty, *((cut, n) if empty is self._files["val"] else (0, cut)))
        for path, to in zip(full.per_document, empty.per_document):
            shutil.copyfile(path, to)
        for file in (full, empty):
            file.lengths_path.write_bytes(np.array([file.tokens], _LENGTH).tobytes())


class _SplitFile:
    """The token file of a split, the lengths of its documents, and its columns."""

    def __init__(
        self,
        folder: Path,
        split: SplitName,
        dtype: np.dtype[Any],
        columns: Mapping[str, Column],
        sizes: Mapping[str, int],
    ) -> None:
        self.dtype, self.path = dtype, folder / f"{split}.bin"
        self.lengths_path = folder / f"{split}.lengths"  # only until both indexes are written
        # The bytes of each token, or of each document, in the files that have some.
        self.per_token, self.per_document = {self.path: dtype.itemsize}, {self.lengths_path: 8}
        for name, column in columns.items():
            rows = self.per_token if column.per == "token" else self.per_document
            rows[self.column_path(name)] = column.item_bytes
        self.tokens = sizes.get(self.path.name, 0) // dtype.itemsize
        self._begun = 0  # tokens of the document that has not ended
        self._files: dict[Path, IO[bytes]] = {}
        for path in (*self.per_token, *self.per_document):
            size = sizes.get(path.name, 0)
            self._files[path] = file = path.open("r+b" if size else "wb")
            file.truncate(size)  # what follows was written after the state
            file.seek(size)

    def column_path(self, name: str) -> Path:
        return self.path.with_suffix(f".{name}.bin")

    def synced(self) -> dict[str, int]:
        """Returns the bytes of each file by name, after waiting until they are on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {path.name: file.tell() for path, file in self._files.items()}

    def write(self, ids: Ids, rows: Mapping[str, NDArray[Any]]) -> None:
        """Appends tokens of the current document, and rows to columns."""
        self._files[self.path].write(np.asarray(ids, dtype=self.dtype).tobytes())
        for name, values in rows.items():
            self._files[self.column_path(name)].write(values.tobytes())
        self.tokens += len(ids)
        self._begun += len(ids)

    def end_document(self) -> None:
        """Ends the current document."""
        if self._begun > LONGEST_DOCUMENT:
            raise DataError(
                f"a document has {self._begun:,} tokens; at most {LONGEST_DOCUMENT:,} fit: divide "
                f"its file into several"
            )
        self._files[self.lengths_path].write(np.array([self._begun], dtype=_LENGTH).tobytes())
        self._begun = 0

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each document [n_documents], memory-mapped."""
        return np.memmap(self.lengths_path, dtype=_LENGTH, mode="r")

    def move_tokens(self, empty: _SplitFile, start: int, end: int) -> None:
        """Moves tokens [start, end) to an empty split, but leaves lengths alone."""
        for (path, size), to in zip(self.per_token.items(), empty.per_token):
            _move_rows(path, to, start * size, end * size)
        self.tokens -= end - start
        empty.tokens += end - start

    def entry(self) -> SplitEntry:
        """Writes the index, and returns the sizes of the split."""
        lengths, index = self.lengths(), self.path.with_suffix(".idx")
        write_index(index, self.dtype, lengths)
        return SplitEntry(
            tokens=self.tokens,
            documents=len(lengths),
            bin_bytes=self.path.stat().st_size,
            offsets_bytes=index.stat().st_size,
        )


def _move_rows(source: Path, target: Path, start: int, end: int) -> None:
    """Moves bytes [start, end) of a file to another file, which they replace."""
    data = np.memmap(source, np.uint8, "r+")
    data[start:end].tofile(target)
    kept = len(data) - (end - start)
    data[start:kept] = data[end:]
    data.flush()
    os.truncate(source, kept)
