"""Processes of a run: starting or joining them, their devices and group, and stopping in time.

Nothing here imports torch at the top: the command line imports this package.
"""

from gridformer.launch.joining import Joined, joined
from gridformer.launch.local import launch, warm_up
from gridformer.launch.world import (
    DeviceChoice,
    World,
    abandon_world,
    check_devices,
    close_world,
    init_world,
)

__all__ = [
    "DeviceChoice",
    "Joined",
    "World",
    "abandon_world",
    "check_devices",
    "close_world",
    "init_world",
    "joined",
    "launch",
    "warm_up",
]
