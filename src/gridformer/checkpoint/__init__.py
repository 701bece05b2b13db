"""Checkpoints that do not know the layout."""
