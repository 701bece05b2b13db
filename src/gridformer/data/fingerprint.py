"""A fingerprint of a token folder, by which a run notices that its data has changed.

It does not depend on where the folder is. Numbers are compared exactly, tokenizers by their whole
content, and large files by their size and by blocks of them, so it takes a fraction of a second
for any folder. A change of a few tokens between two blocks is therefore not noticed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from gridformer.config import Config
from gridformer.data.tokenfolder import SPLITS, TOKENIZER, TokenFolder

_BLOCKS = 16  # of one file
_BLOCK_BYTES = 1 << 16


class Fingerprint(Config):
    """What tells the contents of token folders apart.

    Attributes:
        numbers: Sizes and the other entries of the index that matter for training, by name.
        hashes: For each file, a hash of its blocks.
    """

    numbers: dict[str, str | int]
    hashes: dict[str, str]

    def differences(self, there: Fingerprint) -> list[str]:
        """Returns what differs from the fingerprint in a checkpoint, as phrases."""
        found = [
            f"{name} is {self.numbers.get(name)}, there {there.numbers.get(name)}"
            for name in {**self.numbers, **there.numbers}
            if self.numbers.get(name) != there.numbers.get(name)
        ]
        files = [
            name
            for name in {**self.hashes, **there.hashes}
            if self.hashes.get(name) != there.hashes.get(name)
        ]
        if files:
            found.append(f"the contents of {', '.join(files)} changed")
        return found


def fingerprint(folder: TokenFolder) -> Fingerprint:
    """Returns the fingerprint of an open token folder."""
    index, names = folder.index, [TOKENIZER]
    numbers: dict[str, str | int] = {
        "kind": index.kind,
        "languages": ", ".join(index.languages or ()),
        "labels": ", ".join(index.labels),
        "vocabulary": index.vocab_size,
        "end of text": index.eos_id,
    }
    for split in SPLITS:
        entry = index.entry(split)
        numbers |= {f"tokens of {split}": entry.tokens, f"documents of {split}": entry.documents}
        names += index.files(split)
    return Fingerprint(numbers=numbers, hashes={n: _hash(folder.path / n) for n in names})


def _hash(path: Path) -> str:
    """Returns a hash of a small file, or of blocks of a large one from its start to its end."""
    found = hashlib.blake2b(digest_size=8)
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.name == TOKENIZER or size <= _BLOCKS * _BLOCK_BYTES:
            found.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()
