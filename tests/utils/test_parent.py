"""A process of multiprocessing ends with its parent, also if that was killed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, os, signal, sys, time
from gridformer.utils.parent import end_with_parent

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
