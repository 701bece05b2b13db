"""`gridformer import`: a folder of Hugging Face becomes a run directory with one checkpoint.

Each tensor is read from a mapped file, some rows at a time, and the rows are written at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from gridformer.checkpoint.convert.config_keys import ConfigKeys
from gridformer.checkpoint.convert.files import row_slices
from gridformer.checkpoint.convert.folder import (
    CONFIG,
    There,
    check_folder,
    matches,
    opened_tensors,
    parameter_dtype,
    read_mapping,
    tensors_in,
)
from gridformer.checkpoint.convert.forms import Shape
from gridformer.checkpoint.convert.heads import config_label_names, task_of, token_tasks
from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.convert.table import Kind, TableEntry
from gridformer.checkpoint.convert.weights_only import write_weights
from gridformer.checkpoint.manifest import KEPT
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.checkpoint.shapes import shapes_of
from gridformer.checkpoint.side_files import KEPT_FILES
from gridformer.config import DataConfig, ModelConfig, RunConfig, Task, any_of
from gridformer.config.base import file_name
from gridformer.data.side_texts import write_label_names
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.data.tokenizer import SETTINGS
from gridformer.utils.errors import CheckpointError, ConfigError
from gridformer.utils.folders import new_folder, refuse_existing

_TOKEN_HEADS = ("lm_head.", "cls.predictions.")  # what names of tensors of such heads begin with
DType = Literal["keep", "float32", "bfloat16"]


@dataclass(frozen=True)
class Imported:
    """What an import has written.

    Attributes:
        run: The run whose checkpoint it is.
        model_type: The kind of model.
        n_parameters: How many elements its parameters have.
        has_tokenizer: Whether the folder had a tokenizer.json.
    """

    run: RunConfig
    model_type: str
    n_parameters: int
    has_tokenizer: bool


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder of Hugging Face whose tensors fit a model of ours.

    Attributes:
        folder: The folder.
        kind: The kind of its model.
        model: The config of our model.
        task: The task that it has learned, or `auto`.
        entries: The table.
        shapes: The shapes of our parameters.
        tensors: Their tensors by the names of the table.
    """

    folder: Path
    kind: Kind
    model: ModelConfig
    task: Task
    entries: list[TableEntry]
    shapes: Mapping[str, Shape]
    tensors: Mapping[str, There]


def import_folder(
    folder: Path,
    out: Path,
    dtype: DType = "keep",
    tell: Callable[[str], None] = lambda doing: None,
    task: str = "",
) -> Imported:
    """Converts a folder of Hugging Face to a run directory.

    Args:
        folder: A folder with config.json, safetensors files and a tokenizer.
        out: The run directory, which must not exist.
        dtype: The type of the stored tensors; keep means that of each tensor.
        tell: Receives progress messages.
        task: The task that a model with a head of tokens has learned; empty means what the folder
            says.

    Raises:
        ConfigError: The model cannot be represented, or cannot have learned such a
            task. It lists all problems at once.
        CheckpointError: Files or tensors are missing or damaged, or do not fit the model.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    source = open_source(folder)
    if task:
        source = replace(source, task=_asked(source, task))
    run = RunConfig(
        name=file_name(out.resolve().name, "imported"),
        model=source.model,
        data=DataConfig(path=Path("data"), task=source.task),
    )
    with new_folder(out) as writing:
        step = writing / "checkpoints" / "step-00000000"
        step.mkdir(parents=True)
        (writing / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
        if source.task == "classify" and (
            names := config_label_names(read_mapping(folder / CONFIG))
        ):
            write_label_names(writing, names)
        (writing / KEPT).mkdir()
        for name in KEPT_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, writing / KEPT / name)
        has_tokenizer = (folder / TOKENIZER).is_file()
        if has_tokenizer:
            shutil.copyfile(folder / TOKENIZER, writing / TOKENIZER)
            if (folder / SETTINGS).is_file():  # which says what token ends documents
                shutil.copyfile(folder / SETTINGS, writing / SETTINGS)
        _write(source, step, run, dtype, tell)
    n_parameters = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    return Imported(run, source.kind.model_type, n_parameters, has_tokenizer)


def open_source(folder: Path) -> HuggingFaceFolder:
    """Reads config.json and the headers of all files, and checks that they fit together.

    Raises: See `import_folder`.
    """
    check_folder(folder)
    values = read_mapping(folder / CONFIG)
    path = folder / CONFIG
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise ConfigError(
            [f"{path}: model_type={model_type} is not supported: gridformer has {any_of(KINDS)}"]
        )
    kind = KINDS[model_type]
    there = _named(tensors_in(folder), kind)
    keys = ConfigKeys(values)
    read = kind.read_config(keys, frozenset(there))
    if keys.problems:
        raise ConfigError([f"{path}: {problem}" for problem in keys.problems])
    try:
        model = ModelConfig(name=folder.resolve().name, family=kind.family, **read)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError([f"{path}: {one.removeprefix(': ')}" for one in told]) from None
    if not model.vocab_size:
        raise ConfigError([f"{path}: vocab_size=0 is no vocabulary: write how many tokens it has"])
    entries, shapes = kind.entries(model), shapes_of(model)
    _check_tensors(folder, kind, entries, shapes, there)
    _check_repeated(folder, kind, model, entries, there)
    return HuggingFaceFolder(folder, kind, model, task_of(model, values), entries, shapes, there)


def _asked(source: HuggingFaceFolder, task: str) -> Task:
    """Returns the task that a user names for a model."""
    if not source.model.token_head:
        raise ConfigError(
            [f"--task {task}: its head says that it has learned {source.task}: leave it out"]
        )
    tasks = token_tasks(source.model)
    for one in tasks:
        if one == task:
            return one
    raise ConfigError(
        [f"--task {task}: a {source.model.family} with a head of tokens learns {any_of(tasks)}"]
    )


def _named(there: Mapping[str, There], kind: Kind) -> dict[str, There]:
    """Returns tensors by the names that a model with a head has, in today's spelling."""
    found = {}
    for name, tensor in there.items():
        for old, new in kind.old_names.items():
            name = name.replace(old, new)
        found[name] = tensor
    if kind.prefix and not any(name.startswith(kind.prefix) for name in found):
        found = {kind.prefix + name: tensor for name, tensor in found.items()}
    return found


