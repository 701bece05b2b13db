"""Writes a checkpoint that has weights and no state of an optimizer, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from gridformer.checkpoint.block import TensorBlock
from gridformer.checkpoint.convert.files import in_files
from gridformer.checkpoint.index import joined_index, part_of
from gridformer.checkpoint.manifest import FileEntry, Manifest, write_manifest
from gridformer.checkpoint.place import writing_in
from gridformer.checkpoint.safetensors_file import Streamed, offsets_info, write_streamed
from gridformer.checkpoint.side_files import read_side_files, write_side_files
from gridformer.config import RunConfig
from gridformer.utils.units import GIB

_FILE_BYTES = GIB  # of one file of a checkpoint, so that many processes can share its reading


def write_weights(
    folder: Path,
    streamed: Mapping[str, Streamed],
    run: RunConfig,
    step: int = 0,
    tokens: int = 0,
    tell: Callable[[str], None] = lambda doing: None,
) -> None:
    """Writes a checkpoint from which no run can resume, but which every layout can load.

    It gets copies of the side files of its run directory, which must be written before.

    Args:
        folder: The folder of the checkpoint in its run directory, which exists and is empty.
        streamed: Its tensors by their names in checkpoints.
        run: The config of the run.
        step: How many optimizer steps were done.
        tokens: How many tokens were read.
        tell: Receives progress messages.
    """
    files, parts = {}, []
    groups = in_files(streamed, _FILE_BYTES)
    for number, names in enumerate(groups, start=1):
        tell(f"writing file {number} of {len(groups)}")
        file = f"shard-{number:05d}.safetensors"
        blocks = {name: _whole(streamed[name]) for name in names}
        chosen = {name: streamed[name] for name in names}
        n_bytes, crc = write_streamed(folder / file, chosen, offsets_info(blocks))
        files[file] = FileEntry(bytes=n_bytes, crc32=crc)
        parts.append(part_of(file, blocks))
    side = write_side_files(read_side_files(folder.parents[1]), partial(writing_in, folder))
    write_manifest(
        folder,
        Manifest(
            format="gridformer-checkpoint",
            version=1,
            step=step,
            tokens=tokens,
            model=run.model,
            run=run.model_dump(mode="json"),
            files=files,
            side_files=side,
            index=joined_index(parts),
            weights_only=True,
        ),
    )


def _whole(tensor: Streamed) -> TensorBlock:
    """Returns a tensor as a block without memory, for the index."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return TensorBlock(empty, tensor.shape, (0,) * len(tensor.shape))
