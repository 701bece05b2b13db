"""Checks whether this machine can train, and how to fix what is wrong."""
