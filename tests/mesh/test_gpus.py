"""Which GPU a process of a run uses, from what it sees; torch's answers are made up."""

import json

import pytest

from gridformer.mesh.gpus import (
    CPU,
    GPU,
    device_or_problem,
    gpus_here,
    identity,
    own_gpu,
    processes_on_a_gpu,
    too_few_gpus,
)
from gridformer.mesh.launch_env import RankEnv
from gridformer.mesh.process_group import check_devices

ENVIRON = {"RANK": "2", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


def see(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: n > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: n)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)


def place_of(by: str = "torchrun", local: int = 2, of: int = 4, knows: bool = True) -> RankEnv:
    return RankEnv(2, 8, local, of, by, "node01", 29500, knows_local=knows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "place", "gpu", "here"),
    [
        (4, place_of(), 2, [0, 1, 2, 3]),
        (8, place_of(), 2, [0, 1, 2, 3]),
        (0, place_of(), None, []),
        (2, place_of(), None, []),
        (1, place_of("srun"), 0, [0]),  # its own, as Slurm and wrapper scripts arrange it
        (1, place_of("torchrun"), 0, [0]),
        (1, place_of("gridformer.launch"), None, []),  # the others see the same one
        (1, place_of("srun", local=0, of=1), 0, [0]),
        (1, place_of("the launcher", 0, 1, knows=False), 0, [0]),
        (8, place_of("the launcher", 0, 1, knows=False), None, []),
    ],
)
def test_own_gpu(
    visible: int, place: RankEnv, gpu: int | None, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, visible)
    assert own_gpu(place) == gpu
    assert gpus_here(place, 8) == here
    assert (too_few_gpus(place, place.local_size) == []) == (gpu is not None)


def test_a_run_that_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2)
    assert own_gpu(None) == 0
    assert gpus_here(None, 2) == [0, 1]
    assert gpus_here(None, 3) == []


def test_processes_share_gpus_if_nccl_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 2)
    monkeypatch.setattr("gridformer.mesh.gpus.nccl_version", lambda: (2, 30, 7))
    assert too_few_gpus(None, 8)
    assert processes_on_a_gpu(None, 8) == 1
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert too_few_gpus(None, 8) == []
    assert check_devices("cuda", 8) == []
    assert gpus_here(None, 8) == [0, 1]
    assert processes_on_a_gpu(None, 7) == 4
    for by in ("gridformer.launch", "torchrun"):
        gpus = [own_gpu(place_of(by, local, 4)) for local in range(4)]
        assert gpus == [0, 1, 0, 1]
        assert gpus_here(place_of(by), 8) == [0, 1]
        assert processes_on_a_gpu(place_of(by), 8) == 2
    assert device_or_problem([on("b", "x"), on("b", "x")]) == GPU


def test_an_nccl_that_cannot_share_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr("gridformer.mesh.gpus.nccl_version", lambda: (2, 28, 9))
    (problem,) = too_few_gpus(None, 4)
    assert "NCCL 2.28.9 cannot do that: install NCCL 2.30 or newer" in problem
    assert too_few_gpus(None, 1) == []


def test_auto_does_not_move_joined_processes_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_devices("auto", 8) == []
    for name, value in {**ENVIRON, "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    see(monkeypatch, 2)
    (problem,) = check_devices("auto", 8)
    assert "4 processes on this machine and 2 GPUs: use a layout of at most 2" in problem
    assert check_devices("cpu", 8) == []
    for enough in (4, 0):
        see(monkeypatch, enough)
        assert check_devices("auto", 8) == []


def on(host: str, gpu: str) -> str:
    return json.dumps([host, gpu])


def test_verdict() -> None:
    assert device_or_problem([on("a", ""), on("b", "")]) == CPU
    assert device_or_problem([on("a", "x"), on("a", "y"), on("b", "x")]) == GPU
    mixed = device_or_problem([on("a", "x"), on("a", "y"), on("b", "")])
    assert "rank 2 on b has no GPU of its own, but rank 0 on a has one (1 of 3" in mixed
    shared = device_or_problem([on("a", "x"), on("b", "x"), on("b", "x")])
    assert "ranks 1 and 2 on b all see the same single GPU" in shared


def test_identity_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(identity(None, 3))[1] == ""

    def no_such_number(gpu: int) -> None:
        raise AttributeError

    monkeypatch.setattr("torch.cuda.get_device_properties", no_such_number)
    assert identity(0, 3) != identity(0, 4), "two GPUs whose numbers are unknown may differ"
