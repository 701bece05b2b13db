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
    child = multiprocessing.get_context("fork").Process(target=busy, args=(1.5,))
    child.start()
    child.join()

def briefly():
    busy(0.1)

work, _, beside = sys.argv[1].partition(" beside ")
if beside:  # a child that has taken more than this process will, and ends after it
    parent, (read, write) = os.getpid(), os.pipe()
    if os.fork() == 0:
        busy(1.0)
        os.write(write, b".")
        while os.getppid() == parent:
            time.sleep(0.01)
        print("done", flush=True)
        os._exit(0)
    os.read(read, 1)
work = locals()[work]
with patch.object(shared, "_LOOK_S", 0.02), shared.time_limit(0.3, "do less"):
    work()
print("not stopped")
"""
SENTENCE = (
    "error: this takes more than 0.3 seconds of the processor's time: do less, or allow more with "
    "--seconds, such as --seconds 600\n"
)


def ended(work: str) -> tuple[int, str, str]:
    """Run the program until no process that it has started holds the pipe of its output."""
    command = [sys.executable, "-c", PROGRAM, work]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("work", ["busy", "swallows", "starts_another", "waits_for_a_busy_one"])
def test_a_sentence_ends_it_and_all_that_it_has_started(work: str) -> None:
    assert ended(work) == (2, "", SENTENCE)


def test_a_process_that_was_there_before_goes_on_and_does_not_count() -> None:
    assert ended("busy beside a child") == (2, "done\n", SENTENCE)
    assert ended("briefly beside a child") == (0, "not stopped\ndone\n", "")


def test_errors_in_time_are_those_of_the_block() -> None:
    with pytest.raises(KeyError, match="mine"), time_limit(60, "do less"):
        raise KeyError("mine")


@pytest.mark.full
@pytest.mark.parametrize("command", ["check", "memory"])
def test_gpt_175b_on_4096_ranks_takes_less_than_the_limit(command: str) -> None:
    done = gridformer_alone(command, *WORDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpt-175b on optimus 8x8, dp=4, pp=16")
