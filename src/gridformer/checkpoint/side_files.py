"""The small files that a model needs besides its weights: tokenizer, template, names of labels.

They are in the run directory, and every checkpoint has copies of those that were there when it was
saved, so that it can be used wherever it is copied.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from gridformer.checkpoint.manifest import KEPT, FileEntry, Manifest
from gridformer.data.chat import CHAT_FILE
from gridformer.data.side_texts import LABELS_FILE
from gridformer.data.tokenfolder import TOKENIZER
from gridformer.data.tokenizer import SETTINGS, Tokenizer
from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_json, regular_bytes
from gridformer.utils.units import GIB

GENERATION = "generation_config.json"
# The small files of a folder of Hugging Face that are kept in `KEPT`, for tokenizer and export.
KEPT_FILES = (
    "config.json",
    GENERATION,
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
)
SIDE_FILES = (
    TOKENIZER,
    SETTINGS,
    CHAT_FILE,
    LABELS_FILE,
    *(f"{KEPT}/{name}" for name in KEPT_FILES),
)


def side_files(root: Path) -> list[str]:
    """Returns which of `SIDE_FILES` are in a run directory or a checkpoint."""
    return [name for name in SIDE_FILES if (root / name).is_file()]


def root_of(folder: Path) -> Path:
    """Returns the folder that has a checkpoint's side files: the checkpoint, or its run directory.

    A folder that has the checkpoint in its `checkpoints` is its run directory.
    """
    parent = folder.resolve().parent
    return folder if side_files(folder) or parent.name != "checkpoints" else parent.parent


def write_side_files(
    root: Path, writing: Callable[[str], AbstractContextManager[BinaryIO]]
) -> dict[str, FileEntry]:
    """Copies side files into a checkpoint, and returns what its manifest says of them.

    One that cannot be read is left out: a checkpoint is worth more than a tokenizer that may also
    be elsewhere.
    """
    entries = {}
    for name in side_files(root):
        try:
            content = regular_bytes(root / name, GIB)
        except OSError:
            continue
        with writing(name) as file:
            file.write(content)
        entries[name] = FileEntry(bytes=len(content), crc32=zlib.crc32(content))
    return entries


def copy_files(root: Path, target: Path, names: Iterable[str] = SIDE_FILES) -> None:
    """Copies those files that a folder has to another one, where they replace others."""
    for name in names:
        if (root / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / name, target / name)


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """Loads the tokenizer of a checkpoint, and checks that it is the model's.

    Raises:
        DataError: There is none, it is damaged, or its vocabulary is another.
    """
    root = root_of(folder)
    check_has_tokenizer(root)
    tokenizer = Tokenizer.load(root / TOKENIZER)
    n, trained_with = tokenizer.vocab_size, manifest.data.vocabulary if manifest.data else None
    # Imported models may lack rows for special tokens that were added later and never occur.
    ordinary = {*tokenizer.vocabulary.values()} - tokenizer.special_ids
    largest, rows = max(ordinary, default=0), manifest.model.vocab_size
    if trained_with not in (None, n):
        why = f"it has {n} tokens, and that of training had {trained_with}"
    elif largest >= rows:
        why = f"it has the token {largest}, and the model only {rows}"
    else:
        return tokenizer
    raise DataError(
        f"{root / TOKENIZER} is that of another model than {folder}, as {why}: replace it by the "
        "one of the model"
    )


def ids_of_ends(root: Path) -> frozenset[int]:
    """Returns the tokens that end generated text, or a turn, by an import's generation_config."""
    try:
        content = read_json(root / KEPT / GENERATION)
    except UnreadableError:
        return frozenset()
    ids = content.get("eos_token_id") if isinstance(content, dict) else None
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in listed if isinstance(i, int) and not isinstance(i, bool))


def check_has_tokenizer(root: Path) -> None:
    """Raises DataError if a folder has no tokenizer."""
    if not (root / TOKENIZER).is_file():
        raise DataError(
            f"{root} has no {TOKENIZER}, which generation and evaluation need: copy the one of the "
            "model there"
        )
