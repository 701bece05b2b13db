"""Cuts texts into the windows that a model scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gridformer.data import Tokenizer
from gridformer.evaluate.scoring import ScoredWindow

# Names of a begin-of-text token, for tokenizers that do not put it before texts themselves.
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")


def prefix_id(tokenizer: Tokenizer) -> int:
    """Returns the token that is read before the first token of a text.

    It is the tokenizer's begin-of-text token, such as that of `prepare --bos`, or else the
    end-of-text token, which precedes a text in training.
    """
    if tokenizer.begin_ids:
        return tokenizer.begin_ids[-1]
    found = (tokenizer.id_of(name) for name in _BEGINS)
    return next((i for i in found if i is not None), tokenizer.eos_id)


def sliding(ids: Sequence[int], prefix: int, length: int, stride: int) -> Iterator[ScoredWindow]:
    """Yields windows in which each token of a text is predicted once, in order.

    The first window predicts up to `length` tokens, each further one the next `stride` tokens, or
    what is left, with as many tokens before them as the model reads. With a stride of `length`
    these are the windows of lm-evaluation-harness.

    Args:
        ids: The text.
        prefix: See `prefix_id`.
        length: How many tokens the model reads at once.
        stride: From 1 to `length`; small strides give each token a longer context and take longer.
    """
    whole, done = [prefix, *ids], 0
    while done < len(ids):
        new = min(stride if done else length, len(ids) - done)
        done += new
        yield ScoredWindow(whole[max(0, done - length) : done + 1], new)


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int) -> ScoredWindow:
    """Returns the window that predicts `text` after `context`.

    As in lm-evaluation-harness, both are tokenized together, spaces at the end of the context
    belong to the text, and a context that is too long loses its first tokens.

    Args:
        tokenizer: The tokenizer.
        context: The text before; it may be empty.
        text: The text that is predicted.
        length: How many tokens the model reads at once.
    """
    bare = context.rstrip()
    text = context[len(bare) :] + text
    whole, before = (
        [*tokenizer.begin_ids, *ids] for ids in tokenizer.encode_batch([bare + text, bare])
    )
    return after(before or [prefix_id(tokenizer)], whole[len(before) :], length)


def after(context: Sequence[int], ids: Sequence[int], length: int) -> ScoredWindow:
    """Returns the window that predicts tokens after those of a context of at least one token.

    Args:
        context: The tokens before.
        ids: The tokens to predict; of more than `length` only the last ones are predicted.
        length: How many tokens the model reads at once.
    """
    return ScoredWindow([*context, *ids][-(length + 1) :], min(len(ids), length))
