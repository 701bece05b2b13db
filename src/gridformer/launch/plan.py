"""From a run file to a plan: checks everything before any process starts.

Of a run that torchrun or srun started, rank 0 makes the plan, and the others receive it. Every rank
looks at its GPU and, as the first one of a machine, at its memory and at the lock of rank 0. If the
run cannot start, rank 0 alone says why, and all end with its exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.config import RunConfig, find_run_file, load_run, model_names, parse_run
from gridformer.data import RunData, resolve
from gridformer.launch.run_lock import RunLock, holder_of
from gridformer.mesh.gpus import CPU, GPU, device_or_problem, identity, own_gpu
from gridformer.mesh.launch_env import RankEnv
from gridformer.mesh.process_group import check_devices
from gridformer.mesh.rendezvous import collect, gather, receive, share, wait_until_heard
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError, DataError, UserError, installed
from gridformer.utils.units import ESTIMATED_TOKENS

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from gridformer.memory.room import Room, Tell
    from gridformer.parallel.auto.decisions import Decisions
    from gridformer.train.plan import Plan

_PREFLIGHT_S = 5.0  # no more ranks are traced after this number of seconds
# Names in the store of the rendezvous.
_CONFIG, _MACHINES, _FOLDER, _SEEN, _PLAN = "config", "machines", "folder", "seen", "plan"
# Rank 0 waits this long for the others to hear of a refusal before it ends.
_HEARD_S = 60.0
# The others end this much later. torchrun ends all of its workers when it finds that one has ended,
# and rank 0 must have said by then why the run cannot start.
_LINGER_S = 5.0
# A machine may see what another one has written to shared storage this much later.
_SEEN_S = 60.0
_LOOK_S = 0.1


def plan_run(
    path: Path | str,
    overrides: list[str] | tuple[str, ...] = (),
    nproc: int | None = None,
    out: Path | None = None,
    tell: Tell | None = None,
    lock: RunLock | None = None,
) -> Plan:
    """Reads a run file and checks its values, layout, devices, data, memory and last checkpoint.

    Args:
        path: A run file, or the name of a shipped one, with `dotted.key=value` overrides.
        nproc: Number of processes that the user asked for; None accepts what the layout needs.
        out: Run directory; None means `runs/NAME`.
        tell: Receives progress messages.
        lock: Takes the run directory first; None is for a plan that is not executed.

    Raises:
        UserError: The run cannot start. A ConfigError lists all problems of values, layout, data
            and devices at once; memory and run directory are checked only when there are none.
    """
    return plan_checked(check_run(path, overrides, nproc), out, tell, lock=lock)


def check_run(
    path: Path | str,
    overrides: list[str] | tuple[str, ...] = (),
    nproc: int | None = None,
) -> RunConfig:
    """Reads a run file, resolves it, and checks its values, layout, devices and data.

    It loads torch, which takes seconds, only if the run asks for GPUs or for torch.compile. With
    `train.elastic` the layout of the result is one for the processes that are there.

    Raises:
        ConfigError: It lists all problems at once.
    """
    run, problems = _read(path, overrides)
    if run.train.elastic and not problems:
        from gridformer.launch.elastic import with_processes

        run, nproc = with_processes(run, nproc), None
    n = run.layout.n_processes
    problems += check_devices(run.train.device, n, nproc, run.train.elastic)
    if run.train.bleu_every and not installed("sacrebleu"):
        problems.append(
            f"train.bleu_every={run.train.bleu_every} needs sacrebleu: pip install "
            "'gridformer[bleu]', or use train.bleu_every=0"
        )
    if {*run.train.loggers} - {"tensorboard"}:
        from gridformer.train.loggers import missing_packages

        problems += missing_packages(run.train.loggers)
    if run.train.compile is True:
        from gridformer.train.compile import compile_problems

        problems += compile_problems(run)
    if run.train.attention not in ("auto", "math") and run.train.device == "auto":
        from gridformer.train.compile import device_of

        if device_of(run) == "cpu":
            problems.append(
                f"train.attention={run.train.attention} needs a GPU for each process, which there "
                "are not: use train.attention=auto"
            )
    if problems:
        raise ConfigError(*problems)
    return run


# What a run writes first, and names of files that a run would replace or mix with.
_OF_RUNS = ("checkpoints", "metrics.jsonl", "heartbeat.json")
_OF_OTHERS = {
    "index.json": "folders of tokens",
    "config.json": "models of Hugging Face",
    "config.yaml": "folders of run files",
}
# What a run writes, and where something else than a file would be waited for or read without end.
_FILES = (
    *("lock", "config.yaml", "tokenizer.json", "metrics.jsonl", "metrics.tmp", "events.jsonl"),
    *("heartbeat.json", ".heartbeat.json.unfinished", "loss.png"),
)
_FOLDERS = ("checkpoints", "tensorboard")


def check_run_dir(out: Path) -> None:
    """Raises ConfigError for a path where the files of a run would replace others."""
    if not str(out) or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out} is a file: use the path of a folder")
    for name in (*_FILES, *_FOLDERS):
        path, what = out / name, "folder" if name in _FOLDERS else "file"
        fits = path.is_dir if name in _FOLDERS else path.is_file
        if not fits() and os.path.lexists(path) and not fits():  # another run may just write it
            raise ConfigError(f"--out {out}: {path} is no {what}, where a run has one: remove it")
    if any((out / name).exists() for name in _OF_RUNS):
        return
    for name, what in _OF_OTHERS.items():
        if (out / name).exists():
            raise ConfigError(
                f"--out {out} has a file {name}, as {what} have it, and no run was there "
                "before: use a folder that is empty or new"
            )


def plan_checked(
    run: RunConfig,
    out: Path | None = None,
    tell: Tell | None = None,
    room: Room | None = None,
    lock: RunLock | None = None,
) -> Plan:
    """Plans a run that `check_run` has returned, as `plan_run` does.

    `room` is the budget of each process; None means the budget on this machine.
    """
    from gridformer.memory.room import beyond_saving, room_of

    # A run that is far too large for its budget is refused before torch is loaded.
    budget = room or room_of(run)
    if budget and (problems := beyond_saving(run, budget)):
        raise ConfigError(*problems)
    from gridformer.checkpoint import weights
    from gridformer.checkpoint.checkpoint import check_copy, check_same_run
    from gridformer.checkpoint.copies import choose_checkpoint, clash, fetch_newest
    from gridformer.checkpoint.store import LocalStore
    from gridformer.data.run_data import fingerprint
    from gridformer.memory.budget import fit_problems
    from gridformer.memory.room import silent
    from gridformer.parallel.auto.decisions import decide_run
    from gridformer.train.metrics import lacks_evaluation
    from gridformer.train.plan import Plan

    decisions = decide_run(run)
    problems = fit_problems(run, tell or silent, decisions, room)
    problems = problems or preflight_problems(run, tell or silent, decisions)
    if problems:
        raise ConfigError(*problems)
    out = out or Path("runs") / run.name
    check_run_dir(out)
    if run.train.checkpoint_to and (problem := clash(run.train.checkpoint_to, out)):
        raise ConfigError(problem)
    data = fingerprint(RunData.open(run.data))
    check = partial(check_copy, run, data)
    if lock is not None:
        lock.take(out, lambda doing: (tell or silent)("", doing))
        LocalStore(out).sweep()
        if run.train.checkpoint_to:
            (tell or silent)("", f"looking for a newer checkpoint at {run.train.checkpoint_to}")
            fetch_newest(run.train.checkpoint_to, out, check)
    chosen = choose_checkpoint(run.train, out, check, replaces=lock is not None)
    plan = Plan(run, out, None, 0, decisions, data=data)
    if chosen is None:
        return replace(plan, start=weights.start_of(run))
    check_same_run(chosen.manifest, run, chosen.folder, data)
    plan = plan.resuming(chosen.folder, chosen.manifest, chosen.older, chosen.damaged)
    last = plan.resume_step == run.train.steps
    return replace(plan, unevaluated=last and lacks_evaluation(out, run.train.steps))


def plan_together(
    place: RankEnv,
    path: Path | str,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    out: Path | None = None,
    tell: Tell | None = None,
    lock: RunLock | None = None,
) -> Plan:
    """Returns the plan of a run, as `plan_run` does on rank 0. All of its processes call this.

    Raises:
        UserError: On rank 0, the run cannot start.
        SystemExit: On the others, the run cannot start.
    """
    if place.rank:
        run = RunConfig.model_validate(_received(place, _CONFIG))
        collect(place, _MACHINES, _machine(run, place))
        folder = _received(place, _FOLDER)
        if folder is not None and not place.local_rank:
            share(place, f"{_SEEN}/{place.rank}", _not_seen(**folder))
        plan: Plan = _plans().validate_python(_received(place, _PLAN))
        return plan
    name = _CONFIG
    try:
        run = check_run(path, list(overrides), nproc)
        share(place, name, json.dumps({"is": run.model_dump(mode="json")}))
        name = _FOLDER
        machines = [json.loads(text) for text in collect(place, _MACHINES, _machine(run, place))]
        plan = plan_checked(run, out, tell, _room(machines), lock)
        token = lock.token if lock is not None else ""
        folder = {"out": str(plan.out), "token": token} if token else None
        share(place, name, json.dumps({"is": folder}))
        name = _PLAN
        if folder is not None:
            others = [rank for rank, machine in enumerate(machines) if rank and machine["first"]]
            if hosts := [host for host in dict.fromkeys(gather(place, _SEEN, others)) if host]:
                raise ConfigError(
                    f"{plan.out} is not the same folder on {', '.join(hosts)} as on "
                    f"{socket.gethostname()}: set --out to a folder on storage that all machines "
                    "share"
                )
        share(place, name, json.dumps({"is": _plans().dump_python(plan, mode="json")}))
    except Exception as error:
        code = 2 if isinstance(error, UserError) else 1
        share(place, name, json.dumps({"refused": code}))
        wait_until_heard(place, name, _HEARD_S)
        raise
    return plan


def _machine(run: RunConfig, place: RankEnv) -> str:
    """Returns the problems, GPU and memory of this process's machine, as JSON for rank 0."""
    train, n = run.train, run.layout.n_processes
    if problems := check_devices(train.device, n, None, train.elastic):
        return json.dumps({"problems": problems})
    gpu = None if train.device == "cpu" else own_gpu(place)
    first = not place.local_rank
    told: dict[str, Any] = {"problems": [], "gpu": identity(gpu, place.rank), "first": first}
    if first:
        from gridformer.memory.room import room_of

        if room := room_of(run):
            told["room"] = [room.n_bytes, room.why]
    return json.dumps(told)


