"""Columns of a token folder: values of every document, or of every token, beside the tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gridformer.config import Config

ColumnDtype = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float32"]
LABELS = "labels"


class Column(Config):
    """What one column of a token folder holds.

    The columns that a token folder has are the same in both splits, and index.json describes them.
    """

    per: Literal["document", "token"] = "document"
    dtype: ColumnDtype
    width: int = Field(default=1, ge=1, description="values of each document or token")

    @property
    def item(self) -> np.dtype[Any]:
        """The dtype of one value in the file, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def item_bytes(self) -> int:
        """The bytes of all values of one document or token."""
        return self.item.itemsize * self.width

    def rows(self, values: object, number: int) -> NDArray[Any]:
        """Returns values as an array [number, width] of the column's dtype.

        Raises:
            ValueError: There are more or fewer values, or they do not fit the dtype.
        """
        given = np.asarray(values)
        if given.size != number * self.width:
            raise ValueError(f"{given.size} values, but {number} times {self.width} are needed")
        rows = given.reshape(number, self.width).astype(self.item)
        if self.dtype != "float32" and not np.array_equal(rows, given.reshape(rows.shape)):
            raise ValueError(f"values {given.min()} to {given.max()} do not fit {self.dtype}")
        return rows


LABEL_COLUMN = Column(dtype="int32")
