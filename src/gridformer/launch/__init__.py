"""Starts the processes of a run. Commands import this, so it does not import torch."""

from gridformer.launch.local import launch

__all__ = ["launch"]
