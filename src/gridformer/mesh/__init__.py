"""Processes, their devices, and the named axes that they form."""

from gridformer.mesh.axes import Axes, Axis

__all__ = ["Axes", "Axis"]
