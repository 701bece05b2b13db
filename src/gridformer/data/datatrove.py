"""datatrove's files of tokens, read in place.

NAME.ds holds token ids of two or four bytes, unsigned and little-endian. NAME.ds.index holds the
end of each document in tokens, uint64. NAME.ds.metadata, for people, names the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridformer.data.tokensplit import DocumentStarts
from gridformer.utils.errors import DataError

SUFFIX = ".ds"
_END = np.dtype("<u8")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


@dataclass(frozen=True)
class EndsAsStarts(DocumentStarts):
    """The starts of documents, from their ends [n_documents]."""

    ends: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.ends) + 1

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """See DocumentStarts."""
        before = np.asarray(self.ends[np.maximum(numbers, 1) - 1]).astype(np.int64)
        return np.where(numbers > 0, before, 0)


def open_datatrove(path: Path) -> tuple[np.dtype[Any], EndsAsStarts]:
    """Returns the dtype of a .ds file and where its documents begin.

    Raises:
        DataError: The index is missing or empty, or the sizes of both files do not agree.
    """
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        raise DataError(f"{index}: is missing, and without it {path.name} cannot be read")
    size, index_bytes = path.stat().st_size, index.stat().st_size
    if not index_bytes or index_bytes % _END.itemsize:
        raise DataError(
            f"{index}: has {index_bytes} bytes, expected {_END.itemsize} for each document: it is "
            f"damaged"
        )
    ends: NDArray[np.uint64] = np.memmap(index, dtype=_END, mode="r")
    tokens = int(ends[-1])
    dtype = _DTYPES.get(size // tokens) if tokens and size % tokens == 0 else None
    if dtype is None:
        raise DataError(
            f"{path}: has {size} bytes, but {index.name} gives it {tokens} tokens of 2 or 4 bytes: "
            f"one of them is damaged"
        )
    return dtype, EndsAsStarts(ends)
