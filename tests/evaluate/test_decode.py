"""Greedy and beam search find what Hugging Face's generate finds with the same T5."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gridformer.evaluate.decode import Search, search
from gridformer.models import T5
from gridformer.utils.errors import ConfigError
from tests.models.hf import plain, tokens_of
from tests.models.test_hf_t5 import config_of, from_hugging_face, hugging_face

V, END = 23, 1


@pytest.fixture(scope="module")
def models() -> tuple[T5, Any]:
    """Weights are drawn, not trained, and float64: what is found must not hang on how a processor
    rounds. Large logits, those of the end larger still, so that targets end early or late."""
    config = config_of(vocab_size=V, n_decoder_layers=2)
    theirs = hugging_face(config, torch.float64)
    with torch.no_grad():
        theirs.shared.weight.mul_(3.0)
        theirs.shared.weight[END].mul_(2.0)
    ours = plain(config, torch.float64, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, T5)
    return ours, theirs


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [1, 2, 4, 7])
def test_finds_what_hugging_face_finds(models: tuple[T5, Any], beams: int, penalty: float) -> None:
    ours, theirs = models
    for seed, size in itertools.product(range(4), (3, 9)):
        source = tokens_of(V, 1, size, seed=seed)
        found = search(ours, source[0].tolist(), 0, END, Search(beams, penalty, 15))
        with torch.no_grad():
            want = theirs.generate(
                source,
                attention_mask=torch.ones_like(source),
                num_beams=beams,
                do_sample=False,
                length_penalty=penalty,
                early_stopping=False,
                max_new_tokens=15,
            )[0, 1:].tolist()
        want = want[: want.index(END)] if END in want else want
        assert found == want, (seed, size)


def test_the_tests_see_short_and_long_targets(models: tuple[T5, Any]) -> None:
    sources = [tokens_of(V, 1, 9, seed=seed)[0].tolist() for seed in range(4)]
    for beams, penalty in ((1, 1.0), (4, 0.0), (4, 1.0)):
        found = [search(models[0], s, 0, END, Search(beams, penalty, 15)) for s in sources]
        assert {len(target) for target in found} >= {1, 15}


def test_some_words_are_never_said(models: tuple[T5, Any]) -> None:
    ours, _ = models
    source = tokens_of(V, 1, 9)[0].tolist()
    first = search(ours, source, 0, END, Search(3, 1.0, 12))
    again = search(ours, source, 0, END, Search(3, 1.0, 12), never=first)
    assert first
    assert not set(first) & set(again)


def test_wishes_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="--beams 0 must be at least 1"):
        Search(beams=0)
    with pytest.raises(ConfigError, match="--max-tokens 0"):
        Search(max_tokens=0)
