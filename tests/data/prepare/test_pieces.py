"""Cutting long documents without changing their tokens."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.prepare.reading import pieces
from gridformer.data.tokenizer import Tokenizer
from tests.support.data import sentences

TOKENIZER = Tokenizer.train(sentences(200), 300)
chunks = st.lists(st.text(max_size=30), max_size=20)
# Words shorter than any limit below, so that a seam is always within reach.
prose = st.lists(
    st.sampled_from(
        ["fox", "don't", "42", "::", "ü", " ", "  ", "\n", "\r\n", "\t", "\xa0", "\x1c"]
    ),
    max_size=80,
)


@given(chunks=chunks, limit=st.integers(1, 40))
def test_chunks_are_the_text_in_order(chunks: list[str], limit: int) -> None:
    out = list(pieces(chunks, limit))
    assert "".join(chunk.text for chunk in out) == "".join(chunks)
    assert [chunk.ends for chunk in out] == [False] * (len(out) - 1) + [True]
    assert all(len(chunk.text) <= limit for chunk in out)
    assert len(out) == 1 or all(chunk.text for chunk in out)


@given(words=prose, limit=st.integers(20, 60))
def test_tokens_are_those_of_the_whole(words: list[str], limit: int) -> None:
    text = "".join(words)
    out = [chunk.text for chunk in pieces(words, limit)]
    seams = all(not left[-1].isspace() and right[0] in " \n\r\t" for left, right in pairwise(out))
    ids = [id_ for chunk in out for id_ in TOKENIZER.encode(chunk)]
    assert TOKENIZER.decode(ids) == text
    if seams:
        assert ids == TOKENIZER.encode(text)


def test_prose_is_always_cut_at_a_seam() -> None:
    text = "".join(sentences(200))
    out = [chunk.text for chunk in pieces([text], 100)]
    assert len(out) > 80
    assert all(chunk[0] in " \n" for chunk in out[1:])
    assert [id_ for chunk in out for id_ in TOKENIZER.encode(chunk)] == TOKENIZER.encode(text)


def test_text_without_white_space_is_cut_anywhere() -> None:
    assert [chunk.text for chunk in pieces(["abcdefgh"], 3)] == ["abc", "def", "gh"]
