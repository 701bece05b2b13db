"""The watch of commands that use a trained model on several processes: generate, evaluate."""

from __future__ import annotations

from gridformer.launch.watch import MARGIN_S, HangWatch
from gridformer.launch.worker_process import end_after_peer, end_with_report
from gridformer.mesh.launch_env import launched_place
from gridformer.mesh.process_group import World


class UseWatch:
    """Starts the watch of a process; see `gridformer.evaluate.job.Job.watch`.

    Nothing is written to the run directory, which such commands only read.
    """

    margin_s = MARGIN_S

    def start(self, world: World, timeout_s: float) -> HangWatch | None:
        """Starts to watch this process, unless it is the only one.

        Args:
            world: The processes.
            timeout_s: Seconds after which a message that still waits is a hang.
        """
        place = launched_place()
        if place is None or world.size == 1:
            return None
        nccl = world.backend == "nccl"
        return HangWatch(
            place,
            timeout_s,
            None,
            end_with_report,
            nccl,
            limit="--timeout",
            trains=False,
            peer_failed=end_after_peer,
        )
