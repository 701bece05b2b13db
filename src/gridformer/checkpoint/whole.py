"""Checkpoints as whole tensors, one at a time, whatever layout wrote them; their mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.blocks import (
    PARAMETER,
    StoredBlock,
    TensorBlock,
    blocks_for,
    joined_index,
    packed_part,
)
from gridformer.checkpoint.checkpoint import manifest_of
from gridformer.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    advice_for_readers,
    manifest_bytes,
    verify_checkpoint,
)
from gridformer.checkpoint.safetensors_file import (
    DTYPES,
    Streamed,
    offsets_info,
    opened_file,
    write_tensors,
)
from gridformer.checkpoint.side_files import (
    copy_files,
    root_of,
    write_side_files,
)
from gridformer.checkpoint.store import writing_in
from gridformer.config import ModelConfig, RunConfig
from gridformer.models import build_model
from gridformer.utils.errors import CheckpointError, ConfigError
from gridformer.utils.files import new_folder, refuse_existing
from gridformer.utils.units import GIB, MIB

_FILE_BYTES = GIB  # of one file of a checkpoint, so that many processes can share its reading
_READ_BYTES = 64 * MIB  # of a block that are in memory at a time


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}


class StoredParameters:
    """The parameters of a checkpoint, which must have all of its model. It holds one at a time."""

    def __init__(
        self, folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.folder, self.shapes = folder, shapes
        wanted = {f"{PARAMETER}{name}": _without_memory(shape) for name, shape in shapes.items()}
        self._blocks: dict[str, list[StoredBlock]] = {name: [] for name in shapes}
        for blocks in blocks_for(manifest.index, wanted, folder).values():
            for block in blocks:
                self._blocks[block.name.removeprefix(PARAMETER)].append(block)
        stored = {name for names in manifest.index.names for name in names}
        foreign = {name for name in stored - set(wanted) if name.startswith(PARAMETER)}
        if foreign:
            names = ", ".join(sorted(name.removeprefix(PARAMETER) for name in foreign))
            raise CheckpointError(
                f"{folder} contains parameters that its model does not have: {names}"
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

    def _read(self, name: str) -> Tensor:
        blocks = self._blocks[name]
        if len(blocks) == 1:
            with opened_file(self.folder / blocks[0].file) as file:
                view: Tensor = file.get_tensor(blocks[0].name)  # of the file: not read yet
                return view
        whole = torch.empty(self.shapes[name], dtype=self.dtype(name))
        for block in blocks:
            into = whole[tuple(slice(a, a + n) for a, n in zip(block.offset, block.size))]
            step = max(1, _READ_BYTES * len(into) // max(1, into.numel() * into.element_size()))
            for start in range(0, len(into), step):
                # Opened anew, so that what was read is freed.
                with opened_file(self.folder / block.file) as file:
                    rows = slice(start, start + step)
                    into[rows] = file.get_slice(block.name)[rows]
        return whole


def write_in_files(
    folder: Path,
    tensors: Mapping[str, Streamed],
    most: int,
    name_of: Callable[[int, int], str],
    metadata: Callable[[list[str]], dict[str, str]],
    tell: Callable[[str], None],
) -> dict[str, tuple[list[str], FileEntry]]:
    """Writes tensors, in their order, into files of at most `most` bytes each, or of one tensor.

    `name_of` returns the name of a file, given its number and how many there are, and `metadata`
    what its header says besides, given its tensors. The result has those tensors by file.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if groups[-1] and used + tensor.n_bytes > most:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += tensor.n_bytes
    written = {}
    for number, names in enumerate(groups, start=1):
        tell(f"writing file {number} of {len(groups)}")
        file = name_of(number, len(groups))
        with writing_in(folder, file) as opened:
            chosen = {name: tensors[name] for name in names}
            n_bytes, crc = write_tensors(opened, chosen, metadata(names))
        written[file] = names, FileEntry(bytes=n_bytes, crc32=crc)
    return written


