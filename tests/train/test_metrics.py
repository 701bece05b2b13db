"""What happens if metrics cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from gridformer.train.loggers.tensorboard import TensorBoard
from gridformer.train.metrics import EVENTS, MetricsFile, read_metrics
from gridformer.utils.disk import FullDiskError


def test_a_full_disk_is_named_also_where_tensorboard_meets_it(tmp_path: Path) -> None:
    """TensorBoard writes in a thread of its own, and raises what that met without a file's name."""
    file, log = MetricsFile(tmp_path, 0), TensorBoard(tmp_path, 0)
    file.on_step({"step": 1, "loss": 2.0})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        patch.object(log._events, "add_scalar", side_effect=full),
        pytest.raises(FullDiskError, match=f"the disk is full: {tmp_path / EVENTS} could not be"),
    ):
        log.on_step({"step": 1, "loss": 2.0})
    with (
        patch.object(log._events, "close", side_effect=full),
        pytest.raises(FullDiskError, match=EVENTS),
    ):
        log.close()
    log._events.close()
    file.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
