"""A corpus of random tokens in Megatron-LM's files, which are read in place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gridformer.data.indexed import write_index
from gridformer.data.tokenizer import Tokenizer

_BLOCK = 1 << 24  # tokens that are written at a time
_MEAN_LENGTH = 1000  # tokens of a document
_DTYPE = np.dtype("<u2")


def write_corpus(folder: Path, tokens: int) -> dict[str, Path]:
    """Writes two sources with 7/10 and 3/10 of the tokens, and their tokenizer.

    Returns:
        The path of each source by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.train(["a few words of text"], 300)
    tokenizer.save(folder / "tokenizer.json")
    sizes = {"large": tokens * 7 // 10, "small": tokens * 3 // 10}
    for number, (name, size) in enumerate(sizes.items()):
        _write(folder / name, size, tokenizer, np.random.default_rng(number))
    return {name: folder / name for name in sizes}


def _write(prefix: Path, tokens: int, tokenizer: Tokenizer, draw: np.random.Generator) -> None:
    lengths = draw.integers(2, 2 * _MEAN_LENGTH, 1 + tokens // _MEAN_LENGTH, dtype=np.int32)
    total = int(lengths.sum())
    # Random numbers are slow to draw, so one block is repeated: reading takes no less for it.
    block = draw.integers(0, tokenizer.vocab_size, min(_BLOCK, total), dtype=_DTYPE)
    with prefix.with_suffix(".bin").open("wb") as file:
        for begin in range(0, total, len(block)):
            file.write(block[: total - begin].tobytes())
        os.fsync(file.fileno())
    write_index(prefix.with_suffix(".idx"), _DTYPE, lengths)


def forget(folder: Path) -> None:
    """Removes the files of a folder from the page cache, so that they are read from the disk."""
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
