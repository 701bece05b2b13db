"""Extracts sentence pairs from the messages of one catalog, without keyboard shortcuts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polib

_WORD = re.compile(r"(?<![%\w])[^\W\d_]+")  # a run of letters that is not a conversion such as %s
# Marks the letter after it as a keyboard shortcut: `_File`, `E&xit`. It also matches `a_b`, `R&D`
# and `&amp;`, which are no shortcuts, but these are the same in the translation.
_MNEMONIC = re.compile(r"[_&](?=[^\W\d_])")


class Pair(NamedTuple):
    """A text and its translation."""

    source: str
    target: str


def cleaned(
    catalog: polib.MOFile | polib.POFile, min_words: int, skipped: Counter[str]
) -> Iterator[Pair]:
    """Yields translated messages on one line each, without keyboard shortcuts.

    Args:
        catalog: The catalog.
        min_words: The fewest words of a source text.
        skipped: Counts what is left out: messages that are short, not translated, or whose
            translation is the same or waits for review (fuzzy).
    """
    for entry in catalog:
        # Compilers leave fuzzy messages out, so entries of .mo files have no such flag.
        if entry.obsolete or getattr(entry, "fuzzy", False):
            skipped["messages that are fuzzy or obsolete"] += 1
            continue
        for source, target in _forms(entry):
            pair = without_mnemonics(Pair(" ".join(source.split()), " ".join(target.split())))
            if not pair.target or pair.source.casefold() == pair.target.casefold():
                skipped["messages without a translation"] += 1
            elif len(_WORD.findall(pair.source)) < min_words:
                skipped[f"messages of less than {min_words} words"] += 1
            else:
                yield pair


def without_mnemonics(pair: Pair) -> Pair:
    """Removes keyboard shortcuts if each text has exactly one and their words differ."""
    marks = [list(_MNEMONIC.finditer(text)) for text in pair]
    if any(len(found) != 1 for found in marks):
        return pair
    places = [found[0].start() for found in marks]
    if pair.source[places[0]] != pair.target[places[1]]:
        return pair
    words = [_word_at(text, place) for text, place in zip(pair, places)]
    if words[0] == words[1]:
        return pair
    return Pair(*(text[:place] + text[place + 1 :] for text, place in zip(pair, places)))


def _forms(entry: polib.POEntry | polib.MOEntry) -> Iterator[tuple[str, str]]:
    """Yields the message, or its singular and plural forms.

    From three or more forms it yields only the first, because a formula determines the numbers to
    which the others apply.
    """
    if not entry.msgid_plural:
        yield entry.msgid, entry.msgstr
        return
    forms = [entry.msgstr_plural[key] for key in sorted(entry.msgstr_plural)]
    if len(forms) > 1:
        yield entry.msgid, forms[0]
    if len(forms) in (1, 2):
        yield entry.msgid_plural, forms[-1]


def _word_at(text: str, place: int) -> str:
    start = max(text.rfind(" ", 0, place), 0)
    return text[start:].split(maxsplit=1)[0]
