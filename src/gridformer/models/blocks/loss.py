"""Losses as sums over targets: sums of parts add up to the whole's, so the trainer divides once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.batch import IGNORE


class CrossEntropy(nn.Module):
    """Sum (not mean) of the cross entropy over targets that are not IGNORE, in at least float32.

    smoothing: the share of each target that is spread evenly over the vocabulary, in training
    (Vaswani et al. 2017, section 5.4).
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(
            _wide(logits_BSV.flatten(0, -2)),
            targets_BS.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=self.smoothing if self.training else 0.0,
        )


class LabelLoss(nn.Module):
    """The same of a label a sequence: logits [b, n_labels], labels [b]."""

    def forward(self, logits_BL: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(_wide(logits_BL), labels_B, ignore_index=IGNORE, reduction="sum")


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