def _room(machines: Sequence[dict[str, Any]]) -> Room | None:
    """Returns the smallest budget of a process on any machine, or None if none is known."""
    from gridformer.memory.room import Room

    problems = [problem for machine in machines for problem in machine["problems"]]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    device = device_or_problem([machine["gpu"] for machine in machines])
    if device not in (CPU, GPU):
        raise ConfigError(device)
    rooms = [Room(*machine["room"]) for machine in machines if "room" in machine]
    return min(rooms, key=lambda room: room.n_bytes, default=None)


def _not_seen(out: str, token: str) -> str:
    """Returns the name of this machine if it does not see the lock of the run directory soon."""
    deadline = time.monotonic() + _SEEN_S
    while (holder := holder_of(Path(out))) is None or holder.token != token:
        if time.monotonic() > deadline:
            return socket.gethostname()
        time.sleep(_LOOK_S)
    return ""


def _received(place: RankEnv, name: str) -> Any:
    """Returns what rank 0 shares, or ends this process if rank 0 has refused the run."""
    message = json.loads(receive(place, name))
    if "refused" in message:
        time.sleep(_LINGER_S)
        raise SystemExit(message["refused"])
    return message["is"]


def _plans() -> TypeAdapter[Plan]:
    """Returns the converter of plans to JSON and back."""
    from pydantic import TypeAdapter

    from gridformer.train.plan import Plan

    return TypeAdapter(Plan)


