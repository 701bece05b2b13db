"""The open token folders of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gridformer.config import DataConfig
from gridformer.config.mixture import ValidationConfig
from gridformer.data.opening import open_tokens
from gridformer.data.tokenfolder import TokenFolder, TokenSplit


@dataclass(frozen=True)
class RunData:
    """The sources and validation sets of a run. A folder that is named twice is opened once.

    Attributes:
        sources: The folder of each source by its name, which is empty for data.path alone.
        validation: The split of each validation set by its name.
        test: The split of each test set by its name.
        folders: All folders by a phrase such as `data.sources.web`.
    """

    sources: dict[str, TokenFolder]
    validation: dict[str, TokenSplit]
    test: dict[str, TokenSplit]
    folders: dict[str, TokenFolder]

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
        """Opens all folders of a run.

        Raises:
            DataError: A folder is missing or damaged; see `open_tokens`.
        """
        opened: dict[Path, TokenFolder] = {}

        def folder_at(path: Path, val_fraction: float) -> TokenFolder:
            if path not in opened:
                opened[path] = open_tokens(path, data.tokenizer, val_fraction)
            return opened[path]

        sources = {one.name: folder_at(one.path, data.val_fraction) for one in data.train_sources}
        found = {
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
                if all(folder is not other for other in found.values()):
                    found[f"{section}.{one.name}"] = folder
            return splits

        validation = splits_of("data.validation", data.validation_sets)
        return cls(sources, validation, splits_of("data.test", data.test_sets), found)

    @classmethod
    def open_set(cls, data: DataConfig, one: ValidationConfig) -> Self:
        """Opens one validation or test set of a run, without the other folders.

        The folder of the set stands for the first source, whose tokenizer it has.

        Raises:
            DataError: The folder is missing or damaged; see `open_tokens`.
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
