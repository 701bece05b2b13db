"""How long the launcher waits for workers whose time is over."""

from __future__ import annotations

from pathlib import Path

from gridformer.launch import local
from gridformer.launch.worker_process import Meeting
from gridformer.utils.signals import StopPolicy


def workers(folder: Path) -> local._Workers:
    """Return the launcher's view of two workers, none of which is started."""
    return local._Workers(2, Meeting(folder), StopPolicy(grace_s=1.0))


def test_a_save_gets_as_long_as_it_takes_and_then_time_to_leave(tmp_path: Path) -> None:
    two = workers(tmp_path)
    two.meeting.saving(1).touch()
    for now in (10.0, 11.0, 100.0):
        assert two._has_more_time(now)
        assert two._kill_at == now + local._MORE_PATIENCE_S, "it looks again soon"
    two.meeting.saving(1).unlink()
    assert two._has_more_time(101.0)
    assert two._kill_at == 101.0 + local._LEAVES_S
    assert not two._has_more_time(111.0), "only once"


def test_workers_that_do_not_save_get_no_more_time(tmp_path: Path) -> None:
    two = workers(tmp_path)
    assert not two._has_more_time(10.0)
    assert not two._has_more_time(11.0)
