"""The open token folders of a run, and fingerprints by which it notices that they have changed.

Of large files fingerprints compare blocks, which takes a fraction of a second for any folder. A
change of a few tokens between two blocks is therefore not noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from pydantic import Field

from gridformer.config import Config, DataConfig
from gridformer.config.data import ValidationConfig
from gridformer.data.foreign import open_tokens
from gridformer.data.tokenfolder import SPLITS, TOKENIZER, SplitName, TokenFolder
from gridformer.data.tokensplit import TokenSplit

_BLOCKS = 16  # of one file
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class RunData:
    """The sources and sets of a run by name. A folder that is named twice is opened once."""

    sources: dict[str, TokenFolder]  # the name is empty for data.path alone
    validation: dict[str, TokenSplit]
    test: dict[str, TokenSplit]
    folders: dict[str, TokenFolder]  # all of them by a phrase such as `data.sources.web`

    @property
    def first(self) -> TokenFolder:
        """The first source, whose tokenizer and labels are those of all."""
        return next(iter(self.sources.values()))

    @property
    def n_train_tokens(self) -> int:
        """The tokens of all sources."""
        return sum(folder.train.n_tokens for folder in self.sources.values())

    def folder_of(self, split: TokenSplit) -> TokenFolder:
        """Returns the folder that a split is of."""
        return next(one for one in self.folders.values() if split is one.train or split is one.val)

    @classmethod
    def open(cls, data: DataConfig) -> Self:
        """Opens all folders of a run."""
        opened: dict[Path, TokenFolder] = {}

        def folder_at(path: Path, val_fraction: float) -> TokenFolder:
            if path not in opened:
                opened[path] = open_tokens(path, data.tokenizer, val_fraction)
            return opened[path]

        sources = {one.name: folder_at(one.path, data.val_fraction) for one in data.train_sources}
        folders = {
            f"data.sources.{name}" if name else "data.path": folder
            for name, folder in sources.items()
        }

        def splits_of(section: str, sets: tuple[ValidationConfig, ...]) -> dict[str, TokenSplit]:
            splits = {}
            for one in sets:
                assert one.path is not None
                # Foreign files that are no source are wholly the split that the set names.
                folder = folder_at(one.path, float(one.split == "val"))
                splits[one.name] = folder.train if one.split == "train" else folder.val
                if all(folder is not other for other in folders.values()):
                    folders[f"{section}.{one.name}"] = folder
            return splits

        validation = splits_of("data.validation", data.validation_sets)
        return cls(sources, validation, splits_of("data.test", data.test_sets), folders)

    @classmethod
    def open_set(cls, data: DataConfig, one: ValidationConfig) -> Self:
        """Opens one validation or test set of a run, without the other folders.

        The folder of the set stands for the first source, whose tokenizer it has.
        """
        assert one.path is not None
        of_sources = {source.path: data.val_fraction for source in data.train_sources}
        val_fraction = of_sources.get(one.path, float(one.split == "val"))
        folder = open_tokens(one.path, data.tokenizer, val_fraction)
        split = folder.train if one.split == "train" else folder.val
        return cls({"": folder}, {one.name: split}, {}, {str(one.path): folder})

    @classmethod
    def of(cls, folder: TokenFolder) -> Self:
        """Returns one folder as the data of a run with data.path."""
        return cls({"": folder}, {"": folder.val}, {}, {"data.path": folder})


class Fingerprint(Config):
    """What tells the contents of token folders apart, wherever they are."""

    # Sizes and the other entries of the index that matter for training, by name.
    numbers: dict[str, str | int] = Field(default_factory=dict)
    hashes: dict[str, str] = Field(default_factory=dict)  # of the blocks of each file
    sources: dict[str, Fingerprint] = Field(default_factory=dict)  # of `data.sources`
    validation: dict[str, Fingerprint] = Field(default_factory=dict)  # of `data.validation`

    @property
    def vocabulary(self) -> int | None:
        """The tokens of the vocabulary, which all sources share; None if it is not known."""
        one = next(iter(self.sources.values()), self)
        number = one.numbers.get("vocabulary")
        return number if isinstance(number, int) else None

    @property
    def tokenizer(self) -> str | None:
        """The hash of the tokenizer, which all sources share; None if it is not known."""
        return next(iter(self.sources.values()), self).hashes.get(TOKENIZER)

    def differences(self, there: Fingerprint) -> list[str]:
        """Returns what differs from the fingerprint in a checkpoint, as phrases.

        A validation set that is only on one side is no difference: no step reads it.
        """

        def in_both(mine: dict[str, Fingerprint], theirs: dict[str, Fingerprint]) -> Iterator[str]:
            for name in mine:
                if name in theirs:
                    yield from (f"{name}: {said}" for said in mine[name].differences(theirs[name]))

        named = [*in_both(self.sources, there.sources)]
        if [*self.sources] != [*there.sources]:
            here, before = (" and ".join(one.sources) or "data.path" for one in (self, there))
            return [f"it is read from {here}, there from {before}", *named]
        named += [f"validation set {said}" for said in in_both(self.validation, there.validation)]
        named += [
            f"{name} is {self.numbers.get(name)}, there {there.numbers.get(name)}"
            for name in {**self.numbers, **there.numbers}
            if self.numbers.get(name) != there.numbers.get(name)
        ]
        names = {**self.hashes, **there.hashes}
        files = [name for name in names if self.hashes.get(name) != there.hashes.get(name)]
        return [*named, *([f"the contents of {', '.join(files)} changed"] if files else [])]


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
        return sources[""].model_copy(update={"validation": validation})
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
    digest, size = hashlib.blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        if path.name == TOKENIZER or size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
