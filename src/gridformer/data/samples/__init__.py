"""From token folders to batches."""
