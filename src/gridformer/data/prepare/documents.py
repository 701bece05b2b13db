"""Writes a token folder from documents that are tokenized already, with their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gridformer.data.columns import Column
from gridformer.data.prepare.replacing import written_whole
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    Index,
    Kind,
    SourceEntry,
    SplitName,
    TokenFolder,
    TokenizerEntry,
    token_dtype,
)
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        ids: Its tokens, without the end-of-text token, which is added.
        values: The values of columns by name: those of the document, and for columns of tokens one
            for each of `ids`, or one more that belongs to the end-of-text token (otherwise 0).
        label: The name of its label, if it has one.
        split: Its split. None lets a hash decide; all documents of a folder have one or none has.
        n_bytes: The bytes of its text as UTF-8, for the summary.
    """

    ids: Sequence[int]
    values: Mapping[str, object] = field(default_factory=dict)
    label: str | None = None
    split: SplitName | None = None
    n_bytes: int = 0


def write_documents(
    documents: Iterable[Document],
    out: Path | str,
    *,
    tokenizer: Tokenizer,
    kind: Kind,
    name: str,
    license: str | None = None,
    columns: Mapping[str, Column] | None = None,
    skipped: Mapping[str, int] | None = None,
    seed: int = 1234,
    val_fraction: float = 0.02,
    overwrite: bool = False,
) -> TokenFolder:
    """Writes documents, in their order, to a token folder, and opens it.

    Args:
        documents: The documents. They may be read lazily; memory holds one at a time.
        out: The folder.
        tokenizer: The tokenizer of the documents' tokens.
        kind: The kind of the folder.
        name: What the documents were read from, for index.json.
        license: Its license, if known.
        columns: The columns. Folders whose documents have labels need the column
            `gridformer.data.columns.LABELS` too, unless their kind is labeled.
        skipped: Counts what was left out. It is read after the last document.
        seed: The seed that decides which documents are for validation, if they do not say.
        val_fraction: The fraction of the documents for validation, if they do not say.
        overwrite: Whether to replace a token folder at `out`.

    Raises:
        UserError: `out` cannot be used.
        DataError: There are no documents, or none of one of the splits that they name; or values
            do not fit their columns.
    """
    out = Path(out)
    dtype = token_dtype(tokenizer.vocab_size)
    given: set[SplitName | None] = set()
    n_bytes = 0
    with written_whole(out, overwrite) as folder:
        with SplitWriter(
            folder, dtype, tokenizer.eos_id, seed, val_fraction, kind, columns
        ) as writer:
            for one in documents:
                writer.append(one.ids, True, one.label, one.values, one.split)
                given.add(one.split)
                n_bytes += one.n_bytes
            if not writer.documents:
                raise DataError(f"{name}: there is nothing to prepare")
            if len(given) == 1 and None not in given:
                missing = "val" if "train" in given else "train"
                raise DataError(f"{name}: there are no documents for the split {missing}")
            splits = writer.finish()
            labels = writer.finish_labels()
        tokenizer.save(folder / TOKENIZER)
        index = Index(
            kind=kind,
            labels=labels,
            columns=writer.columns,
            dtype="uint16" if dtype.itemsize == 2 else "int32",
            vocab_size=tokenizer.vocab_size,
            eos_token=tokenizer.eos_token,
            eos_id=tokenizer.eos_id,
            seed=seed,
            val_fraction=val_fraction,
            train=splits["train"],
            val=splits["val"],
            tokenizer=TokenizerEntry(
                origin=tokenizer.origin, bytes=(folder / TOKENIZER).stat().st_size
            ),
            sources=(
                SourceEntry(
                    source=name, license=license, documents=writer.documents, bytes=n_bytes
                ),
            ),
            skipped=dict(skipped or {}),
        )
        # The index is written last, because a folder does not open without it.
        (folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        TokenFolder.open(folder)
    return TokenFolder.open(out)
