"""A command that takes too long ends with one sentence, wherever it computes."""

import subprocess
import sys

import pytest

from gridformer.cli.shared import time_limit
from tests.support.commands import gridformer_alone
from tests.support.large import WORDS
from tests.support.launch.programs import ROOT

PROGRAM = """
import contextlib, multiprocessing, os, sys, time
from unittest.mock import patch
from gridformer.cli import shared

def busy(seconds=60.0):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def swallows():
    for _ in range(100):
        with contextlib.suppress(Exception):
            busy(1.0)

def starts_another():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    busy()

def waits_for_a_busy_one():
    child = multiprocessing.get_context("fork").Process(target=busy)
    child.start()
    child.join()

if sys.argv[1] == "beside_a_busy_child":  # which has taken more than this process will
    child = multiprocessing.get_context("fork").Process(target=busy, args=(3.0,))
    child.start()
    child.join(2.5)
    work = busy
else:
    work = locals()[sys.argv[1]]
with patch.object(shared, "_LOOK_S", 0.02), shared.time_limit(0.3, "do less"):
    work()
print("not stopped")
"""
SENTENCE = (
    "error: this takes more than 0.3 seconds of the processor's time: do less, or allow more with "
    "--seconds, such as --seconds 600\n"
)


@pytest.mark.parametrize(
    "work", ["busy", "swallows", "starts_another", "waits_for_a_busy_one", "beside_a_busy_child"]
)
def test_a_sentence_ends_it_and_all_that_it_has_started(work: str) -> None:
    """Its output ends once no process that it has started holds the pipe anymore."""
    command = [sys.executable, "-c", PROGRAM, work]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", SENTENCE)


def test_errors_in_time_are_those_of_the_block() -> None:
    with pytest.raises(KeyError, match="mine"), time_limit(60, "do less"):
        raise KeyError("mine")


@pytest.mark.full
@pytest.mark.parametrize("command", ["check", "memory"])
def test_gpt_175b_on_4096_ranks_takes_less_than_the_limit(command: str) -> None:
    done = gridformer_alone(command, *WORDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpt-175b on optimus 8x8, dp=4, pp=16")
