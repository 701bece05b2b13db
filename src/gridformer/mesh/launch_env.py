"""Determines whether a launcher started this process as one of several, and as which rank.

The launchers are `launch`, torchrun, srun, mpirun, and all others that set RANK and WORLD_SIZE.
This reads only environment variables, so importing and calling it is cheap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gridformer.mesh.slurm_notation import expand_counts, expand_nodes
from gridformer.utils.errors import UserError

# Slurm's step ids from here on mean "batch script", "extern", "interactive shell" and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The variables that `launch` sets for the workers that it starts.
STORE_FILE = "GRIDFORMER_STORE_FILE"
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE_FILE)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MPI_PORT = 29_400  # for processes of mpirun on one machine; torchrun's is 29500


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

    If `launch` started the processes, they rendezvous in the file `store_file`, which is in a
    folder that only this user can open, and otherwise at port `master_port` of host `master_addr`.

    `knows_local` is False if the launcher did not say which process of its machine this one is. It
    then counts as the only one there.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    by: Literal["gridformer.launch", "torchrun", "srun", "mpirun", "the launcher"]
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

    Args:
        environ: Environment variables.

    Raises:
        UserError: A variable is not a number, or the variables contradict each other, or they say
            that this is one of several processes but not where these meet.
    """
    mpi = _mpi_names(environ)
    if all(environ.get(name) for name in _LAUNCHED):
        place = _from_launch(environ)
    elif all(environ.get(name) for name in _TORCHRUN):
        place = _from_torchrun(environ)
    elif _is_one_of_several(environ):
        place = _from_rank(environ)
    elif mpi and not (_is_srun_task(environ) and _is_the_same_in_slurm(environ, mpi)):
        # Before Slurm, because mpirun starts a daemon on each node through srun, whose variables
        # the processes inherit.
        place = _from_mpi(environ, mpi)
    elif _is_srun_task(environ):
        place = _from_srun(environ)
    else:
        return None
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
        raise UserError(
            f"{place.by} describes this process as rank {place.rank} of {place.size} (on this "
            f"machine {place.local_rank} of {place.local_size}), which is impossible: start it "
            "with torchrun or srun, or unset RANK and WORLD_SIZE"
        )
    return place if _used is None else replace(place, size=min(place.size, _used))


def _from_launch(environ: Mapping[str, str]) -> RankEnv:
    size = _number(environ, "WORLD_SIZE")
    return RankEnv(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_size=size,
        by="gridformer.launch",
        store_file=environ[STORE_FILE],
    )


def _from_torchrun(environ: Mapping[str, str]) -> RankEnv:
    size = _number(environ, "WORLD_SIZE")
    return RankEnv(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_size=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        by="torchrun",
    )


def _is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE, set by a Kubernetes operator or a script, say so."""
    both = environ.get("RANK") and environ.get("WORLD_SIZE")
    return bool(both) and _number(environ, "WORLD_SIZE") > 1


def _from_rank(environ: Mapping[str, str]) -> RankEnv:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and LOCAL_RANK where it is known."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={size} say that this is one of {size} processes, but "
            f"{' and '.join(missing)}, where they meet, {'are' if missing[1:] else 'is'} not set: "
            "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there (such as "
            "29500), start the processes with torchrun or srun, or unset RANK and WORLD_SIZE for a "
            "run that starts its own processes"
        )
    place = RankEnv(
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        by="the launcher",
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        knows_local=False,
    )
    if environ.get("LOCAL_RANK"):
        local, known = _number(environ, "LOCAL_RANK"), environ.get("LOCAL_WORLD_SIZE")
        local_size = _number(environ, "LOCAL_WORLD_SIZE") if known else size
        return replace(place, local_rank=local, local_size=local_size, knows_local=True)
    if _is_srun_task(environ) and environ["SLURM_PROCID"] == environ["RANK"]:
        tasks = _from_srun(environ)
        local, local_size = tasks.local_rank, tasks.local_size
        return replace(place, local_rank=local, local_size=local_size, knows_local=True)
    if place.master_addr in _LOOPBACK:  # then all processes are on this machine
        return replace(place, local_rank=rank, local_size=size, knows_local=True)
    return place


def _mpi_names(environ: Mapping[str, str]) -> _Names | None:
    """Returns the variables of the MPI launcher that started this as one of several processes."""
    for names in sorted(_MPI, key=lambda names: names.local_rank not in environ):
        both = environ.get(names.rank) and environ.get(names.size)
        if both and _number(environ, names.size) > 1:
            return names
    return None


def _is_the_same_in_slurm(environ: Mapping[str, str], mpi: _Names) -> bool:
    """Whether srun itself set the variables of MPI, as `srun --mpi=pmi2` does."""
    here = (environ[mpi.rank], environ[mpi.size])
    return here == (environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"])


def _from_mpi(environ: Mapping[str, str], names: _Names) -> RankEnv:
    rank, size = _number(environ, names.rank), _number(environ, names.size)
    knows = bool(environ.get(names.local_rank) and environ.get(names.local_size))
    local_rank = _number(environ, names.local_rank) if knows else 0
    local_size = _number(environ, names.local_size) if knows else 1
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        raise UserError(
            f"mpirun started this as one of {size} processes on several machines, but MASTER_ADDR, "
            "where they meet, is not set: add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500` (Open "
            "MPI) or `-genv MASTER_ADDR HOST -genv MASTER_PORT 29500` (MPICH, Intel MPI) with the "
            "host of rank 0, or start the processes with torchrun or srun"
        )
    return RankEnv(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        by="mpirun",
        master_addr=address,
        master_port=_number(environ, "MASTER_PORT", _MPI_PORT),
        knows_local=knows,
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if not all(environ.get(n) for n in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")):
        return False
    if _number(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1


def _from_srun(environ: Mapping[str, str]) -> RankEnv:
    job = _number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    step = _number(environ, "SLURM_STEP_ID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    # Below the range of ephemeral ports, and different for each step of a job.
    port = 10_000 + (31 * job + step) % 20_000
    return RankEnv(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=counts[node] if node < len(counts) else size,
        master_addr=environ.get("MASTER_ADDR") or expand_nodes(nodes)[0],
        master_port=_number(environ, "MASTER_PORT", port),
        by="srun",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"the environment variable {name} is '{environ[name]}', which is not a number"
        ) from None
