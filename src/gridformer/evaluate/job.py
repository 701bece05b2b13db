"""The use of a trained model on a layout: checked before processes start, then opened in each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gridformer.config import RunConfig, parse_run
from gridformer.config.train import DType
from gridformer.evaluate.loading import Trained, load_for_inference, load_model
from gridformer.mesh.process_group import (
    DeviceChoice,
    World,
    check_devices,
    close_process_groups,
    init_process_groups,
)
from gridformer.parallel.axes import build_axes
from gridformer.parallel.offers import Broken, Changes, Way, with_offers
from gridformer.parallel.registry import spec_of
from gridformer.parallel.validation import broken_rules
from gridformer.utils.errors import ConfigError


class Watched(Protocol):
    """The watch of a process, which ends it with a report if the job hangs."""

    where: Any  # its `model` is that in which a report says where the process is

    def end(self) -> None:
        """Ends the watch."""


class Watching(Protocol):
    """Starts the watch of each process; it is picklable. torch's timeouts come `margin_s` later."""

    margin_s: float

    def start(self, world: World, timeout_s: float) -> Watched | None:
        """Starts it in this process."""


@dataclass(frozen=True)
class Job:
    """A trained model and the layout on which it is used.

    Attributes:
        folder: The checkpoint.
        run: The config of the run that trained it, with the layout of the job and the type of its
            computation.
        device: `cpu`, `cuda` or `auto`.
        name: What the results call the model; empty means the checkpoint.
        timeout_s: Seconds after which a collective that still waits ends the job.
        watch: Names what a job waits for that hangs; None leaves that to torch's timeouts.
    """

    folder: Path
    run: RunConfig
    device: DeviceChoice
    name: str = ""
    timeout_s: float = 600.0
    watch: Watching | None = None

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @contextmanager
    def open(self) -> Iterator[tuple[Trained, int]]:
        """Joins the processes of the job and loads this one's part of the model.

        The process group is destroyed only on success; see `gridformer.launch.run.worker`.

        Yields:
            The model, and the rank of this process.
        """
        from gridformer.train.numerics import set_numerics
        from gridformer.utils import signals

        signals.install().nothing_left_to_save()  # Ctrl-C ends it at once
        set_numerics(self.run.train)
        margin_s = self.watch.margin_s if self.watch else 0.0
        world = init_process_groups(self.device, self.n_processes, self.timeout_s, margin_s)
        watched = self.watch.start(world, self.timeout_s) if self.watch else None
        axes = build_axes(self.run.layout, world.device.type)
        dtype = self.run.train.dtype
        trained = load_model(self.folder, world.device, self.run.layout, axes, dtype)
        if watched:
            watched.where.model = trained.model
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
) -> Job:
    """Finds the checkpoint of a run and checks whether its model can be used on a layout.

    Args:
        run_dir: Run directory, or one of its checkpoints.
        overrides: `layout.key=value` texts; what they leave out is one process, whatever the layout
            of training was.
        device: Where to compute.
        length: How many tokens the model will read at once, so that a layout which shards them
            must divide that number; 0 means as many as it can, and None that any number will do.
        dtype: Type of the computation; None is that of training.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        DataError: There is no tokenizer, or that of another model.
        ConfigError: The layout does not fit the model or this machine. It lists all problems.
    """
    run, folder, _ = load_for_inference(run_dir, contents=False)
    wrong = [text for text in overrides if not text.startswith("layout.")]
    if wrong:
        raise ConfigError(
            [
                f"argument {text}: a trained model keeps its settings; write those of the layout, "
                "such as layout.scheme=optimus layout.rows=2 layout.cols=2"
                for text in wrong
            ]
        )
    values = run.model_dump(mode="json")
    chosen = parse_run({**values, "layout": {}}, overrides).layout
    train = run.train.model_copy(update={"dtype": dtype or run.train.dtype})
    run = run.model_copy(update={"layout": chosen, "train": train})
    if run.model.family == "bert":
        length = length or 0  # padding takes part in its texts
    check = partial(_broken_rules, length=length)
    found = [str(problem) for problem in with_offers(run, check)]
    found += check_devices(device, chosen.n_processes)
    if found:
        raise ConfigError(found)
    return Job(folder, run, device)


def _broken_rules(run: RunConfig, length: int | None) -> list[Broken]:
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
    return [
        Broken(one.rule, one.text, [of_layout(way) for way in one.ways])
        for one in broken_rules(fitted)
    ]


def of_layout(way: Way) -> Way:
    """Returns a way without changes of the model or its training, which have been decided."""

    def changes() -> Iterable[Changes]:
        return (one for one in way.changes() if all(key.startswith("layout.") for key in one))

    return Way(changes, way.at_most)
