"""From a run file to a plan that can start: everything is checked before any process does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gridformer.config import RunConfig, load_run, model_names, parse_run
from gridformer.data import TokenFolder, resolve
from gridformer.decisions import Decisions, decide_run
from gridformer.errors import CheckpointError, ConfigError, DataError
from gridformer.launch import check_devices
from gridformer.layout import check
from gridformer.memory.fits import Tell, fit_problems, silent
from gridformer.train import checkpoint
from gridformer.train.compile import compile_problems


@dataclass(frozen=True)
class Plan:
    """A run that can start: everything was checked, and what `auto` leaves open was decided.

    resume: the checkpoint to go on from.
    """

    run: RunConfig
    out: Path
    resume: Path | None
    resume_step: int
    decisions: Decisions

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @property
    def done(self) -> bool:
        """The checkpoint has all the steps that were asked for."""
        return self.resume_step >= self.run.train.steps


def plan_run(
    path: Path | str,
    overrides: list[str] | tuple[str, ...] = (),
    nproc: int | None = None,
    out: Path | None = None,
    tell: Tell = silent,
) -> Plan:
    """Read a run file and check all of it: values, layout, devices, data, memory, checkpoint to
    resume.

    out defaults to `runs/NAME`. tell: see gridformer.memory.fits.fit_problems. The plan's config
    is resolved: vocabulary and sequence length are those that the run uses. Raises ConfigError with
    all problems at once; DataError and CheckpointError for a folder that must not be used.
    """
    run, problems = _read(path, overrides)
    problems += check_devices(run.train.device, run.layout.n_processes, nproc)
    problems += compile_problems(run)
    if problems:
        raise ConfigError(problems)
    decisions = decide_run(run)
    problems = fit_problems(run, tell, decisions)
    if problems:
        raise ConfigError(problems)
    out = out or Path("runs") / run.name
    if out.exists() and not out.is_dir():
        raise ConfigError([f"--out {out} is a file: name a folder"])
    resume = checkpoint.latest(out)
    if resume is None:
        return Plan(run, out, None, 0, decisions)
    manifest = checkpoint.verify(resume, contents=False)
    checkpoint.check_same_run(manifest, run, resume)
    return Plan(run, out, resume, manifest.step, decisions)


def read_run(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """A run file, resolved and checked against its data, wherever it is to run.

    Raises ConfigError with all problems at once.
    """
    run, problems = _read(path, overrides)
    if problems:
        raise ConfigError(problems)
    return run


def read_run_without_data(
    path: Path | str, overrides: list[str] | tuple[str, ...] = ()
) -> RunConfig:
    """The same, where its data need not be here: model.vocab_size and lengths are then its own.

    path: may also be the name of a shipped model, with all else by override. Raises ConfigError.
    """
    if str(path) in model_names() and not Path(path).exists():
        sections = {"name": str(path), "model": str(path), "data": {"path": Path()}}
        run = parse_run(sections, overrides)
        check(run)
        return run
    run = load_run(path, overrides)
    if run.data.path.exists():
        return read_run(path, overrides)
    if not run.model.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size=0 takes the data's, and data.path={run.data.path} does not "
                "exist: say model.vocab_size, or name a folder written by `gridformer prepare`"
            ]
        )
    check(run)
    return run


def _read(path: Path | str, overrides: list[str] | tuple[str, ...]) -> tuple[RunConfig, list[str]]:
    run = load_run(path, overrides)
    problems: list[str] = []
    try:
        run = resolve(run, TokenFolder.open(run.data.path))
    except (DataError, ConfigError) as error:
        problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    try:
        check(run)
    except ConfigError as error:
        problems += error.problems
    return run, problems


def load_for_inference(run_dir: Path) -> tuple[RunConfig, Path]:
    """The resolved config and newest checkpoint of a run directory, verified.

    `run_dir` may also be one of its checkpoints. Raises CheckpointError.
    """
    is_one = (run_dir / checkpoint.MANIFEST).is_file()
    folder = run_dir if is_one else checkpoint.latest(run_dir)
    if folder is None:
        raise CheckpointError(
            f"{run_dir} holds no checkpoint: train first, for instance "
            f"`gridformer train configs/runs/demo.yaml --out {run_dir}`"
        )
    manifest = checkpoint.verify(folder)
    return RunConfig.model_validate(manifest.run), folder
