"""What the command line says about gpt-175b on 4,096 ranks, it says soon."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.support.large import WORDS

LIMIT_S = 15.0  # of processor time, to which a busy machine adds little; it takes 3 to 4 s


def processor_s() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.full
@pytest.mark.parametrize("command", ["check", "memory"])
def test_4096_ranks_take_seconds(command: str) -> None:
    began = processor_s()
    words = [sys.executable, "-m", "gridformer", command, *WORDS]
    done = subprocess.run(words, capture_output=True, text=True)
    seconds = processor_s() - began
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpt-175b on optimus 8x8, dp=4, pp=16")
    print(f"{command}: {seconds:.1f} s of processor time")
    assert seconds < LIMIT_S
