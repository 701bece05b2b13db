"""`gridformer import`: a folder of Hugging Face becomes a run directory with one checkpoint.

Tensors are views of mapped files, some rows of which are read at a time and written at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.convert.table import (
    ConfigKeys,
    Kind,
    Shape,
    TableEntry,
    config_label_names,
    task_of,
    token_tasks,
)
from gridformer.checkpoint.manifest import KEPT
from gridformer.checkpoint.safetensors_file import DTYPES, Streamed, opened_file
from gridformer.checkpoint.side_files import KEPT_FILES, copy_files
from gridformer.checkpoint.whole import shapes_of, write_weights
from gridformer.config import NO_PATH, DataConfig, ModelConfig, RunConfig, Task, any_of
from gridformer.config.base import file_name
from gridformer.data.side_texts import write_label_names
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.data.tokenizer import SETTINGS
from gridformer.utils.errors import CheckpointError, ConfigError
from gridformer.utils.files import UnreadableError, exists, new_folder, read_json, refuse_existing

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKEN_HEADS = ("lm_head.", "cls.predictions.")  # what names of tensors of such heads begin with
DType = Literal["keep", "float32", "bfloat16"]


class StoredTensor(NamedTuple):
    """A tensor in a file. `dtype` is the name of its type there."""

    file: Path
    name: str
    shape: Shape
    dtype: str

    def parameter_dtype(self) -> torch.dtype:
        """Returns its type, which must be one of floating-point numbers of 16 to 64 bits."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.file}: {self.name} has the type {self.dtype}, which is quantized or not "
                f"a parameter's: use the model in {', '.join(DTYPES)}"
            )
        return DTYPES[self.dtype]

    def view(self) -> Tensor:
        """Returns it as a view of its file, mapped anew, so that what was read of it is freed."""
        with opened_file(self.file) as file:
            view: Tensor = file.get_tensor(self.name)
            return view


class Imported(NamedTuple):
    """What an import has written."""

    run: RunConfig
    model_type: str
    n_parameters: int
    has_tokenizer: bool


class _Source(NamedTuple):
    """A folder of Hugging Face whose tensors fit a model of ours."""

    folder: Path
    kind: Kind
    model: ModelConfig
    task: Task
    entries: list[TableEntry]
    shapes: Mapping[str, Shape]  # of our parameters
    tensors: Mapping[str, StoredTensor]  # by the names of the table


def import_folder(
    folder: Path,
    out: Path,
    dtype: DType = "keep",
    tell: Callable[[str], None] = lambda doing: None,
    task: str = "",
) -> Imported:
    """Converts a folder of Hugging Face to a new run directory.

    Args:
        folder: A folder with config.json, safetensors files and a tokenizer.
        dtype: The type of the stored tensors; keep means that of each tensor.
        task: The task that a model with a head of tokens has learned; empty means what the folder
            says.

    Raises:
        ConfigError: The model cannot be represented, or cannot have learned such a task. It lists
            all problems at once.
        CheckpointError: Files or tensors are missing or damaged, or do not fit the model.
        UserError: There already is something at `out`.
    """
    refuse_existing(out)
    source = _opened(folder)
    learned, model, tasks = source.task, source.model, token_tasks(source.model)
    if task:
        if not model.token_head:
            raise ConfigError(
                f"--task {task}: its head says that it has learned {learned}: leave it out"
            )
        if task not in tasks:
            raise ConfigError(
                f"--task {task}: a {model.family} with a head of tokens learns {any_of(tasks)}"
            )
        learned = task
    run = RunConfig(
        name=file_name(out.resolve().name, "imported"),
        model=model,
        data=DataConfig(path=Path(NO_PATH), task=learned),
    )
    with new_folder(out) as writing:
        step = writing / "checkpoints" / "step-00000000"
        step.mkdir(parents=True)
        (writing / "config.yaml").write_text(run.to_yaml(), encoding="utf-8")
        names = config_label_names(read_mapping(folder / CONFIG))
        if learned == "classify" and names:
            write_label_names(writing, names)
        copy_files(folder, writing / KEPT, KEPT_FILES)
        has_tokenizer = (folder / TOKENIZER).is_file()
        if has_tokenizer:
            copy_files(folder, writing, (TOKENIZER, SETTINGS))  # which say what ends documents
        streamed = {entry.ours: _streamed(entry, source, dtype) for entry in source.entries}
        write_weights(step, streamed, run, tell=tell)
    n_parameters = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    return Imported(run, source.kind.model_type, n_parameters, has_tokenizer)


def _streamed(entry: TableEntry, source: _Source, dtype: DType) -> Streamed:
    theirs = [source.tensors[name] for name in entry.theirs]
    stored = theirs[0].parameter_dtype() if dtype == "keep" else getattr(torch, dtype)
    return Streamed(
        source.shapes[entry.ours], stored, lambda: entry.form.ours([one.view() for one in theirs])
    )


# ------------------------------------------------------------------ what a folder holds


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that is a mapping, or raises CheckpointError."""
    if not exists(path):
        raise CheckpointError(f"{path} is missing")
    try:
        content = read_json(path)
    except UnreadableError as error:
        raise CheckpointError(f"{path} is damaged: {error.reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping")
    return content


def write_json(path: Path, values: Mapping[str, Any], ascii: bool = True) -> None:
    """Writes a JSON file, formatted like Hugging Face's."""
    text = json.dumps(values, indent=2, ensure_ascii=ascii)
    path.write_text(f"{text}\n", encoding="utf-8")


