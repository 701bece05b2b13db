"""How OpenMP's threads wait in the processes that the command line starts."""

import os
import subprocess
import sys

import pytest

from tests.support.launch.programs import Start, finish

# torch's Linux builds use GNU's OpenMP, which decides at load time how its threads will wait.
TELL = {"OMP_DISPLAY_ENV": "true"}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")


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


def test_threads_of_workers_sleep_too(start: Start) -> None:
    """The server that workers are forked from loads torch, and prints this in the background."""
    code, _, err = finish(start("sums", 2, env=TELL))
    assert code == 0, err
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in err
    assert "OMP_WAIT_POLICY = 'ACTIVE'" not in err
