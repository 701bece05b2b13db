"""Plans a run that torchrun or srun started: rank 0 plans it, and the others receive its plan.

Every rank only looks at its own machine: at its GPUs and, on the first rank of a machine, at its
memory and at the lock that rank 0 has taken. If the run cannot start, rank 0 alone says why, and
all ranks end with its exit code.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.config import RunConfig
from gridformer.launch.plan import check_run, plan_checked
from gridformer.launch.run_lock import holder_of
from gridformer.mesh.gpus import CPU, GPU, device_or_problem, identity, own_gpu
from gridformer.mesh.launch_env import RankEnv
from gridformer.mesh.process_group import check_devices
from gridformer.mesh.rendezvous import collect, gather, receive, share, wait_until_heard
from gridformer.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from gridformer.launch.run_lock import RunLock
    from gridformer.memory.room import Room, Tell
    from gridformer.train.plan import Plan

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


def plan_together(
    place: RankEnv,
    path: Path | str,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    out: Path | None = None,
    tell: Tell | None = None,
    lock: RunLock | None = None,
) -> Plan:
    """Returns the plan of a run. All of its processes call this before they form a group.

    Args:
        place: The place of this process in the run.
        path, overrides, nproc, out, tell, lock: Arguments of `gridformer.launch.plan.plan_run`, of
            which only rank 0's count.

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
            _check_folder(plan.out, gather(place, _SEEN, others))
        share(place, name, json.dumps({"is": _plans().dump_python(plan, mode="json")}))
    except Exception as error:
        code = 2 if isinstance(error, UserError) else 1
        share(place, name, json.dumps({"refused": code}))
        wait_until_heard(place, name, _HEARD_S)
        raise
    return plan


def _machine(run: RunConfig, place: RankEnv) -> str:
    """Returns the problems, GPU and memory of this process's machine, as JSON for rank 0."""
    elastic = run.train.elastic
    problems = check_devices(run.train.device, run.layout.n_processes, None, elastic)
    if problems:
        return json.dumps({"problems": problems})
    gpu = None if run.train.device == "cpu" else own_gpu(place)
    first = not place.local_rank
    told: dict[str, Any] = {"problems": [], "gpu": identity(gpu, place.rank), "first": first}
    if place.local_rank:
        return json.dumps(told)
    from gridformer.memory.room import room_of

    room = room_of(run)
    return json.dumps({**told, **({"room": [room.n_bytes, room.why]} if room else {})})


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


def _check_folder(out: Path, not_seen: Sequence[str]) -> None:
    """Checks that all machines see the run directory."""
    if hosts := [host for host in dict.fromkeys(not_seen) if host]:
        raise ConfigError(
            f"{out} is not the same folder on {', '.join(hosts)} as on {socket.gethostname()}: "
            "set --out to a folder on storage that all machines share"
        )


def _received(place: RankEnv, name: str) -> Any:
    """Returns what rank 0 shares, or ends this process if rank 0 has refused the run."""
    message = json.loads(receive(place, name))
    if "refused" in message:
        time.sleep(_LINGER_S)
        raise SystemExit(message["refused"])
    return message["is"]


@cache
def _plans() -> TypeAdapter[Plan]:
    """Returns the converter of plans to JSON and back."""
    from pydantic import TypeAdapter

    from gridformer.train.plan import Plan

    return TypeAdapter(Plan)