def _opened(folder: Path) -> _Source:
    """Reads config.json and the headers of all files, and checks that they fit together."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; import reads a local folder and downloads nothing, so "
            f"download the model first, for example with `hf download NAME --local-dir FOLDER`"
        )
    if not path.is_file():
        ours = (folder / "checkpoints").is_dir()
        hint = "; it is a run directory of gridformer, which needs no import" * ours
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is not a folder of Hugging Face{hint}"
        )
    values = read_mapping(path)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise ConfigError(
            f"{path}: model_type={model_type} is not supported: gridformer has {any_of(KINDS)}"
        )
    kind = KINDS[model_type]
    tensors = _named(_tensors_in(folder), kind)
    keys = ConfigKeys(values, kind.has_experts)
    read = kind.read_config(keys, frozenset(tensors))
    if keys.problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in keys.problems))
    try:
        model = ModelConfig(name=folder.resolve().name, family=kind.family, **read)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(*(f"{path}: {one.removeprefix(': ')}" for one in told)) from None
    if not model.vocab_size:
        raise ConfigError(f"{path}: vocab_size=0 is no vocabulary: write how many tokens it has")
    task, entries = task_of(model, values), kind.entries(model)
    source = _Source(folder, kind, model, task, entries, shapes_of(model), tensors)
    _check_tensors(source)
    return source


def _tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by name, from the headers of its files."""
    index, files = folder / INDEX, [WEIGHTS]
    named: dict[str, Any] = {}
    if index.is_file():
        weight_map = read_mapping(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} is damaged: it has no weight_map")
        named, files = weight_map, sorted({str(file) for file in weight_map.values()})
    elif not (folder / WEIGHTS).is_file():
        raise CheckpointError(_no_weights(folder))
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        path = folder / name
        if path.parent != folder:
            raise CheckpointError(f"{index} names a file outside its folder, {name}")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {INDEX} names it: copy it there as well")
        with opened_file(path) as file:
            for key in file.keys():  # noqa: SIM118 (it is not a mapping)
                entry = file.get_slice(key)
                shape = tuple(entry.get_shape())
                tensors[key] = StoredTensor(path, key, shape, str(entry.get_dtype()))
    if missing := sorted(set(named) - set(tensors)):
        raise CheckpointError(
            f"{folder}: {INDEX} names tensors that its files do not hold: {', '.join(missing)}"
        )
    return tensors


def _no_weights(folder: Path) -> str:
    """Says that a folder has no safetensors files, and what to do about pickles."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        hint = f", only {', '.join(others)}" if others else ""
        return f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}"
    classes = read_mapping(folder / CONFIG).get("architectures")
    classes = classes if isinstance(classes, list) else []
    names = [name for name in classes if str(name).isidentifier()] or ["AutoModelForCausalLM"]
    return (
        f"{folder} holds its weights as {', '.join(pickles)}, which are pickles: reading one "
        f"can run any code, so gridformer does not. If you trust the source, convert them "
        f"once:\n"
        f"  from transformers import {names[0]}\n"
        f'  {names[0]}.from_pretrained("{folder}").save_pretrained("NEW FOLDER")'
    )


def _named(tensors: Mapping[str, StoredTensor], kind: Kind) -> dict[str, StoredTensor]:
    """Returns tensors by the names that a model with a head has, in today's spelling."""
    named = {}
    for name, tensor in tensors.items():
        for old, new in kind.old_names.items():
            name = name.replace(old, new)
        named[name] = tensor
    if kind.prefix and not any(name.startswith(kind.prefix) for name in named):
        named = {kind.prefix + name: tensor for name, tensor in named.items()}
    return named


def _check_tensors(source: _Source) -> None:
    """Checks that there are exactly the tensors of the table, of the right shapes and types.

    Tensors that repeat others must be the same, since only the others are imported.
    """
    kind, tensors = source.kind, source.tensors
    wanted = {name for entry in source.entries for name in entry.theirs}
    problems = []
    if missing := sorted(wanted - set(tensors)):
        problems.append(f"these tensors are missing: {', '.join(missing)}")
    unknown = [
        name
        for name in sorted(set(tensors) - wanted - {*kind.repeats})
        if not any(re.fullmatch(pattern, name) for pattern in kind.skipped)
    ]
    if unknown:
        problems.append(
            f"a {kind.model_type} of gridformer has no counterpart of these tensors: "
            f"{', '.join(unknown)}"
        )
    for entry in source.entries:
        want = entry.form.shape_of_theirs(source.shapes[entry.ours])
        problems += [
            f"{name} has the shape {list(tensors[name].shape)}, but by {CONFIG} it is {list(want)}"
            for name in entry.theirs
            if name in tensors and tensors[name].shape != want
        ]
    if problems:
        raise CheckpointError(f"{source.folder}: {'; '.join(problems)}")
    for name in sorted(wanted):
        tensors[name].parameter_dtype()
    for name, other in kind.repeats.items():
        if name not in tensors or name in wanted or other not in wanted:
            continue  # such as a head that is not tied
        if name.startswith(_TOKEN_HEADS) and not source.model.token_head:
            continue  # what a class with another head does not read
        if not _same(tensors[name], tensors[other]):
            problems.append(f"{name} differs from {other}, and a {kind.model_type} has one of them")
    if problems:
        problems += [kind.otherwise] * bool(kind.otherwise)
        raise CheckpointError(f"{source.folder}: {'; '.join(problems)}")


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    common = torch.promote_types(one.parameter_dtype(), other.parameter_dtype())
    return torch.equal(one.view().to(common), other.view().to(common))
