"""Greedy and beam search find what Hugging Face's generate finds with the same T5."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from gridformer.config import RunConfig
from gridformer.data import Tokenizer
from gridformer.evaluate.beams import BeamSearch, beam_search
from gridformer.evaluate.loading import Trained
from gridformer.models import T5
from gridformer.models.blocks import KVCache
from gridformer.utils.errors import ConfigError
from tests.support.marks import full_unless
from tests.support.reference import shared

V, END = 23, 1
# Sources, by seed and length, for which no two candidates are nearly equal: weights changed by 3e-4
# give the same result, and Hugging Face's float32 sums of logarithms are off by only 1e-6.
SOURCES = [(0, 3), (1, 3), (3, 3), (2, 9), (4, 9), (6, 9), (7, 9), (8, 9)]


@pytest.fixture(scope="module")
def models() -> tuple[T5, Any]:
    """Build untrained float64 models, so that results do not depend on how a processor rounds.

    The end token's logits are larger than others, so that targets end early or late.
    """
    config = shared.config_of("t5", vocab_size=V, n_decoder_layers=2)
    theirs = shared.hugging_face("t5", config, torch.float64)
    with torch.no_grad():
        theirs.shared.weight[END].mul_(2.0)
    ours = shared.plain(
        config, torch.float64, shared.from_hugging_face(theirs.state_dict(), config)
    )
    assert isinstance(ours, T5)
    return ours, theirs


def search_all(
    model: T5, sources: list[list[int]], how: BeamSearch, never: Sequence[int] = ()
) -> list[list[int]]:
    one = Trained(cast(RunConfig, None), model, cast(Tokenizer, None))
    with one.in_use():
        return beam_search(one, sources, 0, END, how, never)


def found_by(model: T5, source: list[int], how: BeamSearch, never: Sequence[int] = ()) -> list[int]:
    (found,) = search_all(model, [source], how, never)
    return found


@pytest.mark.parametrize("how", [BeamSearch(3, 1.0, 15), BeamSearch(1, 1.0, 15)], ids=str)
def test_sources_of_a_batch_have_the_targets_that_they_have_alone(
    models: tuple[T5, Any], how: BeamSearch
) -> None:
    ours, _ = models
    sources = [shared.tokens_of(V, 1, size, seed=seed)[0].tolist() for seed, size in SOURCES]
    want = [found_by(ours, source, how) for source in sources]
    assert search_all(ours, sources, how) == want
    lengths = {len(target) for target in want}
    assert lengths >= {0, 15}, "searches must end at several times"
    assert len(lengths) > 2 or how.beams == 1


@pytest.mark.parametrize(
    ("beams", "penalty"),
    full_unless(
        lambda case: case in [(1, 1.0), (4, 2.0), (7, 0.0)],
        [*itertools.product([1, 2, 4, 7], [0.0, 1.0, 2.0])],
        unpack=True,
    ),
)
def test_finds_what_hugging_face_finds(models: tuple[T5, Any], beams: int, penalty: float) -> None:
    ours, theirs = models
    for seed, size in SOURCES:
        source = shared.tokens_of(V, 1, size, seed=seed)
        found = found_by(ours, source[0].tolist(), BeamSearch(beams, penalty, 15))
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


def test_beams_take_their_keys_and_values_along() -> None:
    """Test reordering directly: in a search all beams read one source, whose rows are equal."""
    cache, numbers = KVCache(), torch.arange(3.0).view(3, 1, 1, 1)
    cache.append(numbers, 10 + numbers)
    cache.source = 20 + numbers, 30 + numbers
    cache.select(torch.tensor([2, 2, 0]))
    assert cache.k is not None
    assert cache.v is not None
    found = [x.flatten().tolist() for x in (cache.k, cache.v, *cache.source)]
    assert found == [[first + row for row in (2, 2, 0)] for first in (0, 10, 20, 30)]


def test_some_words_are_never_said(models: tuple[T5, Any]) -> None:
    ours, _ = models
    source = shared.tokens_of(V, 1, 9)[0].tolist()
    first = found_by(ours, source, BeamSearch(3, 1.0, 12))
    again = found_by(ours, source, BeamSearch(3, 1.0, 12), first)
    assert first
    assert not set(first) & set(again)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beams": 0}, "--beams 0 must be at least 1"),
        ({"max_tokens": 0}, "--max-tokens 0 must be at least 1"),
        *(({"length_penalty": n}, "must be from -10 to 10") for n in (math.nan, 1e30, -11.0)),
    ],
)
def test_invalid_search_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BeamSearch(**options)
