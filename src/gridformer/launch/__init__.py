"""Starts the processes of a run.

Neither this module nor `launch.local` imports torch at the top, because commands import them.
"""

from gridformer.launch.local import launch

__all__ = ["launch"]
