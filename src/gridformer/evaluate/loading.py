"""Loads the model of a run on any layout, for generation and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from gridformer.checkpoint import checkpoint, find
from gridformer.checkpoint.manifest import advice_for_readers, verify_checkpoint
from gridformer.checkpoint.side_files import ids_of_ends, load_tokenizer, root_of
from gridformer.config import LayoutConfig, RunConfig
from gridformer.config.train import DType
from gridformer.data import SpecialIds, Tokenizer, special_ids
from gridformer.data.label_names import read_label_names
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.tensor.linear import weights_kept
from gridformer.utils.errors import RemovedError


@dataclass(frozen=True)
class Trained:
    """This process's part of a trained model, with its config and tokenizer.

    Attributes:
        run: The config of the run that trained it.
        model: The model; on a layout of several processes, this one's part of it.
        tokenizer: The tokenizer.
        layout: The layout on which the model is used.
        axes: The axes of that layout.
        label_names: What the labels 0, 1, ... of a classifier are called, as far as it is stored.
        ends: The tokens that end generated text besides the tokenizer's end of text.
    """

    run: RunConfig
    model: Model
    tokenizer: Tokenizer
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    axes: Axes = field(default_factory=Axes)
    label_names: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()

    @property
    def special(self) -> SpecialIds:
        """The ids of the model's special tokens."""
        return special_ids(self.run, self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the tensors of this process are."""
        if self.axes.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @cached_property
    def executor(self) -> Executor:
        """Runs pipeline stages. All processes must read it first at the same time."""
        return Executor(self.model, self.layout, self.axes, GradientSums([], []))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lets the model run inside this context, in which its weights are gathered once."""
        self.model.eval()
        with weights_kept(self.model):
            yield


def load_for_inference(run_dir: Path, contents: bool = True) -> tuple[RunConfig, Path, Tokenizer]:
    """Finds and verifies the newest checkpoint of a run directory, and loads its tokenizer.

    Args:
        run_dir: Run directory, or one of its checkpoints.
        contents: Whether to verify checksums besides sizes; `load_model` does that again.

    Returns:
        The resolved config of the run, the folder of the checkpoint, and the tokenizer.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        DataError: There is no tokenizer, or that of another model.
    """
    while True:
        folder = find.newest(run_dir)
        with suppress(RemovedError), advice_for_readers(folder):  # there is a newer one by then
            manifest = verify_checkpoint(folder, contents=contents)
            return RunConfig.model_validate(manifest.run), folder, load_tokenizer(folder, manifest)


def checkpoint_label_names(run: RunConfig, folder: Path) -> tuple[str, ...]:
    """Returns what the labels of a classifier are called; none if there is none that says it.

    Args:
        run: The config of the run that trained it.
        folder: Its checkpoint.

    Raises:
        DataError: The file that says it is damaged.
    """
    return read_label_names(root_of(folder)) if run.model.n_labels else ()


def load_model(
    run_dir: Path,
    device: torch.device,
    layout: LayoutConfig | None = None,
    axes: Axes | None = None,
    dtype: DType | None = None,
) -> Trained:
    """Loads the model of the newest checkpoint of a run. All processes call it together.

    Args:
        run_dir: Run directory, or one of its checkpoints.
        device: Device for the model.
        layout: The layout; None is one process.
        axes: Its axes.
        dtype: Type of the computation; None is that of training.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        DataError: There is no tokenizer, or that of another model.
    """
    layout, axes = layout or LayoutConfig(), axes or Axes(device_type=device.type)
    # `checkpoint.load` verifies the contents.
    run, folder, tokenizer = load_for_inference(run_dir, contents=False)
    dtype = dtype or run.train.dtype
    model = build_parallel(run.model, layout, axes, run.train.seed, device, dtype, filled=False)
    with advice_for_readers(folder):
        checkpoint.load(folder, model, None, axes)
    model.uses_kernels(run.train.kernels == "fused")
    names, ends = checkpoint_label_names(run, folder), ids_of_ends(root_of(folder))
    return Trained(run, model.eval(), tokenizer, layout, axes, names, ends)
