"""The processes of a run, their devices, and the named mesh axes that they form."""

from gridformer.mesh.axes import Axes, Axis

__all__ = ["Axes", "Axis"]
