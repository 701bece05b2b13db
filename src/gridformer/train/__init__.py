"""Training: one optimizer step, the loop around it, the optimizer, metrics and console output."""

from gridformer.train.callbacks import Callback, RunEnd, RunStart, Saved

__all__ = ["Callback", "RunEnd", "RunStart", "Saved"]
