"""A command that takes too long ends with its own sentence, whoever sees the error first."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest

from gridformer.cli import patience
from gridformer.cli.patience import TooLongError, time_limit

clock = time.process_time
LOG = logging.getLogger("library")


class Thing:
    """Something that a weak reference can be to."""


def busy(seconds: float = 20.0) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def logs_and_raises() -> None:
    """As torch does where it runs an operator on fake tensors."""
    try:
        busy()
    except Exception:
        LOG.exception("failed while attempting to run meta")
        warnings.warn("a hook raised an exception", stacklevel=2)
        raise


def makes_another_error() -> None:
    try:
        busy()
    except Exception:
        raise RuntimeError("an operator failed") from None


def in_a_callback() -> None:
    """Where Python prints errors and goes on."""
    for _ in range(3):
        thing = Thing()
        reference = weakref.ref(thing, lambda _: busy(3.0))
        del thing
        assert reference() is None
    busy()


def then_busy(first: Callable[[], None]) -> None:
    first()
    busy()


def test_no_operator_of_torch_is_interrupted() -> None:
    """Its modes would be left in a state in which C++ aborts the process."""
    ended = []

    class Mode:
        def __torch_dispatch__(self) -> None:
            busy(0.4)
            ended.append(True)

    with (
        patch.object(patience, "_LOOKS_S", 0.02),
        pytest.raises(TooLongError),
        time_limit(0.1, "do less"),
    ):
        then_busy(Mode().__torch_dispatch__)
    assert ended
    with (
        patch.multiple(patience, _LOOKS_S=0.02, _UNWINDS_S=0.1),
        pytest.raises(TooLongError),
        time_limit(0.1, "do less"),
    ):
        Mode().__torch_dispatch__()
    assert len(ended) == 1, "an operator that takes too long is"


def catches_once() -> None:
    try:
        busy()
    except Exception:
        return


@pytest.mark.parametrize("work", [busy, logs_and_raises, makes_another_error, in_a_callback])
def test_only_its_own_sentence_is_said(
    work: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = (sys.unraisablehook, logging.root.manager.disable)
    began = time.process_time()
    with (
        patch.object(patience, "_LOOKS_S", 0.02),
        pytest.raises(TooLongError, match=r"more than 0\.1 seconds .*: do less, or"),
        time_limit(0.1, "do less"),
    ):
        work()
    assert time.process_time() - began < 2.5
    assert (printed, caplog.text, [*recwarn]) == ([], "", [])
    assert (sys.unraisablehook, logging.root.manager.disable) == before


def test_a_child_that_was_busier_before_does_not_hide_what_this_process_takes() -> None:
    code = "import time\nwhile time.process_time() < 2: pass\nprint(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # it has taken more than this process will in the block
        began = {os.getpid(): time.process_time() - 0.5}  # as if this process were a new one
        with (
            patch.object(patience, "_LOOKS_S", 0.02),
            patch.object(time, "process_time", lambda: clock() - began[os.getpid()]),
            pytest.raises(TooLongError),
            time_limit(0.1, "do less"),
        ):
            busy(1.0)
        child.kill()


def test_only_processes_that_the_block_has_started_are_killed() -> None:
    context = multiprocessing.get_context("spawn")
    before = context.Process(target=time.sleep, args=(60,))
    before.start()
    inside = context.Process(target=time.sleep, args=(60,))
    with (
        patch.object(patience, "_LOOKS_S", 0.02),
        pytest.raises(TooLongError),
        time_limit(0.1, "do less"),
    ):
        then_busy(inside.start)
    inside.join(20)
    assert inside.exitcode == -signal.SIGKILL
    before.join(0.5)
    assert before.is_alive(), "others, such as those of a pool, go on"
    before.kill()
    before.join()


def test_a_result_that_an_error_has_spoilt_is_none() -> None:
    with (
        patch.object(patience, "_LOOKS_S", 0.02),
        pytest.raises(TooLongError),
        time_limit(0.1, "do less"),
    ):
        catches_once()


def test_other_errors_in_time_are_those_of_the_block(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"), time_limit(20, "do less"):
        raise KeyError("mine")
    with time_limit(20, "do less"):
        LOG.error("is told")
    assert "is told" in caplog.text
