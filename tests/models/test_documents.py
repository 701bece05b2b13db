"""Documents that share a sample: each is computed as if it were alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gridformer.models import Model
from gridformer.models.blocks import scores
from gridformer.utils.batch import IGNORE, Batch
from tests.support.reference.shared import assert_close, entries_of, pair, to_ours

S, WORDS = 13, 31
# The lengths of the documents in each row; the last one of the second row is padding.
ROWS = ((4, 1, 8), (6, 5, 2), (13,))
PAIRS: dict[str, Callable[[], tuple[Model, Any]]] = {
    "gpt2": lambda: pair("gpt2", torch.float64),
    "llama": lambda: pair("llama", torch.float64),
    "mistral": lambda: pair("mistral", torch.float64),
}


def batch_of(reset: bool = True) -> Batch:
    """Return rows of documents, whose last tokens predict nothing."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, WORDS, (len(ROWS), S), generator=generator)
    targets = tokens.roll(-1, 1)
    documents, positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, lengths in enumerate(ROWS):
        sizes = torch.tensor(lengths)
        documents[row] = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        positions[row] = torch.cat([torch.arange(n) for n in lengths])
        targets[row, sizes.cumsum(0) - 1] = IGNORE
    targets[1, -2:] = IGNORE
    batch = {"tokens": tokens, "targets": targets, "documents": documents}
    return batch | ({"positions": positions} if reset else {})


@pytest.mark.parametrize("name", PAIRS)
def test_a_document_does_not_change_others(name: str) -> None:
    """Their logits stay the same to the bit."""
    (model, _), batch = PAIRS[name](), batch_of()
    before = model.logits(batch)["tokens"]
    tokens = batch["tokens"].clone()
    changed = batch["documents"] == 1
    tokens[changed] = (tokens[changed] + 1) % WORDS
    after = model.logits(batch | {"tokens": tokens})["tokens"]
    assert torch.equal(after[~changed], before[~changed])
    assert not torch.isclose(after[changed], before[changed]).all(-1).any()


@pytest.mark.parametrize(("name", "reset"), [("gpt2", True), ("llama", True), ("mistral", False)])
def test_a_packed_batch_equals_transformers_on_each_document(name: str, reset: bool) -> None:
    """Positions restart, or go on within the row."""
    ours, theirs = PAIRS[name]()
    batch = batch_of(reset)
    logits = ours.logits(batch)["tokens"]
    ours.losses(batch)["tokens"].backward()
    for row, lengths in enumerate(ROWS):
        start = 0
        for n in lengths:
            here = slice(start, start + n)
            positions = torch.arange(n)[None] + (0 if reset else start)
            want = theirs(batch["tokens"][row, here][None], position_ids=positions).logits[0]
            assert_close(logits[row, here], want)
            F.cross_entropy(want, batch["targets"][row, here], reduction="sum").backward()
            start += n
    entries = entries_of(ours.config)
    grads = to_ours(entries, {key: p.grad for key, p in theirs.named_parameters()})
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        assert_close(parameter.grad, grads[key])


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_some_queries_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of all queries never exists, and the gradients are the same."""
    (model, _), batch = PAIRS[name](), batch_of()
    found = []
    for queries in (S, 5):
        monkeypatch.setattr(scores, "QUERIES", queries)
        if queries < S:
            monkeypatch.setattr(scores, "same_document", None)  # which makes the whole mask
        model.zero_grad()
        loss = model.losses(batch)["tokens"]
        loss.backward()
        found.append(
            [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