def read_run(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads a run file, resolves it, and checks its layout and data, but not the local devices.

    Raises:
        ConfigError: It lists all problems at once.
    """
    run, problems = _read(path, overrides)
    if problems:
        raise ConfigError(*problems)
    return run


def read_run_without_data(
    path: Path | str,
    overrides: list[str] | tuple[str, ...] = (),
    note: Callable[[str], None] = lambda text: print(f"Note: {text}.", file=sys.stderr),
) -> RunConfig:
    """Like `read_run`, but works without the data; vocabulary and lengths are then the file's.

    The path may also name a shipped model, whose settings all come from `overrides`. Without
    data.seq_len the length is at most ESTIMATED_TOKENS, as few train at a context of 131,072
    tokens; `note` receives a sentence about that.

    Raises:
        ConfigError: The run is invalid, or the data does not exist and model.vocab_size is 0.
    """
    if str(path) in model_names() and not Path(path).is_file():
        sections = {"name": str(path), "model": str(path), "data": {"path": Path()}}
        run = parse_run(sections, overrides)
        unknown = f"{path} has the vocabulary of the data: add model.vocab_size, such as 32000"
    else:
        path = find_run_file(path, or_model=True)
        run = load_run(path, overrides)
        if not run.data.missing:
            return read_run(path, overrides)
        unknown = (
            f"model.vocab_size=0 means the vocabulary of the data, but {run.data.missing} does not "
            "exist: set model.vocab_size, or set data.path to a folder written by "
            "`gridformer prepare`"
        )
    if not run.model.vocab_size:
        raise ConfigError(unknown)
    if not run.data.seq_len and run.seq_len > ESTIMATED_TOKENS:
        note(
            f"data.seq_len is not set: this is for sequences of {ESTIMATED_TOKENS:,} tokens, and "
            f"{run.model.name} reads up to {run.seq_len:,}"
        )
        keys = ["seq_len"] + ["source_len"] * (run.model.two_stacks and not run.data.source_len)
        data = run.data.model_copy(update=dict.fromkeys(keys, ESTIMATED_TOKENS))
        run = run.model_copy(update={"data": data})
    return check_layout(run)


def _read(path: Path | str, overrides: list[str] | tuple[str, ...]) -> tuple[RunConfig, list[str]]:
    """Returns the run, resolved if its data allows it, and the problems of data and layout."""
    run = load_run(path, overrides)
    problems: list[str] = []
    try:
        run = resolve(run, RunData.open(run.data))
    except (DataError, ConfigError) as error:
        problems += error.args
    try:
        run = check_layout(run)
    except ConfigError as error:
        problems += error.problems
    return run, problems


def preflight_problems(run: RunConfig, tell: Tell, decisions: Decisions) -> list[str]:
    """Checks a step of a run that will start on several GPUs, on a few of its ranks.

    An error of the step is told and refuses nothing: versions of torch differ in what they can do
    with tensors without memory, and a step that fails on GPUs, too, ends all processes at once.
    """
    from gridformer.memory.room import on_gpu

    if run.layout.n_processes == 1 or not on_gpu(run):
        return []
    from gridformer.check import check_step
    from gridformer.check.problems import KINDS, rank_ranges

    tell("", "checking that the messages of a step fit together")
    problems = []
    for one in check_step(run, decisions, most=0, limit_s=_PREFLIGHT_S).problems:
        axis = f", axis {one.axis}" if one.axis else ""
        where = f"{rank_ranges(one.ranks)}{axis}, at {one.place}"
        sentence = f"{KINDS[one.kind]} ({where}): {one.text}; {one.remedy}"
        if one.kind == "error":
            tell(f"{sentence}. The run begins all the same, as it may work on GPUs.", "")
        elif one.stops:
            problems.append(sentence)
    return problems
