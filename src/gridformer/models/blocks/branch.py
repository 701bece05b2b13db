"""The second output branch: classifies one vector of each sequence (Optimus, figure 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gridformer.models.blocks.linear import Init, Linear, Role, linear, new_parameter


class Classifier(nn.Module):
    """Classifies each sequence by the hidden vector of one chosen token.

    Maps x [b, s, h] and positions [b] to logits [b, n_labels] through `choose`, a pooler with tanh,
    and `labels`.
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
    """Selects one token's vector of each sequence: x [b, s, h] and positions [b] to [b, h]."""

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        return x_BSH[torch.arange(len(at_B), device=at_B.device), at_B]


class LabelHead(nn.Module):
    """Maps [b, h] to logits [b, n_labels], which have too few columns to be sharded."""

    cast_parameters = ("weight", "bias")

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(h, n_labels, init=Init(std=std))
        self.bias: nn.Parameter | None = new_parameter(n_labels, init=Init())

    def forward(self, x_BH: Tensor) -> Tensor:
        return linear(x_BH, self.weight, self.bias)
