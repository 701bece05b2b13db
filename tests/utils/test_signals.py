"""The flag that stop signals raise, and processes that do not look at it."""

import subprocess
import sys

STUCK = """
import os, signal, threading, time
from gridformer.utils import signals

signals.install(signals.StopPolicy(grace_s=1.0))

def signal_again_and_again():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(400):
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(3)

threading.Thread(target=signal_again_and_again, daemon=True).start()
time.sleep(600)
"""


def test_more_signals_give_no_more_time() -> None:
    """The grace period counts from the first signal, whose number also sets the exit code.

    A process that still runs after 400 signals, for 20 seconds or more, exits with code 3.
    """
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 143, done.stderr
    assert done.stderr == "gridformer: SIGTERM, but the step did not end within 1 s: " + (
        "no new checkpoint\n"
    )
