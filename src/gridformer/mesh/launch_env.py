"""Determines whether `launch`, torchrun or srun started this process, and as which rank.

This reads only environment variables, so importing and calling it is cheap.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gridformer.utils.errors import UserError

# Slurm's step ids from here on mean "batch script", "extern", "interactive shell" and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The variables that `launch` sets for the workers that it starts.
STORE_FILE = "GRIDFORMER_STORE_FILE"
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", STORE_FILE)


@dataclass(frozen=True)
class Joined:
    """The place of this process in a run of `size` processes, `local_size` of them on this machine.

    If `launch` started the processes, they rendezvous in the file `store_file`, which is in a
    folder that only this user can open, and otherwise at port `master_port` of host `master_addr`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    by: Literal["gridformer.launch", "torchrun", "srun"]
    master_addr: str = ""
    master_port: int = 0
    store_file: str = ""


def joined(environ: Mapping[str, str] = os.environ) -> Joined | None:
    """Returns this process's place as its launcher set it, or None if no launcher started it.

    A batch script or a shell inside a Slurm allocation is not one of several tasks, so the result
    there is None and the run starts its own processes.

    Args:
        environ: environment variables.

    Raises:
        UserError: a variable is not a number, or the variables contradict each other.
    """
    if all(environ.get(name) for name in _LAUNCHED):
        place = _from_launch(environ)
    elif all(environ.get(name) for name in _TORCHRUN):
        place = _from_torchrun(environ)
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
    return place


def _from_launch(environ: Mapping[str, str]) -> Joined:
    size = _number(environ, "WORLD_SIZE")
    return Joined(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_size=size,
        by="gridformer.launch",
        store_file=environ[STORE_FILE],
    )


def _from_torchrun(environ: Mapping[str, str]) -> Joined:
    size = _number(environ, "WORLD_SIZE")
    return Joined(
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_size=_number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        by="torchrun",
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    if not all(environ.get(n) for n in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")):
        return False
    if _number(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1


def _from_srun(environ: Mapping[str, str]) -> Joined:
    job = _number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    step = _number(environ, "SLURM_STEP_ID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(environ.get("SLURM_NODEID") or 0)
    # Below the range of ephemeral ports, and different for each step of a job.
    port = 10_000 + (31 * job + step) % 20_000
    return Joined(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=counts[node] if node < len(counts) else size,
        master_addr=environ.get("MASTER_ADDR") or expand_nodes(nodes)[0],
        master_port=int(environ.get("MASTER_PORT") or port),
        by="srun",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(
            f"the environment variable {name} is '{environ[name]}', which is not a number"
        ) from None


# --------------------------------------------------------------------------- Slurm's notation


def expand_nodes(text: str) -> list[str]:
    """Expands `node[01-03,7],other` to `node01`, `node02`, `node03`, `node7` and `other`.

    Raises:
        UserError: the brackets do not match, or a range is malformed.
    """
    parts = re.split(r",(?![^\[]*\])", text)  # at commas outside brackets
    names = [name for part in parts for name in _expand_one(part)]
    if not all(re.fullmatch(r"[^\[\],\s]+", name) for name in names):
        raise UserError(f"Slurm's node list '{text}' cannot be read: set MASTER_ADDR yourself")
    return names


def _expand_one(text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", text)
    if not match:
        yield text
        return
    before, ranges, after = match.groups()
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not bounds:
            yield text  # it still has brackets, so the caller raises
            return
        first, last = bounds[1], bounds[2] or bounds[1]
        for number in range(int(first), int(last) + 1):
            for rest in _expand_one(after):
                yield f"{before}{number:0{len(first)}d}{rest}"


def expand_counts(text: str) -> list[int]:
    """Expands `4(x2),3` (tasks per node) to `[4, 4, 3]`; a malformed text gives an empty list."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
