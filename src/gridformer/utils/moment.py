"""When a device comes to a point in its work, however far ahead of it the host is."""

from __future__ import annotations

import time

import torch


class Moment:
    """When a device is done with all work that was launched before this was made.

    Between two of them lies the time that the device took, however far ahead of it the host is.
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
