"""Cutting long documents without changing their tokens."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.prepare.text_chunks import pieces
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
def test_pieces_are_the_text_in_order(chunks: list[str], limit: int) -> None:
    out = list(pieces(chunks, limit))
    assert "".join(piece.text for piece in out) == "".join(chunks)
    assert [piece.ends for piece in out] == [False] * (len(out) - 1) + [True]
    assert all(len(piece.text) <= limit for piece in out)
    assert len(out) == 1 or all(piece.text for piece in out)


@given(words=prose, limit=st.integers(20, 60))
def test_tokens_are_those_of_the_whole(words: list[str], limit: int) -> None:
    text = "".join(words)
    out = [piece.text for piece in pieces(words, limit)]
    seams = all(not left[-1].isspace() and right[0] in " \n\r\t" for left, right in pairwise(out))
    ids = [id_ for piece in out for id_ in TOKENIZER.encode(piece)]
    assert TOKENIZER.decode(ids) == text
    if seams:
        assert ids == TOKENIZER.encode(text)


def test_prose_is_always_cut_at_a_seam() -> None:
    text = "".join(sentences(200))
    out = [piece.text for piece in pieces([text], 100)]
    assert len(out) > 80
    assert all(piece[0] in " \n" for piece in out[1:])
    assert [id_ for piece in out for id_ in TOKENIZER.encode(piece)] == TOKENIZER.encode(text)


def test_text_without_white_space_is_cut_anywhere() -> None:
    assert [piece.text for piece in pieces(["abcdefgh"], 3)] == ["abc", "def", "gh"]
