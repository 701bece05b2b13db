"""The end of a process with its parent, the allocator's settings, and how threads wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gridformer.utils.process import ALLOC_CONF, use_expandable_segments
from tests.support.launch.programs import Start, finish

PROGRAM = """
import multiprocessing, os, signal, sys, time
from gridformer.utils.process import end_with_parent

def child():
    end_with_parent()
    print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child).start()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    # The pipe closes when both processes that hold it have ended: the child, too.
    rest, _ = parent.communicate("now\n", timeout=100)
    assert rest == ""
    assert parent.returncode == -9


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocator_settings(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, str]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    use_expandable_segments()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    monkeypatch.delenv(ALLOC_CONF, raising=False)  # it was set behind monkeypatch's back
    return found


def test_segments_grow_unless_the_user_has_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator_settings(monkeypatch) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in NAMES:
        theirs = {name: "max_split_size_mb:128"}
        assert allocator_settings(monkeypatch, **theirs) == theirs
    monkeypatch.setattr(sys, "platform", "win32")
    assert allocator_settings(monkeypatch) == {}


# torch's Linux builds use GNU's OpenMP, which decides at load time how its threads will wait.
TELL = {"OMP_DISPLAY_ENV": "true"}
OPENMP = pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")


@OPENMP
@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        ({}, "PASSIVE"),
        pytest.param({"OMP_WAIT_POLICY": "active"}, "ACTIVE", marks=pytest.mark.full),
    ],
    ids=["ours", "the user's"],
)
def test_threads_sleep_while_they_wait(chosen: dict[str, str], policy: str) -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-m", "gridformer", "generate", "nowhere"],
        env=environ | TELL | chosen,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr, done.stderr


@OPENMP
def test_threads_of_workers_sleep_too(start: Start) -> None:
    """The server that workers are forked from loads torch, and prints this in the background."""
    code, _, err = finish(start("sums", 2, env=TELL))
    assert code == 0, err
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in err
    assert "OMP_WAIT_POLICY = 'ACTIVE'" not in err
