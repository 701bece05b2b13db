"""`gridformer export`: the last checkpoint of a run becomes a folder of Hugging Face."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.convert.config_json import head_problem, label_keys
from gridformer.checkpoint.convert.importing import (
    CONFIG,
    INDEX,
    WEIGHTS,
    DType,
    read_mapping,
    write_json,
)
from gridformer.checkpoint.convert.kinds import KINDS, kinds_of
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.checkpoint.convert.tokenizer_files import write_tokenizer
from gridformer.checkpoint.manifest import (
    KEPT,
    advice_for_readers,
    read_manifest,
    verify_checkpoint,
)
from gridformer.checkpoint.safetensors_file import Streamed, write_tensors
from gridformer.checkpoint.side_files import load_tokenizer, root_of
from gridformer.checkpoint.store import writing_in
from gridformer.checkpoint.whole import StoredParameters, in_files, shapes_of
from gridformer.config import ModelConfig, RunConfig, Task, any_of
from gridformer.data.side_texts import read_label_names
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.utils.errors import ConfigError
from gridformer.utils.folders import new_folder, refuse_existing
from gridformer.utils.units import GIB


@dataclass(frozen=True)
class Exported:
    """What an export has written; `architecture` is the class of transformers that opens it."""

    model_type: str
    architecture: str
    n_parameters: int
    n_files: int
    step: int


def export_run(
    run_dir: Path,
    out: Path,
    dtype: DType = "keep",
    shard_gib: float = 5.0,
    tell: Callable[[str], None] = lambda doing: None,
) -> Exported:
    """Converts a checkpoint to a folder that `from_pretrained` opens.

    Args:
        run_dir: A run directory, whose last checkpoint is taken, or one of its checkpoints.
        out: The folder, which must not exist.
        dtype: The type of the tensors; keep means that in which each is stored.
        shard_gib: The largest size of a file in GiB. A larger tensor has a file of its own.
        tell: Receives progress messages.

    Raises:
        ConfigError: The model has no counterpart. It lists all problems at once.
        CheckpointError: There is no checkpoint, or it is damaged.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    if shard_gib <= 0:
        raise ConfigError(f"--shard-gib {shard_gib:g} is not above 0: use 5, for example")
    folder = find.newest(run_dir)
    with advice_for_readers(folder):
        manifest = read_manifest(folder)
    root, model = root_of(folder), manifest.model
    if (root / TOKENIZER).is_file() and not (root / KEPT / CONFIG).is_file():
        load_tokenizer(folder, manifest)  # which refuses that of another model
    run = RunConfig.model_validate(manifest.run)
    kind, config = _kind_of(model, run.task, root / KEPT)
    tell("verifying the checkpoint")
    with advice_for_readers(folder):
        verify_checkpoint(folder)
    shapes = shapes_of(model)
    stored = StoredParameters(folder, manifest, shapes)
    streamed: dict[str, Streamed] = {}
    for entry in kind.entries(model):
        for part, name in enumerate(entry.theirs):
            streamed[kind.renamed(model, name)] = _streamed(entry, part, stored, dtype)
    with new_folder(out) as writing:
        n_files = write_weight_files(streamed, writing, int(shard_gib * GIB), tell)
        stored.close()
        imported = manifest.weights_only and not manifest.step
        tokens = write_tokenizer(writing, root, run, imported)
        types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in streamed.values())
        if "id2label" in config and (names := read_label_names(root)):
            config |= label_keys(model.n_labels, names)
        values = {"model_type": kind.model_type, **tokens, **config}
        values["torch_dtype"] = types.most_common(1)[0][0]
        write_json(writing / CONFIG, values)
    n_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    architecture = config["architectures"][0]
    return Exported(kind.model_type, architecture, n_parameters, n_files, manifest.step)


def _kind_of(model: ModelConfig, task: Task, kept: Path) -> tuple[Kind, dict[str, Any]]:
    """Returns the kind that represents a model (that of its import if several do), and its keys."""
    kinds = kinds_of(model)
    if not kinds:
        families = any_of(dict.fromkeys(kind.family for kind in KINDS.values()))
        raise ConfigError(
            f"model.family={model.family} has no counterpart in transformers: only {families} do"
        )
    if problem := head_problem(model, task):
        raise ConfigError(f"model.{problem}")
    if (kept / CONFIG).is_file():
        before = read_mapping(kept / CONFIG).get("model_type")
        kinds.sort(key=lambda kind: kind.model_type != before)
    problems: list[str] = []
    for kind in kinds:
        config = kind.write_config(model, task)
        if isinstance(config, dict):
            return kind, config
        problems += config
    raise ConfigError(*(f"model.{problem}" for problem in dict.fromkeys(problems)))


def _streamed(entry: TableEntry, part: int, stored: StoredParameters, dtype: DType) -> Streamed:
    """Returns one of their tensors."""

    def make() -> Tensor:
        return entry.form.theirs(stored.whole(entry.ours))[part]

    shape = entry.form.shape_of_theirs(stored.shapes[entry.ours])
    return Streamed(
        shape, stored.dtype(entry.ours) if dtype == "keep" else getattr(torch, dtype), make
    )


def write_weight_files(
    streamed: dict[str, Streamed],
    folder: Path,
    most: int,
    tell: Callable[[str], None] = lambda doing: None,
) -> int:
    """Writes tensors as transformers does, with an index if there are several files.

    Returns:
        The number of files, each of which has at most `most` bytes or one tensor.
    """
    groups = in_files(streamed, most)
    n = len(groups)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        tell(f"writing file {number} of {n}")
        file = WEIGHTS if n == 1 else f"model-{number:05d}-of-{n:05d}.safetensors"
        with writing_in(folder, file) as opened:
            write_tensors(opened, {name: streamed[name] for name in names}, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if n > 1:
        size = sum(tensor.n_bytes for tensor in streamed.values())
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return n
