"""The parameters in a checkpoint, whatever layout wrote it, one at a time as a whole tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint.block import TensorBlock
from gridformer.checkpoint.convert.files import row_slices
from gridformer.checkpoint.convert.folder import DTYPES
from gridformer.checkpoint.convert.forms import Shape
from gridformer.checkpoint.index import Stored, blocks_for, index_of_files
from gridformer.checkpoint.manifest import Manifest, advice_for_readers
from gridformer.checkpoint.safetensors_file import opened_file
from gridformer.utils.errors import CheckpointError


class StoredParameters:
    """The parameters of a checkpoint. It holds one of them at a time.

    Args:
        folder: The folder of the checkpoint.
        manifest: Its manifest.
        shapes: The shapes of all parameters by name.

    Raises:
        CheckpointError: One is missing, incomplete or of another shape.
    """

    def __init__(self, folder: Path, manifest: Manifest, shapes: dict[str, Shape]) -> None:
        self.folder, self.shapes = folder, shapes
        index = manifest.index or index_of_files(folder, manifest.files)
        wanted = {
            f"model.{name}": TensorBlock(
                torch.empty(shape, device="meta"), shape, (0,) * len(shape)
            )
            for name, shape in shapes.items()
        }
        self._blocks: dict[str, list[Stored]] = {name: [] for name in shapes}
        for blocks in blocks_for(index, wanted, folder).values():
            for block in blocks:
                self._blocks[block.name.removeprefix("model.")].append(block)
        foreign = {name for names in index.names for name in names if name.startswith("model.")}
        if unknown := sorted(name.removeprefix("model.") for name in foreign - set(wanted)):
            raise CheckpointError(
                f"{folder} contains parameters that its model does not have: {', '.join(unknown)}"
            )
        self._last: tuple[str, Tensor] | None = None
        self._reading = partial(advice_for_readers, folder, any_will_do=False)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type in which a parameter is stored."""
        block = self._blocks[name][0]
        with self._reading(), opened_file(self.folder / block.file) as file:
            return DTYPES[str(file.get_slice(block.name).get_dtype())]

    def whole(self, name: str) -> Tensor:
        """Returns a parameter, which stays in memory until the next one is asked for."""
        if self._last is None or self._last[0] != name:
            self._last = None
            with self._reading():
                self._last = name, self._read(name)
        return self._last[1]

    def close(self) -> None:
        """Frees the last parameter."""
        self._last = None

    def _read(self, name: str) -> Tensor:
        blocks = self._blocks[name]
        if len(blocks) == 1:
            with opened_file(self.folder / blocks[0].file) as file:
                view: Tensor = file.get_tensor(blocks[0].name)  # of the file: not read yet
                return view
        found = torch.empty(self.shapes[name], dtype=self.dtype(name))
        for block in blocks:
            into = found[tuple(slice(a, a + n) for a, n in zip(block.offset, block.size))]
            for rows in row_slices(block.size, found.dtype):
                # Opened anew, so that what was read is freed.
                with opened_file(self.folder / block.file) as file:
                    into[rows] = file.get_slice(block.name)[rows]
        return found
