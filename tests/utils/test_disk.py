"""Full disks, on a file that may not grow."""

import errno
import os
from pathlib import Path

import pytest

from gridformer.utils import disk
from gridformer.utils.disk import FullDiskError, writing


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota")]
)
def test_a_full_disk_names_file_need_and_free_space(
    tmp_path: Path, number: int, words: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(FullDiskError) as raised, writing(path, 5 << 20):
        raise OSError(number, os.strerror(number))  # as `write` raises it, without a name
    text = str(raised.value)
    assert words in text
    assert f"{path} could not be written (5 MiB were to be written, " in text
    assert text.endswith(" are free there)")
    assert disk.is_full(raised.value)


def test_a_device_that_is_always_full(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(FullDiskError, match="/dev/full could not be written"), writing(full):
        full.write_text("x")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    assert not disk.is_full(PermissionError(errno.EACCES, "no"))
