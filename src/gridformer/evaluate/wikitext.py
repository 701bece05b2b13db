"""WikiText's pages, and the text that its tokens were made from.

WikiText (Merity et al. 2017) has spaces around its words and punctuation, and `@-@` for a hyphen
within a word. Perplexity per word is comparable between models of any vocabulary if all of them
predict the restored text and divide by the words of the original one. lm-evaluation-harness (task
`wikitext`) does so, and what is restored here is what it restores.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from gridformer.evaluate.prompts import JSON_LINES, read_input_text, read_texts
from gridformer.utils.errors import DataError

# A heading of the first level begins a page: ` = Title = `.
_HEADING = re.compile(r"^ = [^=\n](?:.*[^=\n])? = *$", re.MULTILINE)
# Spaces that were put between marks, in the order in which they are taken out.
_WITHIN = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_BEFORE = ":;.!?,"
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]
_AFTER = [
    *((" ".join("=" * n), "=" * n) for n in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def restored(page: str) -> str:
    """Returns the text of a page without the spaces that tokenization has put in."""
    for old, new in _WITHIN:
        page = page.replace(old, new)
    for mark in _BEFORE:
        page = page.replace(f" {mark} ", f"{mark} ")
    for left, right in _PAIRS:
        inside = rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}"
        page = re.sub(inside, rf"{left}\1{right}", page)
    for old, new in _AFTER:
        page = page.replace(old, new)
    return page


def n_words(page: str) -> int:
    """Returns the number of words of an original page, by which perplexity is normalized."""
    return len(re.split(r"\s+", page))


def read_pages(path: Path) -> list[str]:
    """Returns the pages of a file: JSON lines with the key `page`, or the text of WikiText.

    Raises:
        DataError: The file cannot be read, or has no text.
    """
    if path.suffix in JSON_LINES:
        pages = [page for (page,) in read_texts(path, "page")]
    else:
        text = read_input_text(path)
        starts = [found.start() for found in _HEADING.finditer(text)]
        cuts = sorted({0, *starts, len(text)})
        pages = [text[a:b] for a, b in pairwise(cuts) if text[a:b].strip()]
    if not any(page.strip() for page in pages):
        raise DataError(f"{path}: has no text")
    return pages