def _check_tensors(
    folder: Path,
    kind: Kind,
    entries: list[TableEntry],
    shapes: Mapping[str, Shape],
    there: Mapping[str, There],
) -> None:
    wanted = {name for entry in entries for name in entry.theirs}
    problems = []
    if missing := sorted(wanted - set(there)):
        problems.append(f"these tensors are missing: {', '.join(missing)}")
    unknown = [
        name
        for name in there
        if name not in wanted | {*kind.repeats} and not matches(name, kind.skipped)
    ]
    if unknown:
        problems.append(
            f"a {kind.model_type} of gridformer has no counterpart of these tensors: "
            f"{', '.join(sorted(unknown))}"
        )
    for entry in entries:
        want = entry.form.shape_of_theirs(shapes[entry.ours])
        problems += [
            f"{name} has the shape {list(there[name].shape)}, but by {CONFIG} it is {list(want)}"
            for name in entry.theirs
            if name in there and there[name].shape != want
        ]
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")
    for name in sorted(wanted):
        parameter_dtype(there[name])


def _check_repeated(
    folder: Path,
    kind: Kind,
    model: ModelConfig,
    entries: list[TableEntry],
    there: Mapping[str, There],
) -> None:
    """Checks that tensors which repeat others are the same, since the others are imported."""
    wanted = {name for entry in entries for name in entry.theirs}
    problems = []
    for name, other in kind.repeats.items():
        if name not in there or name in wanted or other not in wanted:
            continue  # such as a head that is not tied
        if name.startswith(_TOKEN_HEADS) and not model.token_head:
            continue  # what a class with another head does not read
        if not _same(there[name], there[other]):
            problems.append(f"{name} differs from {other}, and a {kind.model_type} has one of them")
    if problems:
        if kind.otherwise:
            problems.append(kind.otherwise)
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")


def _same(one: There, other: There) -> bool:
    """Returns whether two tensors are equal; a few rows at a time are in memory."""
    if one.shape != other.shape:
        return False
    common = torch.promote_types(parameter_dtype(one), parameter_dtype(other))
    with opened_tensors([one, other]) as (a, b):
        return all(
            torch.equal(a[rows].to(common), b[rows].to(common))
            for rows in row_slices(one.shape, common)
        )


def _write(
    source: HuggingFaceFolder, step: Path, run: RunConfig, dtype: DType, tell: Callable[[str], None]
) -> None:
    streamed = {f"model.{entry.ours}": _streamed(entry, source, dtype) for entry in source.entries}
    write_weights(step, streamed, run, tell=tell)


def _streamed(entry: TableEntry, source: HuggingFaceFolder, dtype: DType) -> Streamed:
    shape = source.shapes[entry.ours]
    theirs = [source.tensors[name] for name in entry.theirs]
    stored = parameter_dtype(theirs[0]) if dtype == "keep" else getattr(torch, dtype)

    def pieces() -> Iterator[Tensor]:
        with opened_tensors(theirs) as views:
            for rows in row_slices(shape, stored):
                yield entry.form.ours(views, rows).to(stored)

    return Streamed(shape, stored, pieces)
