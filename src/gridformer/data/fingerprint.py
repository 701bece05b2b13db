"""Fingerprints of token folders, by which a run notices that its data has changed.

They do not depend on where the folders are. Numbers are compared exactly, tokenizers by their whole
content, and large files by their size and by blocks of them, so it takes a fraction of a second
for any folder. A change of a few tokens between two blocks is therefore not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pydantic import Field

from gridformer.config import Config
from gridformer.data.run_data import RunData
from gridformer.data.tokenfolder import SPLITS, TOKENIZER, SplitName, TokenFolder

_BLOCKS = 16  # of one file
_BLOCK_BYTES = 1 << 16


class Fingerprint(Config):
    """What tells the contents of token folders apart.

    Attributes:
        numbers: Sizes and the other entries of the index that matter for training, by name.
        hashes: For each file, a hash of its blocks.
        sources: The fingerprint of each source, for the data of a run with `data.sources`.
        validation: That of each set of `data.validation`.
    """

    numbers: dict[str, str | int] = Field(default_factory=dict)
    hashes: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, Fingerprint] = Field(default_factory=dict)
    validation: dict[str, Fingerprint] = Field(default_factory=dict)

    @property
    def vocabulary(self) -> int | None:
        """The tokens of the vocabulary, which all sources share; None if it is not known."""
        one = next(iter(self.sources.values()), self)
        found = one.numbers.get("vocabulary")
        return found if isinstance(found, int) else None

    @property
    def tokenizer(self) -> str | None:
        """The hash of the tokenizer, which all sources share; None if it is not known."""
        return next(iter(self.sources.values()), self).hashes.get(TOKENIZER)

    def differences(self, there: Fingerprint) -> list[str]:
        """Returns what differs from the fingerprint in a checkpoint, as phrases.

        A validation set that is only on one side is no difference: no step reads it.
        """
        named = [
            f"{name}: {difference}"
            for name in self.sources
            if name in there.sources
            for difference in self.sources[name].differences(there.sources[name])
        ]
        if [*self.sources] != [*there.sources]:
            here, before = (" and ".join(one.sources) or "data.path" for one in (self, there))
            return [f"it is read from {here}, there from {before}", *named]
        named += [
            f"validation set {name}: {difference}"
            for name in self.validation
            if name in there.validation
            for difference in self.validation[name].differences(there.validation[name])
        ]
        return named + self._own_differences(there)

    def _own_differences(self, there: Fingerprint) -> list[str]:
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


def fingerprint(data: RunData | TokenFolder) -> Fingerprint:
    """Returns the fingerprint of a run's open folders, or of one folder."""
    if isinstance(data, TokenFolder):
        return _of_folder(data, SPLITS)
    sources = {name: _of_folder(folder, SPLITS) for name, folder in data.sources.items()}
    validation = {
        name: _of_folder(data.folder_of(split), (cast(SplitName, split.name),))
        for name, split in data.validation.items()
        if name
    }
    if "" in sources:
        alone = sources[""]
        return Fingerprint(numbers=alone.numbers, hashes=alone.hashes, validation=validation)
    return Fingerprint(sources=sources, validation=validation)


def _of_folder(folder: TokenFolder, splits: Sequence[SplitName]) -> Fingerprint:
    index = folder.index
    numbers: dict[str, str | int] = {
        "kind": index.kind,
        "languages": ", ".join(index.languages or ()),
        "labels": ", ".join(index.labels),
        "vocabulary": index.vocab_size,
        "end of text": index.eos_id,
    }
    for split in splits:
        entry = index.entry(split)
        numbers |= {f"tokens of {split}": entry.tokens, f"documents of {split}": entry.documents}
    files = folder.files(splits)
    return Fingerprint(numbers=numbers, hashes={name: _hash(files[name]) for name in files})


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
