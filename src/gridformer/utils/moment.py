"""Measures when a device reaches a point in its work, while the host runs ahead of it."""

from __future__ import annotations

import time

import torch


class Moment:
    """The time at which a device has done all work that was launched before the moment was made.

    The difference between two moments is the time that the device took, however far the host runs
    ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for this moment and returns the seconds from an earlier one of the same device."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3
