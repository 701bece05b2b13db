"""From text to token folders."""
