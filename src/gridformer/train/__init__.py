"""Training: one optimizer step, the loop around it, the optimizer, metrics and console output."""

from gridformer.train.callbacks import Callback, End, Saved, Start

__all__ = ["Callback", "End", "Saved", "Start"]
