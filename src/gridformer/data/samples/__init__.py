"""Turns token folders into samples and batches."""
