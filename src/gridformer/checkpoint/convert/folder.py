"""Reads a folder of Hugging Face: its config.json, and which file holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gridformer.checkpoint.safetensors_file import TYPES, opened_file
from gridformer.utils.errors import CheckpointError
from gridformer.utils.files import UnreadableError, exists, read_json

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Type names of safetensors files, which is all that a header has.
DTYPES = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True)
class There:
    """A tensor in a file.

    Attributes:
        file: The file.
        name: Its name in that file.
        shape: Its shape.
        dtype: The name of its type in safetensors files.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that is a mapping.

    Raises:
        CheckpointError: It is missing, damaged or something else.
    """
    if not exists(path):
        raise CheckpointError(f"{path} is missing")
    try:
        found = read_json(path)
    except UnreadableError as error:
        raise CheckpointError(f"{path} is damaged: {error.reason}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it is not a mapping")
    return found


def check_folder(folder: Path) -> None:
    """Checks that a path is a folder with a config.json.

    Raises:
        CheckpointError: It is not. The message says what to give instead.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; import reads a local folder and downloads nothing, so "
            f"download the model first, for example with `hf download NAME --local-dir FOLDER`"
        )
    if not (folder / CONFIG).is_file():
        hint = ""
        if (folder / "checkpoints").is_dir():
            hint = "; it is a run directory of gridformer, which needs no import"
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is not a folder of Hugging Face{hint}"
        )


def tensors_in(folder: Path) -> dict[str, There]:
    """Returns the tensors of a folder by name, from the headers of its files.

    Raises:
        CheckpointError: There are no safetensors files, or one is missing, damaged or not named by
            the index.
    """
    index = folder / INDEX
    if index.is_file():
        named = read_mapping(index).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index} is damaged: it has no weight_map")
        files = sorted({str(file) for file in named.values()})
    elif (folder / WEIGHTS).is_file():
        named, files = None, [WEIGHTS]
    else:
        raise CheckpointError(_no_weights(folder))
    found: dict[str, There] = {}
    for file in files:
        path = folder / file
        if path.parent != folder:
            raise CheckpointError(f"{index} names a file outside its folder, {file}")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {INDEX} names it: copy it there as well")
        found |= _headers(path)
    missing = sorted(set(named or ()) - set(found))
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX} names tensors that its files do not hold: {', '.join(missing)}"
        )
    return found


@contextmanager
def opened_tensors(tensors: list[There]) -> Iterator[list[Tensor]]:
    """Yields tensors as views of their files, which take memory only where they are read.

    Files are mapped anew each time, so that what was read is freed at the end of the block.
    """
    with ExitStack() as stack:
        yield [_view(stack.enter_context(opened_file(one.file)), one) for one in tensors]


def _view(file: Any, tensor: There) -> Tensor:
    view: Tensor = file.get_tensor(tensor.name)
    return view


def _headers(path: Path) -> dict[str, There]:
    found = {}
    with opened_file(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is not a mapping)
            entry = file.get_slice(name)
            found[name] = There(path, name, tuple(entry.get_shape()), str(entry.get_dtype()))
    return found


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        named = read_mapping(folder / CONFIG).get("architectures")
        named = (
            [name for name in named if str(name).isidentifier()] if isinstance(named, list) else []
        )
        named = named or ["AutoModelForCausalLM"]
        return (
            f"{folder} holds its weights as {', '.join(pickles)}, which are pickles: reading one "
            f"can run any code, so gridformer does not. If you trust the source, convert them "
            f"once:\n"
            f"  from transformers import {named[0]}\n"
            f'  {named[0]}.from_pretrained("{folder}").save_pretrained("NEW FOLDER")'
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f", only {', '.join(others)}" if others else ""
    return f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}"


def parameter_dtype(tensor: There) -> torch.dtype:
    """Returns the type of a tensor.

    Raises:
        CheckpointError: It is not one of floating-point numbers of 16 to 64 bits.
    """
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has the type {tensor.dtype}, which is quantized or not "
            f"a parameter's: use the model in {', '.join(DTYPES)}"
        )
    return DTYPES[tensor.dtype]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a name as a whole matches one of some regular expressions."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
