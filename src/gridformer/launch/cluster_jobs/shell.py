"""Lines of shell scripts: every value is quoted, so that none is read as a command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

PYTHON = "python3"


def command(words: Sequence[str], indent: str = "    ") -> str:
    """Returns a command with quoted words: one line if it is short, else a line for each option.

    Args:
        words: Its words, unquoted. A `Raw` word is not quoted.
        indent: Before the second and each further line.
    """
    quoted = [word if isinstance(word, Raw) else shlex.quote(word) for word in words]
    line = " ".join(quoted)
    if len(line) <= 100:
        return line
    lines = [quoted[0]]
    for word in quoted[1:]:
        program = word == PYTHON or (word == "-m" and lines[-1] != PYTHON)
        if program or word.startswith("--") or len(lines[-1]) + len(word) > 95:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return f" \\\n{indent}".join(lines)


class Raw(str):
    """A word of ours that the shell is to expand, such as "$SLURM_JOB_ID" in double quotes."""


def comments(sentences: Sequence[str]) -> list[str]:
    """Returns comment lines. A sentence with a line break would end the comment, so it has none."""
    return [f"# {' '.join(sentence.split())}" for sentence in sentences]
