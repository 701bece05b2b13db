"""Heads that classify sequences or find a span in them, beside the head that predicts tokens.

`Classifier` is also the second output branch of Optimus' figure 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gridformer.models.blocks.dropout import Dropout
from gridformer.models.blocks.linear import Init, Linear, Role, linear, new_parameter


class Classifier(nn.Module):
    """Classifies each sequence by the hidden vector of one chosen token.

    Maps x [b, s, h] and positions [b] to logits [b, n_labels] through `choose`, a pooler with tanh,
    dropout if there is any, and `labels`.
    """

    def __init__(
        self, h: int, n_labels: int, std: float, dropout: PooledDropout | None = None
    ) -> None:
        super().__init__()
        self.choose: nn.Module = ChosenToken()
        role = Role("pooler", "head", reads="sequences")
        self.pooler = Linear(h, h, role, Init(std=std))
        self.dropout = dropout
        self.labels: nn.Module = LabelHead(h, n_labels, std)

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        pooled = torch.tanh(self.pooler(self.choose(x_BSH, at_B)))
        if self.dropout is not None:
            pooled = self.dropout(pooled)
        logits: Tensor = self.labels(pooled)
        return logits


class ChosenToken(nn.Module):
    """Selects one token's vector of each sequence: x [b, s, h] and positions [b] to [b, h]."""

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        return x_BSH[torch.arange(len(at_B), device=at_B.device), at_B]


class PooledDropout(Dropout):
    """Dropout of one vector per sequence, [b, h] or a block of columns of it."""

    def forward(self, x_BH: Tensor) -> Tensor:
        return super().forward(x_BH.unsqueeze(1)).squeeze(1)


class LabelHead(nn.Module):
    """Maps [b, h] to logits [b, n_labels], which have too few columns to be sharded."""

    cast_parameters = ("weight", "bias")

    def __init__(self, h: int, n_labels: int, std: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = new_parameter(h, n_labels, init=Init(std=std))
        self.bias: nn.Parameter | None = new_parameter(n_labels, init=Init()) if bias else None

    def forward(self, x_BH: Tensor) -> Tensor:
        return linear(x_BH, self.weight, self.bias)


class TokenHead(LabelHead):
    """Maps every token [b, s, h] to a few logits, where schemes have the hidden states."""


class LastTokenClassifier(nn.Module):
    """Classifies each sequence by the logits of one chosen token, without a pooler or a bias.

    Maps x [b, s, h] and positions [b] to logits [b, n_labels], as transformers' classes of decoders
    do (GPT2ForSequenceClassification, LlamaForSequenceClassification).
    """

    def __init__(self, h: int, n_labels: int, std: float) -> None:
        super().__init__()
        self.labels: nn.Module = TokenHead(h, n_labels, std, bias=False)
        self.choose: nn.Module = ChosenToken()

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        # Logits are chosen rather than hidden states: they are narrower where s is sharded.
        logits: Tensor = self.choose(self.labels(x_BSH), at_B)
        return logits


class SpanHead(nn.Module):
    """Tells where an answer begins and ends: x [b, s, h] to logits [b, 2, s] over the tokens.

    `ends` computes both logits of each token, with which the answer begins or ends there.
    """

    def __init__(self, h: int, std: float) -> None:
        super().__init__()
        self.ends: nn.Module = TokenHead(h, 2, std)
        self.join: nn.Module = WholeSequence()

    def forward(self, x_BSH: Tensor) -> Tensor:
        logits: Tensor = self.join(self.ends(x_BSH))
        return logits.transpose(1, 2)


class WholeSequence(nn.Module):
    """Returns logits [b, s, 2] of whole sequences; schemes that shard s gather them here."""

    def forward(self, logits_BS2: Tensor) -> Tensor:
        return logits_BS2
