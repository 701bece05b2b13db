"""Fills in the blanks of a text: single tokens with BERT, spans with T5."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gridformer.data import SpecialIds
from gridformer.evaluate.beams import BeamSearch, beam_search
from gridformer.evaluate.decoding import whole_logits
from gridformer.evaluate.loading import Trained
from gridformer.evaluate.scoring import in_batches
from gridformer.utils.batch import Batch
from gridformer.utils.errors import UserError

BLANK = "___"  # three underscores


def parts_of(text: str) -> list[str]:
    """Splits a text at its blanks.

    Raises:
        UserError: The text has no blank.
    """
    parts = text.split(BLANK)
    if len(parts) == 1:
        raise UserError(
            f"the prompt has no blank: write {BLANK} where text is to be filled in, for example "
            f'--prompt "import {BLANK}"'
        )
    return parts


def fill_words(trained: Trained, special: SpecialIds, text: str) -> list[str]:
    """Predicts the most likely token for each blank, for all blanks in one pass.

    All processes call it together and get the same words.

    Args:
        trained: BERT model.
        special: Ids of its special tokens.
        text: Prompt with blanks.

    Returns:
        One text per blank.

    Raises:
        UserError: The text has no blank, or more tokens than the model reads.
    """
    assert special.cls is not None
    assert special.mask is not None
    assert special.sep is not None
    model, tokenizer = trained.model, trained.tokenizer
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
            f"{model.config.max_seq_len}: shorten the prompt"
        )

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        padding = -len(ids) % multiple
        row = torch.tensor([[*ids, *[special.pad] * padding]])
        valid = torch.arange(len(ids) + padding) < len(ids)
        return {"tokens": row.repeat(len(numbers), 1), "valid": valid.repeat(len(numbers), 1)}

    def words(hidden: Tensor, batch: Batch) -> Tensor | None:
        logits = whole_logits(model, hidden)
        if logits is None:
            return None
        logits = logits[:, blanks, : special.ordinary_size]
        logits[..., sorted(special.not_words)] = -torch.inf
        return logits.argmax(-1)

    found = in_batches(trained, [0], 1, batch_of, words, len(blanks))[0]
    return [tokenizer.decode([int(word)]) for word in found.tolist()]


def fill_spans(
    trained: Trained, special: SpecialIds, texts: Sequence[str], how: BeamSearch
) -> list[list[str]]:
    """Predicts the text of each blank of some prompts with beam search.

    The prompts go through the model together. All processes call it together and get the same
    texts.

    Args:
        trained: T5 model that was trained on spans.
        special: Ids of its special tokens.
        texts: Prompts with blanks.
        how: Settings of the search.

    Returns:
        For each prompt one text per blank, empty for blanks that the output of the model does not
        mention.

    Raises:
        UserError: A prompt has no blank, or more blanks than the model has sentinels.
    """
    sources = [_source(trained, special, parts_of(text)) for text in texts]
    never = sorted(set(special.never(trained.model.config.vocab_size)) - set(special.sentinels))
    with trained.in_use():
        found = beam_search(trained, sources, special.start, special.eos, how, never)
    return [
        [trained.tokenizer.decode(span) for span in spans_of(ids, special, len(parts_of(text)) - 1)]
        for ids, text in zip(found, texts)
    ]


def _source(trained: Trained, special: SpecialIds, parts: Sequence[str]) -> list[int]:
    """Returns the tokens of a prompt, with a sentinel for each blank between its parts."""
    if len(parts) - 1 > len(special.sentinels):
        raise UserError(
            f"the prompt has {len(parts) - 1} blanks, and the model knows "
            f"{len(special.sentinels)}: use no more than these"
        )
    source: list[int] = []
    for number, part in enumerate(parts):
        source += [special.sentinels[number - 1]] * (number > 0) + trained.tokenizer.encode(part)
    return [*source, special.eos]


def spans_of(found: Sequence[int], special: SpecialIds, n_blanks: int) -> list[list[int]]:
    """Splits an output of T5 into the tokens of each blank, from its sentinel to the next one.

    Args:
        found: Token ids of the output.
        special: Ids of the sentinels.
        n_blanks: Number of blanks in the prompt.

    Returns:
        One list of token ids per blank.
    """
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
