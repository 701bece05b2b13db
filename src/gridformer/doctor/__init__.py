"""Checks whether this machine can train, and says how to fix what is wrong."""
