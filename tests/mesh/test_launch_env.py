"""Which place a launcher gives a process, how attempts meet, and how a group is given up."""

import threading
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from gridformer.mesh.launch_env import RankEnv, first_node, rank_env, task_counts
from gridformer.mesh.process_group import abandon_process_groups
from gridformer.mesh.rendezvous import of_this_attempt
from gridformer.utils import torch_private
from gridformer.utils.errors import UserError

MEET = {"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
RANKED = {"RANK": "3", "WORLD_SIZE": "8"}
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "node[01-04]",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def local(place: RankEnv | None) -> tuple[int, int, bool]:
    assert place is not None
    assert (place.rank, place.size) == (3, 8)
    assert (place.master_addr, place.store_file) != ("", "")
    return place.local_rank, place.local_size, place.knows_local


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1, False)),
        ({"LOCAL_RANK": "1"}, (1, 8, True)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2, True)),
        ({"MASTER_ADDR": "127.0.0.1"}, (3, 8, True)),
        (SRUN, (1, 2, True)),
        ({**SRUN, "SLURM_PROCID": "0"}, (0, 1, False)),  # one task on a node started this process
    ],
)
def test_rank_and_world_size_are_joined(
    environ: dict[str, str], place: tuple[int, int, bool]
) -> None:
    assert local(rank_env({**MEET, **RANKED, **environ})) == place


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_without_a_place_to_meet_is_refused(missing: str) -> None:
    with pytest.raises(UserError, match=f"but {missing}, where they meet, is not set"):
        rank_env({**MEET, **RANKED, missing: ""})


@pytest.mark.parametrize("environ", [{"RANK": "3"}, {"WORLD_SIZE": "8"}, MEET])
def test_a_part_of_the_variables_says_nothing(environ: dict[str, str]) -> None:
    assert rank_env(environ) is None


def test_a_world_of_one_starts_its_own_processes() -> None:
    assert rank_env({**MEET, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert rank_env({**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


@pytest.mark.parametrize("mpi", [OMPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpirun_is_joined(mpi: dict[str, str]) -> None:
    place = rank_env({**mpi, **MEET})
    assert local(place) == (1, 2, True)
    assert place is not None
    assert (place.by, place.master_addr, place.master_port) == ("mpirun", "node01", 29500)
    # Its daemons on the nodes are tasks of srun, whose variables the processes inherit.
    daemon = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    assert rank_env({**mpi, **MEET, **daemon}) == place


def test_mpirun_on_one_machine_needs_no_address() -> None:
    alone = {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    place = rank_env(alone)
    assert local(place) == (3, 8, True)
    assert place is not None
    assert place.master_addr == "127.0.0.1"


@pytest.mark.parametrize("mpi", [OMPI, MPICH, {"PMI_RANK": "3", "PMI_SIZE": "8"}])
def test_mpirun_on_several_machines_needs_an_address(mpi: dict[str, str]) -> None:
    with pytest.raises(UserError, match="-x MASTER_ADDR=HOST -x MASTER_PORT=29500"):
        rank_env(mpi)


def test_srun_may_set_the_variables_of_mpi() -> None:
    place = rank_env({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "8"})
    assert place is not None
    assert (place.by, place.master_addr) == ("srun", "node01")


def test_numbers_are_checked() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE is 'many'"):
        rank_env({**MEET, "RANK": "1", "WORLD_SIZE": "many"})
    with pytest.raises(UserError, match="the launcher describes this process as rank 8 of 8"):
        rank_env({**MEET, "RANK": "8", "WORLD_SIZE": "8"})


def test_srun_is_joined() -> None:
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,3(x2)", "SLURM_STEP_NODELIST": "gpu[08-10]"}
    place, other_step = rank_env(uneven), rank_env({**uneven, "SLURM_STEP_ID": "3"})
    assert local(place) == (1, 3, True)
    assert place is not None
    assert other_step is not None
    assert (place.master_addr, place.by) == ("gpu08", "srun")
    assert 10_000 <= place.master_port < 30_000
    assert other_step.master_port != place.master_port


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},  # an sbatch script
        {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # the same, as some versions report it
        {"SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell
        {"SLURM_STEP_NUM_TASKS": ""},
    ],
)
def test_an_allocation_alone_is_not_joined(change: dict[str, str]) -> None:
    assert rank_env({**SRUN, **change}) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("alone", "alone"),
        ("node[01-03,7],other", "node01"),
        ("other,node[01-03]", "other"),
        ("r[1-2]n[08-09]x,b", "r1n08x"),
    ],
)
def test_the_first_node_of_slurms_list(text: str, name: str) -> None:
    assert first_node(text) == name


def test_what_slurm_says_may_be_unreadable() -> None:
    for text in ("", "node[1-3", "node[a-b]", "n]1["):
        with pytest.raises(UserError, match="MASTER_ADDR"):
            first_node(text)
    assert [task_counts(text) for text in ("4(x2),3", "8", "?")] == [[4, 4, 3], [8], []]
    with pytest.raises(UserError, match="SLURM_PROCID is 'x'"):
        rank_env({**SRUN, "SLURM_PROCID": "x"})


def test_attempts_do_not_meet() -> None:
    """Names of an earlier attempt, of other ranks, stay in the store that torchrun keeps."""
    store = dist.HashStore()
    names = []
    for size in (3, 2, 3):
        found: dict[int, Any] = {}

        def join(rank: int, size: int = size, found: dict[int, Any] = found) -> None:
            found[rank] = of_this_attempt(store, rank, size)

        threads = [Thread(target=join, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert sorted(found) == [*range(size)]
        assert not found[0].check(["said"]), "an earlier attempt has said it"
        found[size - 1].set("said", str(size))
        assert [one.get("said") for one in found.values()] == [str(size).encode()] * size
        names.append(found)


def test_giving_up_nccl_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits neither for a destroy nor for an abort that hangs."""
    called = []
    never = threading.Event()

    def abort() -> None:
        called.append("abort")
        never.wait(600.0)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("destroy"))
    monkeypatch.setattr(torch_private, "abort_groups", abort)
    abandon_process_groups()
    assert called == ["abort"]
    never.set()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    abandon_process_groups()
    assert called == ["abort"], "gloo's sockets close by themselves"
