"""Determines whether a launcher started this process as one of several, and as which rank.

The launchers are `launch`, torchrun, srun, mpirun, and all others that set RANK and WORLD_SIZE.
Only environment variables are read, so importing and calling this is cheap.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from gridformer.utils.errors import UserError

# Slurm's step ids from here on mean "batch script", "extern", "interactive shell" and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
STORE_FILE = "GRIDFORMER_STORE_FILE"  # `launch` sets it for the workers that it starts
_MPI_PORT = 29_400  # for processes of mpirun on one machine; torchrun's is 29500

Launcher = Literal["gridformer.launch", "torchrun", "srun", "mpirun", "the launcher"]


class _Names(NamedTuple):
    """The variables of an MPI launcher: rank, size, and both among the processes of a machine."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_MPI = (
    # Open MPI
    _Names(*(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    _Names("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # Cray
)


@dataclass(frozen=True)
class RankEnv:
    """The place of this process in a run of `size` processes, `local_size` of them on this machine.

    Processes that `launch` started meet in the file `store_file`, which is in a folder that only
    this user can open, and others at port `master_port` of host `master_addr`. `knows_local` is
    False if the launcher did not say which process of its machine this one is; it then counts as
    the only one there.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    by: Launcher
    master_addr: str = ""
    master_port: int = 0
    store_file: str = ""
    knows_local: bool = True


_used: int | None = None  # how many processes take part


def use_only(n_processes: int) -> None:
    """Lets only the first `n_processes` processes that the launcher started form the run."""
    global _used
    _used = n_processes


def rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Returns this process's place as its launcher set it, or None if no launcher started it.

    A batch script or a shell inside a Slurm allocation is not one of several tasks, so the result
    there is None and the run starts its own processes. RANK=0 and WORLD_SIZE=1 alone do not count
    as a launcher either.

    Raises:
        UserError: A variable is not a number, or the variables contradict each other, or they say
            that this is one of several processes but not where these meet.
    """
    env = _Environ(environ)
    some = [names for names in _MPI if environ.get(names.rank) and environ.get(names.size)]
    some.sort(key=lambda names: names.local_rank not in environ)  # those with a local rank first
    mpi = next((names for names in some if env.number(names.size, 1) > 1), None)
    if env.has("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE_FILE):
        place = env.place("gridformer.launch", store_file=environ[STORE_FILE])
    elif env.has("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        place = env.place("torchrun", **env.address())
    elif env.has("RANK", "WORLD_SIZE") and env.number("WORLD_SIZE") > 1:
        place = _from_rank(env)
    elif mpi and not (env.is_srun_task and _set_by_srun(environ, mpi)):
        # Before Slurm, because mpirun starts a daemon on each node through srun, whose variables
        # the processes inherit.
        place = _from_mpi(env, mpi)
    elif env.is_srun_task:
        place = _from_srun(env)
    else:
        return None
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
        raise UserError(
            f"{place.by} describes this process as rank {place.rank} of {place.size} (on this "
            f"machine {place.local_rank} of {place.local_size}), which is impossible: start it "
            "with torchrun or srun, or unset RANK and WORLD_SIZE"
        )
    return place if _used is None else replace(place, size=min(place.size, _used))


class _Environ:
    """Environment variables, an empty one counting as not set."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def has(self, *names: str) -> bool:
        return all(self.values.get(name) for name in names)

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and not self.has(name):
            return default
        try:
            return int(self.values[name])
        except ValueError:
            raise UserError(
                f"the environment variable {name} is '{self.values[name]}', which is not a number"
            ) from None

    def place(self, by: Launcher, **rest: Any) -> RankEnv:
        """Returns the place that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE describe."""
        rank, size = self.number("RANK"), self.number("WORLD_SIZE")
        local_size = size if self.has(STORE_FILE) else self.number("LOCAL_WORLD_SIZE", size)
        return RankEnv(rank, size, self.number("LOCAL_RANK"), local_size, by, **rest)

    def address(self, host: str = "", port: int | None = None) -> dict[str, Any]:
        host = self.values.get("MASTER_ADDR") or host
        return {"master_addr": host, "master_port": self.number("MASTER_PORT", port)}

    @property
    def is_srun_task(self) -> bool:
        return (
            self.has("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
            and self.number("SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
            and self.number("SLURM_STEP_NUM_TASKS", 1) > 1
        )


def _from_rank(env: _Environ) -> RankEnv:
    """Reads RANK and WORLD_SIZE, set by a Kubernetes operator or a script."""
    rank, size = env.number("RANK"), env.number("WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.has(name)]
    if missing:
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={size} say that this is one of {size} processes, but "
            f"{' and '.join(missing)}, where they meet, {'are' if missing[1:] else 'is'} not set: "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there (such as "
            "29500), start the processes with torchrun or srun, or unset RANK and WORLD_SIZE for a "
            "run that starts its own processes"
        )
    address = env.address()
    if env.has("LOCAL_RANK"):
        return env.place("the launcher", **address)
    local = 0, 1
    task = env.is_srun_task and env.values["SLURM_PROCID"] == env.values["RANK"]
    if task:
        tasks = _from_srun(env)
        local = tasks.local_rank, tasks.local_size
    on_one_machine = address["master_addr"] in ("localhost", "127.0.0.1", "::1")
    if on_one_machine and not task:
        local = rank, size
    return RankEnv(
        rank, size, *local, "the launcher", **address, knows_local=task or on_one_machine
    )


def _set_by_srun(environ: Mapping[str, str], mpi: _Names) -> bool:
    """Whether srun itself set the variables of MPI, as `srun --mpi=pmi2` does."""
    here = (environ[mpi.rank], environ[mpi.size])
    return here == (environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"])


def _from_mpi(env: _Environ, names: _Names) -> RankEnv:
    rank, size = env.number(names.rank), env.number(names.size)
    knows = env.has(names.local_rank, names.local_size)
    local = (env.number(names.local_rank), env.number(names.local_size)) if knows else (0, 1)
    address = env.address("127.0.0.1" if local[1] == size else "", _MPI_PORT)
    if not address["master_addr"]:
        raise UserError(
            f"mpirun started this as one of {size} processes on several machines, but MASTER_ADDR, "
            "where they meet, is not set: add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500` (Open "
            "MPI) or `-genv MASTER_ADDR HOST -genv MASTER_PORT 29500` (MPICH, Intel MPI) with the "
            "host of rank 0, or start the processes with torchrun or srun"
        )
    return RankEnv(rank, size, *local, "mpirun", **address, knows_local=knows)


def _from_srun(env: _Environ) -> RankEnv:
    values, size = env.values, env.number("SLURM_STEP_NUM_TASKS")
    nodes = values.get("SLURM_STEP_NODELIST") or values.get("SLURM_JOB_NODELIST") or "localhost"
    counts = task_counts(values.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = env.number("SLURM_NODEID", 0)
    # Below the range of ephemeral ports, and different for each step of a job.
    port = 10_000 + (31 * env.number("SLURM_JOB_ID", 0) + env.number("SLURM_STEP_ID")) % 20_000
    host = "" if values.get("MASTER_ADDR") else first_node(nodes)
    return RankEnv(
        env.number("SLURM_PROCID"),
        size,
        env.number("SLURM_LOCALID"),
        counts[node] if node < len(counts) else size,
        "srun",
        **env.address(host, port),
    )


def first_node(text: str) -> str:
    """Returns the first name of Slurm's list of nodes: `node01` of `node[01-03,7],other`.

    Raises:
        UserError: The brackets do not match, or a range is malformed.
    """
    name = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", re.split(r",(?![^\[\]]*\])", text)[0])
    if not re.fullmatch(r"[^\[\],\s]+", name):
        raise UserError(f"Slurm's node list '{text}' cannot be read: set MASTER_ADDR yourself")
    return name


def task_counts(text: str) -> list[int]:
    """Expands `4(x2),3` (tasks per node) to `[4, 4, 3]`; a malformed text gives an empty list."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
