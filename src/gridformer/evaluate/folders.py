"""Opens what a command names as a trained model: a run, or a folder of Hugging Face."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gridformer.checkpoint.elsewhere import run_with_checkpoints
from gridformer.checkpoint.manifest import MANIFEST
from gridformer.checkpoint.side_files import check_has_tokenizer
from gridformer.utils.folders import private_prefix


@contextmanager
def run_directory(path: Path, tell: Callable[[str, str], None]) -> Iterator[Path]:
    """Yields a run directory with the model of a folder, which may be one of Hugging Face.

    Such a folder is converted into a temporary one (in TMPDIR), which takes as much room. A
    checkpoint that is only at `train.checkpoint_to` is copied there and takes as much room, too.

    Args:
        path: Run directory, one of its checkpoints, a URL of checkpoints, or a folder with
            config.json and safetensors.
        tell: Receives progress messages; see `gridformer.cli.waiting.waiting`.

    Raises:
        UserError: The folder cannot be imported or has no tokenizer, or the URL cannot be read.
    """
    if not is_hugging_face(path):
        with run_with_checkpoints(path, lambda doing: tell("", doing)) as found:
            yield found
        return
    from gridformer.checkpoint.convert.importing import import_folder

    check_has_tokenizer(path)  # before the conversion, which may take minutes
    with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:
        out = Path(folder) / "imported"
        import_folder(path, out, tell=lambda doing: tell("", doing))
        yield out


def is_hugging_face(path: Path) -> bool:
    """Returns whether a path looks like a folder of Hugging Face rather than a run directory."""
    ours = (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()
    return (path / "config.json").is_file() and not ours
