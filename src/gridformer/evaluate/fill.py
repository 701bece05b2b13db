"""Blanks in a text, filled in by models that learned to: BERT's words, T5's spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gridformer.data import SpecialIds, Tokenizer
from gridformer.evaluate.decode import Search, search
from gridformer.models import BERT, EncoderDecoder
from gridformer.utils.errors import UserError

BLANK = "___"  # three underscores


def parts_of(text: str) -> list[str]:
    """What stands between the blanks of a text. Raises UserError where there is none."""
    parts = text.split(BLANK)
    if len(parts) == 1:
        raise UserError(
            f"the prompt has no blank: write {BLANK} where something is to be filled in, for "
            f'instance --prompt "import {BLANK}"'
        )
    return parts


@torch.no_grad()
def fill_words(model: BERT, tokenizer: Tokenizer, special: SpecialIds, text: str) -> list[str]:
    """The likeliest token for each blank, all at once."""
    assert special.cls is not None
    assert special.mask is not None
    assert special.sep is not None
    ids, blanks = [special.cls], []
    for number, part in enumerate(parts_of(text)):
        if number:
            blanks.append(len(ids))
            ids.append(special.mask)
        ids += tokenizer.encode(part)
    ids.append(special.sep)
    if len(ids) > model.config.max_seq_len:
        raise UserError(
            f"the prompt takes {len(ids)} tokens, and the model reads "
            f"{model.config.max_seq_len}: shorten it"
        )
    device = next(model.parameters()).device
    logits = model(torch.tensor([ids], device=device))[0, blanks, : special.ordinary_size]
    logits[:, sorted(special.not_words)] = -torch.inf
    return [tokenizer.decode([word]) for word in logits.argmax(-1).tolist()]


def fill_spans(
    model: EncoderDecoder, tokenizer: Tokenizer, special: SpecialIds, text: str, how: Search
) -> list[str]:
    """The text of each blank; empty where the model says nothing of one."""
    parts = parts_of(text)
    if len(parts) - 1 > len(special.sentinels):
        raise UserError(f"{len(parts) - 1} blanks: the model knows {len(special.sentinels)}")
    source: list[int] = []
    for number, part in enumerate(parts):
        source += [special.sentinels[number - 1]] * (number > 0) + tokenizer.encode(part)
    never = set(special.never(model.config.vocab_size)) - set(special.sentinels)
    found = search(
        model, [*source, special.eos], special.start, special.eos, how, never=sorted(never)
    )
    return [tokenizer.decode(span) for span in spans_of(found, special, len(parts) - 1)]


def spans_of(found: Sequence[int], special: SpecialIds, n_blanks: int) -> list[list[int]]:
    """The tokens after each blank's sentinel, up to the next sentinel."""
    numbers = {sentinel: number for number, sentinel in enumerate(special.sentinels)}
    spans: list[list[int]] = [[] for _ in range(n_blanks)]
    here: list[int] | None = None
    for token in found:
        number = numbers.get(token)
        if number is not None:
            here = spans[number] if number < n_blanks else None
        elif here is not None:
            here.append(token)
    return spans
