"""Readers of data sets for fine-tuning, and the writer of folders of examples."""
