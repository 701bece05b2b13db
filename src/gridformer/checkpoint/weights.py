"""Begins a run with the weights of another one: `train.init_from`.

Only weights are read. Seed, data, batch, schedule and layout are those of the new run; so are heads
that the weights do not have, whose initial values depend on seed and name as always.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gridformer.checkpoint import find
from gridformer.checkpoint.blocks import PARAMETER
from gridformer.checkpoint.checkpoint import stored_blocks
from gridformer.checkpoint.manifest import KEPT, advice_for_readers, verify_checkpoint
from gridformer.checkpoint.safetensors_file import read_blocks
from gridformer.checkpoint.side_files import root_of
from gridformer.checkpoint.whole import shapes_of
from gridformer.config import ModelConfig, RunConfig
from gridformer.data import Tokenizer
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.utils.errors import ConfigError
from gridformer.utils.units import format_value

# Heads for one task, which another task replaces.
_HEADS = ("classifier.", "pair.", "span.")
# Tables with a row for each token or position, and biases with an element for each token.
_TABLES = ("tokens.weight", "positions.weight", "head.weight", "head.bias")
# Keys of `model` that do not change what the weights compute, or that shapes show.
_FREE = {
    "name",
    "dropout",
    "attention_dropout",
    "label_smoothing",
    "balance_loss",
    "balance_rate",
    "z_loss",
    "init_std",
    "vocab_size",
    "max_seq_len",
    "n_labels",
    "sentence_pair",
    "span_head",
    "token_head",
}
# Keys that a model needs for longer sequences, and that have no weights.
_OF_LENGTH = {"rope_theta", "rope_scaling", "window"}


@dataclass(frozen=True)
class InitialWeights:
    """The weights with which a run begins."""

    folder: Path  # the checkpoint that holds them
    rows: dict[str, tuple[int, int]]  # of each table of another size, there and here
    fresh: tuple[str, ...]  # parameters that get their initial values, as they are not there
    renamed: dict[str, str]  # parameters that have another name there

    def describe(self) -> str:
        """Returns a line for the terminal."""
        text = f"beginning with the weights of {self.folder}"
        resized = [f"{name} from {a:,} to {b:,} rows" for name, (a, b) in self.rows.items()]
        if resized:
            text += f"; resized: {', '.join(resized)}"
        if self.fresh:
            text += f"; new: {', '.join(self.fresh)}"
        return text


def start_of(run: RunConfig) -> InitialWeights | None:
    """Finds the weights that a new run begins with, if any, and checks that they fit its model.

    Raises:
        CheckpointError: There is no checkpoint, or files of it are missing.
        ConfigError: It is of another model, or tables have other sizes and the run does not say
            that they may. It lists all problems.
    """
    if run.train.init_from is None:
        return None
    folder = find.newest(run.train.init_from)
    with advice_for_readers(folder):
        there = verify_checkpoint(folder, contents=False).model
    problems = _differences(there, run.model)
    if not problems:
        theirs, ours = shapes_of(there), shapes_of(run.model)
        heads = {  # each of which is new as a whole
            name.split(".")[0]
            for name in ours
            if name.startswith(_HEADS) and theirs.get(name) != ours[name]
        }
        fresh = tuple(name for name in ours if name.split(".")[0] in heads)
        # A classifier begins with the pooler of pre-training, as it does in Hugging Face's BERT.
        renamed = {
            name: pooler
            for name in fresh
            if name.startswith("classifier.pooler.")
            and theirs.get(pooler := name.replace("classifier", "pair")) == ours[name]
        }
        fresh = tuple(name for name in fresh if name not in renamed)
        rows = {
            name: (theirs[name][0], shape[0])
            for name, shape in ours.items()
            if name in _TABLES and theirs.get(name, shape)[0] != shape[0]
        }
        if run.train.init_embeddings == "exact":
            problems += [
                f"{name} has {a} rows there and {b} here: use train.init_embeddings=resize to take "
                f"the {'first' if b < a else ''} {min(a, b)}"
                + (", while the others get initial values" if b > a else "")
                for name, (a, b) in rows.items()
            ]
    if problems:
        where = f"train.init_from={run.train.init_from}"
        raise ConfigError(*(f"{where}: {problem}".replace("  ", " ") for problem in problems))
    return InitialWeights(folder, rows, fresh, renamed)


def load_initial_weights(start: InitialWeights, model: Model, axes: Axes) -> None:
    """Loads weights into a new model under any layout. All ranks call it together."""
    folder = start.folder
    with advice_for_readers(folder):
        manifest = verify_checkpoint(folder, part=axes.world.index, n_parts=axes.world.size)
    wanted = {}
    for name, block in stored_blocks(model).items():
        if name in start.rows:  # only a part lies in the table there
            n_rows = start.rows[name][0]
            tensor = block.tensor[: max(0, n_rows - block.offset[0])]
            block = replace(block, tensor=tensor, size=(n_rows, *block.size[1:]))
        if name not in start.fresh:
            wanted[f"{PARAMETER}{start.renamed.get(name, name)}"] = block
    with torch.no_grad(), advice_for_readers(folder):
        read_blocks(wanted, folder, manifest.index)


def keep_files(start: InitialWeights, out: Path) -> None:
    """Copies the files of an imported model to a run that begins with it, for a later export.

    They are left out if the run's data have another tokenizer than the run directory `out` has.
    """
    there = root_of(start.folder) / KEPT
    name = "tokenizer.json"
    if not (there / name).is_file() or (out / KEPT).exists():
        return
    if Tokenizer.load(there / name).vocabulary == Tokenizer.load(out / name).vocabulary:
        shutil.copytree(there, out / KEPT)


def _differences(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Returns the keys whose values make another model of the same weights."""
    if there.family != here.family:
        return [f"it is a {there.family}, and model.family is {here.family}"]
    free = _FREE | (_OF_LENGTH if there.max_seq_len != here.max_seq_len else set())
    theirs, ours = (  # with the numbers that a 0 stands for
        one.model_dump(mode="json") | {"head_dim": one.head_width, "n_kv_heads": one.kv_heads}
        for one in (there, here)
    )
    problems = []
    for key, value in ours.items():
        if key in free or theirs[key] == value:
            continue
        also = ", or another model.max_seq_len" if key in _OF_LENGTH else ""
        problems.append(
            f"model.{key} is {format_value(value)}, there {format_value(theirs[key])}: use "
            f"model.{key}={format_value(theirs[key])}{also}"
        )
    return problems
