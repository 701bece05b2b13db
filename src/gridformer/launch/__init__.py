"""Starting the processes of a run. Nothing here imports torch at the top: commands import it."""

from gridformer.launch.local import launch

__all__ = ["launch"]
