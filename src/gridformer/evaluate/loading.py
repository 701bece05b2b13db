"""Loads the model of a run on any layout, for generation and evaluation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from gridformer.checkpoint import checkpoint, find
from gridformer.checkpoint.copies import run_with_checkpoints
from gridformer.checkpoint.manifest import MANIFEST, advice_for_readers, verify_checkpoint
from gridformer.checkpoint.side_files import (
    check_has_tokenizer,
    ids_of_ends,
    load_tokenizer,
    root_of,
)
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.config.train import DType
from gridformer.data import SpecialIds, Tokenizer, special_ids
from gridformer.data.side_texts import read_label_names
from gridformer.mesh import Axes
from gridformer.mesh.process_group import (
    DeviceChoice,
    World,
    check_devices,
    close_process_groups,
    init_process_groups,
)
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.fixes import Changes, Fix, Violation, with_changes, with_fixes
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.registry import spec_of
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.parallel.validation import violations
from gridformer.utils.errors import ConfigError, RemovedError
from gridformer.utils.files import private_prefix

FEW_TOKENS = 1.5  # times h: a layer's weights have 12 h² elements, and its activations 8 T h more


@dataclass(frozen=True)
class Trained:
    """This process's part of a trained model, with its config and tokenizer."""

    run: RunConfig  # that trained it
    model: Model
    tokenizer: Tokenizer
    layout: LayoutConfig = field(default_factory=LayoutConfig)  # on which the model is used
    axes: Axes = field(default_factory=Axes)
    label_names: tuple[str, ...] = ()  # of the labels 0, 1, ... of a classifier, if stored
    ends: frozenset[int] = frozenset()  # tokens that end generated text besides the end of text

    @cached_property
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

    @property
    def position_multiple(self) -> int:
        """What divides the positions of a pass: over how many devices they are sharded."""
        boundary = spec_of(self.layout).boundary(self.layout)
        return self.axes[boundary.axis].size if boundary.activation_layout == "s" else 1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Lets the model run inside this context, in which its weights are gathered once."""
        self.model.eval()
        with gathered_weights_scope(self.model):
            yield


def load_for_inference(run_dir: Path) -> tuple[RunConfig, Path, Tokenizer]:
    """Returns the config, the folder and the tokenizer of the newest checkpoint of a run directory.

    Its files are there and have their sizes; `checkpoint.load` verifies the contents.

    Args:
        run_dir: Run directory, or one of its checkpoints.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        DataError: There is no tokenizer, or one of another model.
    """
    while True:
        folder = find.newest(run_dir)
        with suppress(RemovedError), advice_for_readers(folder):  # there is a newer one by then
            manifest = verify_checkpoint(folder, contents=False)
            return RunConfig.model_validate(manifest.run), folder, load_tokenizer(folder, manifest)


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
        dtype: Type of the computation; None is the type of training.

    Raises:
        CheckpointError, DataError: See `load_for_inference`.
    """
    layout, axes = layout or LayoutConfig(), axes or Axes(device_type=device.type)
    run, folder, tokenizer = load_for_inference(run_dir)
    dtype = dtype or run.train.dtype
    model = build_parallel(run.model, layout, axes, run.train.seed, device, dtype, filled=False)
    with advice_for_readers(folder):
        checkpoint.load(folder, model, None, axes)
    model.uses_kernels(run.train.kernels == "fused")
    root = root_of(folder)
    names, ends = read_label_names(root), ids_of_ends(root)
    return Trained(run, model.eval(), tokenizer, layout, axes, names, ends)


