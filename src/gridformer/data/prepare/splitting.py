"""Splits documents into training and validation, and writes the token files of both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gridformer.config import Config
from gridformer.data.columns import LABEL_COLUMN, LABELS, Column
from gridformer.data.prepare.growing import Growing, move, move_documents
from gridformer.data.tokenfolder import SPLITS, Kind, SplitEntry, SplitName
from gridformer.utils.errors import DataError

MOST_LABELS = 10_000
Ids = Sequence[int] | NDArray[Any]
_ONE = {"pairs": "pair", "labeled": "labeled document", "chat": "conversation"}


def split_of(seed: int, document: int, val_fraction: float) -> SplitName:
    """Returns the split of a document, a function of a hash of (seed, document number).

    Args:
        seed: The seed of the preparation.
        document: The number of the document, or of the pair, in order of reading.
        val_fraction: The probability of `val`, from 0 to 1.
    """
    digest = hashlib.blake2b(f"{seed}/{document}".encode(), digest_size=8, person=b"val split")
    return "val" if int.from_bytes(digest.digest(), "little") < val_fraction * 2.0**64 else "train"


class WriterState(Config):
    """What a `SplitWriter` has written, between two documents.

    Attributes:
        documents: The number of documents.
        labels: The names of labels in order of appearance.
        files: The bytes of each file of each split by name.
    """

    documents: int
    labels: tuple[str, ...]
    files: dict[SplitName, dict[str, int]]


class SplitWriter:
    """Appends documents to train.bin or val.bin in a folder. Use it as a context manager.

    The two documents of a pair go to the same split. Call `finish`, then `finish_labels`, at the
    end.

    Args:
        folder: The folder.
        dtype: The dtype of the token files.
        eos_id: The id of the end-of-text token; None ends documents with their last own token.
        seed: The seed that decides the split of a document.
        val_fraction: The fraction of the documents for validation.
        kind: The kind of the documents.
        columns: The columns to write beside the tokens; labeled documents have labels as well.
        bos_id: The id of a token with which every document begins, if there is one.
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
        labels = {LABELS: LABEL_COLUMN} if kind == "labeled" else {}
        self.columns = {**(columns or {}), **labels}
        self._files = {
            split: Growing(folder, split, dtype, self.columns, state.files[split] if state else {})
            for split in SPLITS
        }
        self._eos = [] if eos_id is None else [eos_id]
        self._bos = [] if bos_id is None else [bos_id]
        self._seed = seed
        self._val_fraction = val_fraction
        self.kind: Kind = kind
        self.dtype = dtype
        self._open: Growing | None = None
        self._finished = False
        # In order of appearance.
        self._labels = {name: place for place, name in enumerate(state.labels if state else ())}
        self.documents = state.documents if state else 0
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
            if self._finished and error is None:
                file.tidy()

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
        )

    def append(
        self,
        ids: Ids,
        ends: bool,
        label: str | None = None,
        values: Mapping[str, object] | None = None,
        split: SplitName | None = None,
    ) -> bool:
        """Appends tokens to the current document. A document without tokens is not written.

        Args:
            ids: The tokens.
            ends: Whether they are the last of the document.
            label: The label of the document, if it ends.
            values: The values of columns by name: those of the document, if it ends, and those of
                the tokens. Of the last tokens there may be one value more, which belongs to the
                end-of-text token; otherwise that one gets 0.
            split: The split of the document, for data whose splits are given. Every document has
                one then, or none.

        Returns:
            Whether a document was completed.

        Raises:
            DataError: There are more than 10,000 different labels, or values are missing or do not
                fit their column.
        """
        given = dict(values or {})
        begin: list[int] = []
        if len(ids) and self._open is None:
            number = self.documents // self.unit
            self._open = self._files[split or split_of(self._seed, number, self._val_fraction)]
            begin = self._bos
        if self._open is None:
            return False
        if ends and label is not None:
            given[LABELS] = self._number_of(label)
        end = self._eos if ends else []
        tokens = np.concatenate([begin, ids, end]) if begin or end else ids
        rows = self._columns_of(given, len(begin), len(ids), len(end), ends)
        self._open.write(tokens, rows)
        if not ends:
            return False
        self._open.end_document()
        self._open = None
        self.documents += 1
        return True

    def _columns_of(
        self, given: Mapping[str, object], n_begin: int, n_ids: int, n_end: int, ends: bool
    ) -> dict[str, NDArray[Any]]:
        """Returns the rows of all columns for some tokens and, if it ends, their document."""
        found: dict[str, NDArray[Any]] = {}
        for name, column in self.columns.items():
            try:
                if column.per == "document":
                    if ends:
                        found[name] = column.rows(given[name], 1)
                    continue
                rows = np.asarray(given[name])
                missing = n_end if rows.size == n_ids * column.width else 0
                parts = [np.zeros(n * column.width, rows.dtype) for n in (n_begin, missing)]
                rows = np.concatenate([parts[0], rows.ravel(), parts[1]])
                found[name] = column.rows(rows, n_begin + n_ids + n_end)
            except (KeyError, ValueError) as error:
                why = "no values" if isinstance(error, KeyError) else error
                raise DataError(
                    f"column {name} of document {self.documents}: {why}, and each {column.per} "
                    f"has {column.width} of {column.dtype}"
                ) from None
        return found

    def append_pair(self, source: Ids, target: Ids) -> bool:
        """Appends both texts of a pair, or neither if one has no tokens; returns whether it did."""
        if not len(source) or not len(target):
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
            if self.kind != "text":
                what = _ONE[self.kind]
                raise DataError(
                    f"there is only one {what}, but training and validation need one each: "
                    f"prepare more text"
                )
            whole, other = (train, val) if train.tokens else (val, train)
            if whole.tokens < 2:
                raise DataError(
                    "there is only one token, but training and validation need one each: prepare "
                    "more text"
                )
            tail = min(max(1, round(self._val_fraction * whole.tokens)), whole.tokens - 1)
            # The end goes to val, whichever split the hash chose.
            if whole is train:
                move(train, val, train.tokens - tail, train.tokens)
            else:
                move(val, train, 0, val.tokens - tail)
            whole.copy_documents(other)
            for file in (whole, other):
                file.write_lengths([file.tokens])
        elif not val.tokens:
            move_documents(train, val, self._val_fraction, self.unit)
        elif not train.tokens:
            move_documents(val, train, 1 - self._val_fraction, self.unit)
        self._finished = True
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
                file.write_column(LABELS, place[file.column(LABELS)])
        return tuple(names)

    def _number_of(self, label: str) -> int:
        number = self._labels.setdefault(label, len(self._labels))
        if number >= MOST_LABELS:
            raise DataError(
                f"there are more than {MOST_LABELS:,} different labels, for instance "
                f"'{label[:40]}': name the key of the label with --label-key"
            )
        return number
