"""From a run file to a plan that can start: everything is checked before any process does."""

from __future__ import annotations

from pathlib import Path

from gridformer.checkpoint import checkpoint
from gridformer.config import RunConfig, load_run, model_names, parse_run
from gridformer.data import TokenFolder, resolve
from gridformer.memory.budget import Tell, fit_problems, silent
from gridformer.mesh.process_group import check_devices
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.validation import check
from gridformer.train.compile import compile_problems
from gridformer.train.plan import Plan
from gridformer.utils.errors import ConfigError, DataError


def plan_run(
    path: Path | str,
    overrides: list[str] | tuple[str, ...] = (),
    nproc: int | None = None,
    out: Path | None = None,
    tell: Tell = silent,
) -> Plan:
    """Read a run file and check all of it: values, layout, devices, data, memory, checkpoint to
    resume.

    out defaults to `runs/NAME`. tell: see gridformer.memory.budget.fit_problems. The plan's config
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