@contextmanager
def run_directory(path: Path, tell: Callable[[str], None]) -> Iterator[Path]:
    """Yields a run directory with the model of a path: that itself, or a temporary one in TMPDIR.

    A folder of Hugging Face is converted, and a checkpoint at a URL copied; both take room. `tell`
    receives progress messages.

    Raises:
        UserError: The folder cannot be imported or has no tokenizer, or the URL cannot be read.
    """
    ours = (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()
    if ours or not (path / "config.json").is_file():
        with run_with_checkpoints(path, tell) as folder:
            yield folder
        return
    from gridformer.checkpoint.convert.importing import import_folder

    check_has_tokenizer(path)  # before the conversion, which may take minutes
    with tempfile.TemporaryDirectory(prefix=private_prefix()) as temporary:
        out = Path(temporary) / "imported"
        import_folder(path, out, tell=tell)
        yield out


class Watching(Protocol):
    """What `gridformer.launch.watch.UseWatch` is: it ends a job that hangs, and says why."""

    margin_s: float  # by which torch's timeouts come later

    def start(self, world: World, timeout_s: float) -> Any: ...


@dataclass(frozen=True)
class Job:
    """A trained model and the layout on which it is used."""

    folder: Path  # the checkpoint
    run: RunConfig  # that trained it, with the layout of the job and the type of its computation
    device: DeviceChoice
    name: str = ""  # of the model in results; empty means the checkpoint
    timeout_s: float = 600.0  # after which a collective that still waits ends the job
    watch: Watching | None = None  # None leaves jobs that hang to torch's timeouts

    @contextmanager
    def open(self) -> Iterator[tuple[Trained, int]]:
        """Joins the processes of the job; yields this one's part of the model, and its rank.

        The process group is destroyed only on success; see `gridformer.launch.run.worker`.
        """
        from gridformer.train.numerics import set_numerics
        from gridformer.utils import signals

        signals.install().nothing_left_to_save()  # Ctrl-C ends it at once
        set_numerics(self.run.train)
        layout, margin_s = self.run.layout, self.watch.margin_s if self.watch else 0.0
        world = init_process_groups(self.device, layout.n_processes, self.timeout_s, margin_s)
        watched = self.watch.start(world, self.timeout_s) if self.watch else None
        axes = build_axes(layout, world.device.type)
        trained = load_model(self.folder, world.device, layout, axes, self.run.train.dtype)
        if watched:
            watched.model = trained.model
        yield trained, world.rank
        if watched:
            watched.end()
        close_process_groups()


def plan_job(
    run_dir: Path,
    overrides: Sequence[str] = (),
    device: DeviceChoice = "auto",
    length: int | None = None,
    dtype: DType | None = None,
    batch_size: int = 0,
    decodes: bool = False,
) -> Job:
    """Finds the checkpoint of a run and checks whether its model can be used on a layout.

    Args:
        run_dir: Run directory, or one of its checkpoints.
        overrides: `layout.key=value` texts; what they leave out is one process, whatever the layout
            of training was.
        device: Where to compute.
        length: How many tokens the model will read at once, so that a layout which shards them
            must divide that number; 0 means as many as it can, and None that any number will do.
        dtype: Type of the computation; None is the type of training.
        batch_size: About how many texts go through the model together; 0 if that is not known. If
            a pass has few tokens, a grid does not send its weights, unless the layout says how
            products communicate or the model does not divide so.
        decodes: Whether most passes read one token of each text.

    Raises:
        CheckpointError, DataError: See `load_for_inference`.
        ConfigError: The layout does not fit the model or this machine. It lists all problems.
    """
    run, folder, _ = load_for_inference(run_dir)
    wrong = [
        f"argument {text}: a trained model keeps its settings; write those of the layout, such as "
        "layout.scheme=optimus layout.rows=2 layout.cols=2"
        for text in overrides
        if not text.startswith("layout.")
    ]
    if wrong:
        raise ConfigError(*wrong)
    values = run.model_dump(mode="json")
    chosen = parse_run({**values, "layout": {}}, overrides).layout
    if chosen.rows_over == "sequence":
        raise ConfigError(
            "layout.rows_over=sequence is for training: a trained model divides texts over rows; "
            "use layout.rows_over=batch"
        )
    train = run.train.model_copy(update={"dtype": dtype or run.train.dtype})
    run = run.model_copy(update={"layout": chosen, "train": train})
    if run.model.family == "bert":
        length = length or 0  # padding takes part in its texts
    one_token = decodes and run.model.family != "bert"
    tokens = batch_size * (1 if one_token else length or run.model.max_seq_len)
    if 0 < tokens < FEW_TOKENS * run.model.hidden_size:
        few = with_changes(run, spec_of(chosen).for_few_tokens(chosen))
        if few is not None and not _violations(few, length):
            run, chosen = few, few.layout
    if "rows_over" in spec_of(chosen).keys_of(chosen):
        chosen = chosen.model_copy(update={"rows_over": "batch"})
        run = run.model_copy(update={"layout": chosen})
    problems = [str(problem) for problem in with_fixes(run, partial(_violations, length=length))]
    problems += check_devices(device, chosen.n_processes)
    if problems:
        raise ConfigError(*problems)
    return Job(folder, run, device)


def _violations(run: RunConfig, length: int | None) -> list[Violation]:
    """Returns the broken rules of a model that is used, whose batches are made to fit."""
    layout, longest = run.layout, run.model.max_seq_len
    parts = spec_of(layout).batch_parts(layout) * layout.micro_batches
    if length is None:
        longest = max(1, longest // layout.cols) * layout.cols
    length = min(length or longest, longest)
    data = run.data.model_copy(
        update={"seq_len": length, "source_len": length * run.model.two_stacks}
    )
    train = run.train.model_copy(update={"global_batch": parts})
    fitted = run.model_copy(update={"data": data, "train": train})
    return violations_of_layout(fitted)


def violations_of_layout(run: RunConfig) -> list[Violation]:
    """Returns the broken rules of a run, with ways to fix them that change only the layout."""

    def of_layout(fix: Fix) -> Fix:
        def changes() -> Iterable[Changes]:
            return (
                one
                for one in fix.changes()
                if all(key.startswith("layout.") for key in one) and "layout.rows_over" not in one
            )

        return Fix(changes, fix.at_most)

    broken = violations(run)
    return [Violation(one.rule, one.text, [*map(of_layout, one.fixes)]) for one in broken]
