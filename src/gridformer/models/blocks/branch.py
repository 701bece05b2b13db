"""The second output branch: one vector of each sequence to a label (Optimus, figure 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.linear import Init, Linear, Role, new_parameter


class Classifier(nn.Module):
    """The hidden vector at one chosen token of each sequence to a label.

    x [b, s, h] and positions [b] to logits [b, n_labels]: `choose`, a pooler with tanh, `labels`.
    """

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.choose: nn.Module = ChosenToken()
        role = Role("pooler", "head", reads="sequences")
        self.pooler = Linear(h, h, role, Init(std=std))
        self.labels: nn.Module = LabelHead(h, n_labels, std)

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        logits: Tensor = self.labels(torch.tanh(self.pooler(self.choose(x_BSH, at_B))))
        return logits


class ChosenToken(nn.Module):
    """One token's vector of each sequence: x [b, s, h], positions [b], to [b, h]."""

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        return x_BSH[torch.arange(len(at_B), device=at_B.device), at_B]


class LabelHead(nn.Module):
    """[b, h] to logits [b, n_labels]: too few columns to be cut."""

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(h, n_labels, init=Init(std=std))
        self.bias: nn.Parameter | None = new_parameter(n_labels, init=Init())

    def forward(self, x_BH: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x_BH.dtype)
        return F.linear(x_BH, self.weight.to(x_BH.dtype).t(), bias)