def write_weights(
    folder: Path,
    streamed: Mapping[str, Streamed],
    run: RunConfig,
    step: int = 0,
    tokens: int = 0,
    tell: Callable[[str], None] = lambda doing: None,
) -> None:
    """Writes a checkpoint without the state of an optimizer to an empty folder of a run directory.

    No run can resume from it, but every layout can load it. It gets copies of the side files of its
    run directory, which must be written before.
    """
    streamed = {f"{PARAMETER}{name}": tensor for name, tensor in streamed.items()}

    def blocks(names: list[str]) -> dict[str, TensorBlock]:
        return {name: _without_memory(streamed[name].shape) for name in names}

    written = write_in_files(
        folder,
        streamed,
        _FILE_BYTES,
        lambda number, n: f"shard-{number:05d}.safetensors",
        lambda names: offsets_info(blocks(names)),
        tell,
    )
    parts = {file: packed_part(blocks(names)) for file, (names, _) in written.items()}
    update = {
        "files": {file: entry for file, (_, entry) in written.items()},
        "side_files": write_side_files(folder.parents[1], partial(writing_in, folder)),
        "index": joined_index(parts),
        "weights_only": True,
    }
    with writing_in(folder, MANIFEST) as opened:
        opened.write(manifest_bytes(manifest_of(step, tokens, run).model_copy(update=update)))


def _without_memory(shape: tuple[int, ...]) -> TensorBlock:
    """Returns a whole tensor as a block, for the index."""
    return TensorBlock(torch.empty(shape, device="meta"), shape, (0,) * len(shape))


def average_run(
    run_dir: Path,
    out: Path,
    last: int,
    tell: Callable[[str], None] = lambda doing: None,
    name: str = "",
) -> tuple[int, ...]:
    """Writes the mean of the last checkpoints of a run to a new run directory.

    Vaswani et al. (2017, section 6.1) translate with the mean of the last 5 checkpoints of a base
    model and of the last 20 of a big one. The mean is computed in float64, one parameter at a time,
    and stored in the type of the newest checkpoint.

    Args:
        last: How many checkpoints are averaged, at least 2.
        name: What errors call the run; empty means the run directory.

    Returns:
        The steps whose checkpoints were averaged, in their order.

    Raises:
        ConfigError: The run has fewer checkpoints.
        CheckpointError: A checkpoint is damaged or of another model.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    folders = find.complete(run_dir)
    if problem := _too_few(name or str(run_dir), last, len(folders)):
        raise ConfigError(problem)
    folders = folders[-last:]
    manifests = []
    for folder in folders:
        tell(f"verifying {folder.name}")
        with advice_for_readers(folder, any_will_do=False):
            manifests.append(verify_checkpoint(folder))
    newest = manifests[-1]
    for folder, manifest in zip(folders, manifests):
        if manifest.model != newest.model:
            raise CheckpointError(f"{folder} is of another model than {folders[-1]}: move it away")
    shapes = shapes_of(newest.model)
    stored = [StoredParameters(*one, shapes) for one in zip(folders, manifests)]
    streamed = {
        name: Streamed(shape, stored[-1].dtype(name), partial(_mean, stored, name))
        for name, shape in shapes.items()
    }
    run = RunConfig.model_validate(newest.run)
    with new_folder(out) as writing:
        step = writing / "checkpoints" / folders[-1].name
        step.mkdir(parents=True)
        (writing / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
        copy_files(root_of(folders[-1]), writing)
        write_weights(step, streamed, run, newest.step, newest.tokens, tell)
    return tuple(manifest.step for manifest in manifests)


def _too_few(run_dir: str, last: int, n: int) -> str:
    """Returns why that number of the last checkpoints cannot be averaged, or an empty text."""
    if last < 2:
        return f"--last {last} leaves nothing to average: use --last 2 or more"
    if n < 2:
        return (
            f"{run_dir} has {n or 'no'} checkpoint{'s' * (n != 1)}, and an average needs at least "
            "2: train with a smaller train.save_every"
        )
    if n < last:
        return (
            f"--last {last}: {run_dir} has {n} checkpoints: use --last {n}, or train with "
            f"train.keep_checkpoints={last}"
        )
    return ""


def _mean(stored: Sequence[StoredParameters], name: str) -> Tensor:
    total = stored[0].whole(name).to(torch.float64, copy=True)
    for one in stored[1:]:
        total += one.whole(name)
    return total.div_(len(stored))
