"""The classification branch and padding, against Hugging Face's hidden states and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import Model
from tests.support.reference import bert, gpt2
from tests.support.reference.shared import assert_close, lengths_mask, plain, randomize, tokens_of

N_LABELS = 5
S = 12


def labeled(family: str) -> tuple[Model, Any]:
    """Return our model with a random branch for labels, and theirs, which has none."""
    module: Any = {"gpt2": gpt2, "bert": bert}[family]
    size: dict[str, Any] = {"n_layers": 2, "hidden_size": 48, "n_heads": 4, "vocab_size": 211}
    if family == "bert":
        size |= {"sentence_pair": False, "norm_eps": 1e-12}
    config = ModelConfig(family=family, max_seq_len=S, n_labels=N_LABELS, **size)  # type: ignore[arg-type]
    theirs = module.hugging_face(config, torch.float64)
    state = module.from_hugging_face(theirs.state_dict(), config)
    branch = randomize(torch.nn.ModuleDict({"pooler": torch.nn.Linear(48, 48)}), torch.float64)
    labels = randomize(torch.nn.Linear(48, N_LABELS), torch.float64)
    state = {name: value for name, value in state.items() if not name.startswith("pair.")}
    state |= {
        "classifier.pooler.weight": branch["pooler"].weight.detach().t(),
        "classifier.pooler.bias": branch["pooler"].bias.detach(),
        "classifier.labels.weight": labels.weight.detach().t(),
        "classifier.labels.bias": labels.bias.detach(),
    }
    return plain(config, torch.float64, state), theirs


def hidden_of(theirs: Any, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return their hidden states after the last norm."""
    base = theirs.transformer if hasattr(theirs, "transformer") else theirs.bert
    hidden: Tensor = base(tokens, attention_mask=valid.long()).last_hidden_state
    return hidden


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_chosen_token_of_a_padded_document_is_classified(family: str) -> None:
    """Compare words' logits where text is real, and the labels' logits.

    Padding has no effect and, in GPT-2, neither do later tokens. Labels come from the hidden vector
    at `at` by a product, tanh and another product.
    """
    ours, theirs = labeled(family)
    tokens, valid = tokens_of(211, 4, S), lengths_mask([12, 7, 1, 5], S)
    at = torch.tensor([11, 3, 0, 4])
    branch: Any = ours.classifier
    with torch.no_grad():
        got = ours.logits({"tokens": tokens, "valid": valid, "at": at})
        hidden = hidden_of(theirs, tokens, valid)
        out = theirs(tokens, attention_mask=valid.long())
        words = out.logits if family == "gpt2" else out.prediction_logits
        assert_close(got["tokens"][valid], words[valid])
        chosen = torch.stack([hidden[row, place] for row, place in enumerate(at.tolist())])
        pooled = torch.tanh(chosen @ branch.pooler.weight + branch.pooler.bias)
        assert_close(got["labels"], pooled @ branch.labels.weight + branch.labels.bias)
    assert int(ours.n_tokens({"tokens": tokens, "valid": valid})) == 12 + 7 + 1 + 5


def test_smoothing_and_labels_do_not_mix() -> None:
    """Label smoothing applies to words; a branch's labels are used as they are."""
    ours, _ = labeled("gpt2")
    ours.loss.smoothing = 0.1
    batch = {"tokens": tokens_of(211, 2, S), "at": torch.tensor([3, 11])}
    batch["labels"], batch["targets"] = torch.tensor([1, 3]), tokens_of(211, 2, S, seed=2)
    with torch.no_grad():
        logits, losses = ours.logits(batch), ours.train().losses(batch)
    want = F.cross_entropy(logits["labels"], batch["labels"], reduction="sum")
    assert_close(losses["labels"], want)
