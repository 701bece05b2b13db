"""The out-of-memory killer's counters, of both versions of control groups."""

from pathlib import Path

import pytest

from gridformer.launch.failures import _NOT, kill_cause, oom_kills


def machine(root: Path, version: int, kills: int, of_all: int | None, limit: str = "max") -> None:
    """Write the counters as the kernel shows them."""
    group = "0::/jobs/4711" if version == 2 else "5:cpu:/\n4:memory:/jobs/4711"
    folder = root / "sys/fs/cgroup" / ("" if version == 2 else "memory") / "jobs/4711"
    folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(group + "\n")
    text = f"low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n"
    (folder / ("memory.events" if version == 2 else "memory.oom_control")).write_text(text)
    (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(limit + "\n")
    if of_all is not None:
        (root / "proc/vmstat").write_text(f"pgfault 12\noom_kill {of_all}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_control_group(tmp_path: Path, version: int) -> None:
    machine(tmp_path, version, 2, 5, str(3 << 30))
    before = oom_kills(tmp_path)
    machine(tmp_path, version, 3, 6, str(3 << 30))
    found = kill_cause(before, oom_kills(tmp_path))
    assert found.endswith("out-of-memory killer, for its control group, whose limit is 3 GiB")


def test_a_kill_elsewhere_on_the_machine_is_only_likely(tmp_path: Path) -> None:
    machine(tmp_path, 2, 2, 5)
    before = oom_kills(tmp_path)
    machine(tmp_path, 2, 2, 6)
    found = kill_cause(before, oom_kills(tmp_path))
    assert "most likely" in found


def test_no_kill(tmp_path: Path) -> None:
    machine(tmp_path, 2, 2, 5)
    found = kill_cause(oom_kills(tmp_path), oom_kills(tmp_path))
    assert "not by the kernel's out-of-memory killer" in found
    assert found == _NOT


def test_what_cannot_be_known(tmp_path: Path) -> None:
    assert kill_cause(oom_kills(tmp_path), oom_kills(tmp_path)) == ""
