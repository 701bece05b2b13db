"""A rank for which there is no memory is named, with the real limits of the system.

The kernel kills a process of a control group that is full, and refuses memory to one that has a
limit of its own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.launch.programs import LIMIT_S, Start, finish

pytestmark = pytest.mark.full
LIMIT_BYTES = 2 << 30  # far more than three idle processes need


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit, which takes rights that few users have."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (old if old.is_dir() else new) / f"gridformer-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        (folder / name).write_text(str(LIMIT_BYTES))
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
    except OSError:
        folder.rmdir()
        pytest.skip("no control group can be limited here")
    yield folder
    until = time.monotonic() + LIMIT_S
    while (folder / "cgroup.procs").read_text():  # what the run leaves ends a moment later
        assert time.monotonic() < until
        time.sleep(0.05)
    folder.rmdir()


def test_the_kernels_killer_is_named(start: Start, group: Path) -> None:
    code, _, err = finish(start("starting:needing_memory", 3, env={"CONTROL_GROUP": str(group)}))
    assert code == 1, err
    said = err.strip().splitlines()[-1]
    assert re.match(r"rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\) ", said), err
    assert "by the kernel's out-of-memory killer, for its control group" in said
    assert "whose limit is 2 GiB" in said
    assert "Traceback" not in err


def test_memory_that_is_refused_is_named(start: Start) -> None:
    code, _, err = finish(start("starting:needing_memory", 3, env={"MORE_BYTES": str(512 << 20)}))
    assert code == 1, err
    assert err.startswith("rank 1 failed: the memory of this machine, or what this process may "), (
        err
    )
    assert "64 MiB more were asked for; try " in err.splitlines()[0]
    assert err.count("Traceback") == 1
