"""What an error is called, before its traceback."""

import errno
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gridformer.comm.progress import Progress
from gridformer.launch.failures import Failure, cause_of, out_of_memory
from gridformer.launch.worker_process import _write_failure
from gridformer.utils.errors import SaveError
from gridformer.utils.files import FullDiskError
from tests.support.launch.programs import ROOT, TORCHRUN, Start, finish

GPU = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 12.75 MiB is free."
)


def test_memory() -> None:
    assert cause_of(torch.OutOfMemoryError(GPU)) == (
        "the memory of the GPU of 79.10 GiB is used up: 20.00 MiB more were asked for"
    )
    host = "the memory of this machine, or what this process may have of it, is used up"
    assert cause_of(MemoryError()) == host
    assert cause_of(
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
        )
    ) == (f"{host}: 4 GiB more were asked for")
    assert out_of_memory(RuntimeError("shapes differ")) is None


def test_torch_says_it_like_this() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cause_of(raised.value).endswith(f": {1 << 30:,} GiB more were asked for"), cause_of(
        raised.value
    )


def test_a_full_disk() -> None:
    text = cause_of(FullDiskError(errno.ENOSPC, Path("runs/a/metrics.jsonl"), 100))
    assert text.startswith("the disk is full: runs/a/metrics.jsonl could not be written (")
    assert text.endswith("; free some, or choose --out on another disk")
    assert cause_of(ValueError("no")) == ""
    assert cause_of(FileNotFoundError(errno.ENOENT, "no", "a")) == ""


def test_a_failed_save_is_told_by_the_rank_that_knows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others report it too, and may be earlier: the run must not end with their sentence."""
    found = []
    for rank, error in ((1, SaveError("another says why", elsewhere=True)), (0, SaveError("why"))):
        path = tmp_path / f"error-{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        _write_failure(error)
        found.append(Failure(rank, 4711, 1, json.loads(path.read_text())["message"]))
    assert [failure.ends_all for failure in found] == [False, True]
    assert min(found, key=Failure.order).text() == "gridformer: why"
    assert found[0].text() == "gridformer: another says why"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with_a_full_disk", "the disk is full: /dev/full could not be written ("),
        ("with_too_many_files", "too many open files: raise the limit, such as by `ulimit -n"),
    ],
)
def test_the_rank_that_meets_a_limit_says_so(start: Start, name: str, said: str) -> None:
    code, _, err = finish(start(f"starting:{name}", 3))
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(f"rank 1 failed: {said}")


def test_a_report_that_cannot_be_written_is_printed(start: Start, tmp_path: Path) -> None:
    """As where TMPDIR has become full."""
    code, _, err = finish(start("starting:with_a_full_folder", 2))
    assert code == 1
    assert "Traceback" not in err
    assert "rank 1 failed: the disk is full: /dev/full could not be written (" in err


def test_a_file_that_may_not_be_large_enough_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(FullDiskError, match="/progress could not be written") as raised:
            Progress(tmp_path / "progress")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in cause_of(raised.value)


@pytest.mark.full
def test_innocent_ranks_show_no_traceback(start: Start) -> None:
    """As torchrun and srun show what all ranks print."""
    code, _, err = finish(start("starting:with_a_full_disk", 3, *TORCHRUN, "3"))
    assert code == 1
    before, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 1 (local_rank: 1)" in cause
    assert before.count("rank 1 failed: the disk is full") <= 1, err
    assert "FullDiskError" not in before
    assert "Connection closed by peer" not in before or "ends because its connection" in before


def test_this_needs_no_torch() -> None:
    code = "import sys, gridformer.launch.failures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
