"""Pairs that share rows of encoder and decoder: each is computed as if it were alone."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import SinusoidalPositions
from gridformer.models.blocks.scores import document_bounds
from gridformer.parallel import build_parallel
from gridformer.utils.batch import IGNORE, Batch
from tests.support.reference import transformer
from tests.support.reference.shared import V, assert_close, pair, tokens_of
from tests.support.reference.transformer import published

SOURCE, S, WORDS = 15, 12, 31
# The lengths of source and target of the pairs in each row. The rest of the first two is padding,
# and there is none in the last one.
ROWS = (((4, 3), (1, 5), (7, 2)), ((6, 6), (5, 1)), ((15, 12),))
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"family": "t5", "relative_buckets": 8, "relative_max_distance": 12},
    "transformer": {"family": "transformer", "label_smoothing": 0.1},
}


def build(name: str) -> Model:
    values: dict[str, Any] = {"n_layers": 2, "hidden_size": 24, "n_heads": 4, "vocab_size": WORDS}
    config = ModelConfig(**values, max_seq_len=16, **FAMILIES[name])
    return build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"), "float64")


def numbered(lengths: list[int], length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the pairs of one side of a row, and the positions in them."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    numbers = F.pad(numbers, (0, length - len(numbers)), value=padding)
    return numbers, torch.cat([torch.arange(int(n)) for n in numbers.bincount()])


def packed(words: int = WORDS) -> Batch:
    """Return the rows, as `gridformer.utils.batch` describes them."""
    found: dict[str, list[Tensor]] = {}
    for number, row in enumerate(ROWS):
        sources, targets = ([pair[side] for pair in row] for side in (0, 1))
        of_source, places = numbered(sources, SOURCE, len(row))
        of_target, at = numbered(targets, S, len(row) - 1)
        wanted = tokens_of(words, 1, S, seed=20 + number)[0]
        wanted[sum(targets) :] = IGNORE
        values = {
            "source": tokens_of(words, 1, SOURCE, seed=number)[0],
            "source_valid": torch.arange(SOURCE) < sum(sources),
            "source_documents": of_source,
            "source_positions": places,
            "tokens": tokens_of(words, 1, S, seed=10 + number)[0],
            "targets": wanted,
            "documents": of_target,
            "positions": at,
        }
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return {key: torch.stack(rows) for key, rows in found.items()}


def places() -> list[tuple[int, slice, slice]]:
    """Return the row of each pair, and where its source and its target are in it."""
    found = []
    for number, row in enumerate(ROWS):
        source = target = 0
        for n, m in row:
            found.append((number, slice(source, source + n), slice(target, target + m)))
            source, target = source + n, target + m
    return found


def alone(batch: Batch) -> list[Batch]:
    """Return each pair as a batch of its own, without padding and without any of the new keys."""
    return [
        {
            "source": batch["source"][row, of_source][None],
            "tokens": batch["tokens"][row, of_target][None],
            "targets": batch["targets"][row, of_target][None],
        }
        for row, of_source, of_target in places()
    ]


def loss_and_gradients(model: Model, *batches: Batch) -> list[Tensor]:
    model.zero_grad()
    loss = torch.stack([model.losses(batch)["tokens"] for batch in batches]).sum()
    loss.backward()
    found = [loss.detach()]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found.append(parameter.grad.clone())
    return found


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_batch_equals_its_pairs_alone(name: str) -> None:
    """So do all gradients."""
    model, batch = build(name), packed()
    got = loss_and_gradients(model, batch)
    assert_same(got, loss_and_gradients(model, *alone(batch)))
    assert model.n_tokens(batch) == sum(map(sum, sum(ROWS, ())))


@pytest.mark.parametrize("side", ["source", "tokens"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pair_does_not_change_others(name: str, side: str) -> None:
    """Nor does padding. The logits of others stay the same to the bit."""
    model, batch = build(name).eval(), packed()
    before = model.logits(batch)["tokens"]
    for row, *both in places()[:2]:
        here = both[side == "tokens"]
        text = batch[side].clone()
        text[row, here] = (text[row, here] + 1) % WORDS
        after = model.logits(batch | {side: text})["tokens"]
        for other, _, theirs in places():
            same = torch.equal(after[other, theirs], before[other, theirs])
            assert same == ((other, theirs) != (row, both[1]))
    text = torch.where(batch["source_valid"], batch["source"], (batch["source"] + 1) % WORDS)
    after = model.logits(batch | {"source": text})["tokens"]
    assert torch.equal(after, before)


def test_a_packed_batch_equals_transformers_t5_on_each_pair() -> None:
    ours, theirs = pair("t5", torch.float32)  # theirs computes softmax in float32
    batch = packed(V)
    logits = ours.logits(batch)["tokens"]
    for row, of_source, of_target in places():
        source, tokens = batch["source"][row, of_source], batch["tokens"][row, of_target]
        want = theirs(source[None], decoder_input_ids=tokens[None]).logits[0]
        assert_close(logits[row, of_target], want)


def test_a_packed_batch_equals_torchs_transformer_on_each_pair() -> None:
    ours = transformer.model_of()
    theirs, table, batch = transformer.torchs(ours), ours.tokens.weight, packed(transformer.V)

    def embed(tokens: Tensor) -> Tensor:
        return table[tokens][None] * math.sqrt(48) + published(len(tokens), 48)

    logits = ours.logits(batch)["tokens"]
    for row, of_source, of_target in places():
        source, tokens = batch["source"][row, of_source], batch["tokens"][row, of_target]
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        hidden = theirs(embed(source), embed(tokens), tgt_mask=future)[0]
        assert_close(logits[row, of_target].detach(), (hidden @ table.t()).detach())


def test_bounds() -> None:
    """Of queries among keys, and of keys among queries; a source's padding has no query."""
    targets = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]])
    sources = torch.tensor([[0, 1, 1, 2, 2], [0, 0, 0, 1, 2]])
    found = document_bounds(targets, sources)
    of_queries = [[[0, 0, 1, 1], [1, 1, 3, 3]], [[0, 3, 4, 4], [3, 4, 5, 5]]]
    of_keys = [[[0, 2, 2, 4, 4], [2, 4, 4, 4, 4]], [[0, 0, 0, 1, 2], [1, 1, 1, 2, 4]]]
    assert torch.equal(found.of_queries, torch.tensor(of_queries).int())
    assert torch.equal(found.of_keys, torch.tensor(of_keys).int())


def test_sinusoids_of_given_positions() -> None:
    """A device looks up its part of a row, and its columns."""
    given = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    waves = SinusoidalPositions(8)
    like = torch.zeros(1, dtype=torch.float64)
    want = published(6, 8)[given]
    assert torch.allclose(waves(6, 0, like, given), want, atol=1e-12)
    waves.part, waves.columns = (1, 2), (1, 2)
    assert torch.allclose(waves(6, 0, like, given), want[:, 3:, 4:], atol=1e-12)
