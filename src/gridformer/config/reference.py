"""Writes the page with all keys of a run file: python -m gridformer.config.reference > PAGE."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gridformer.config.run import RunConfig
from gridformer.utils.units import format_value

# The words for types, of which the first that fits is taken.
_WORDS = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    Path: "path",
    BaseModel: "section",
    tuple | list: "list",
    dict: "mapping",
}
_SECTIONS = ("model", "data", "layout", "train")
_BEGIN = """# All keys of a run file

A run file is YAML with four sections, and `name`. This page is generated from the descriptions in
`gridformer.config`: `python -m gridformer.config.reference > docs/reference/config.md`. An unknown
key is refused, and the error names the closest known one. `SECTION.KEY=VALUE` on the command line
overrides the file. Where a model is shipped (`model: gpt2-124m`, or with changes
`model: {name: gpt2-124m, dropout: 0.1}`), its values take the place of the defaults of `model`.
"""


def reference() -> str:
    """Returns the page, in Markdown."""
    lines = [_BEGIN, *_table({"name": RunConfig.model_fields["name"]}, "")]
    for section in _SECTIONS:
        kind = RunConfig.model_fields[section].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        lines += [f"\n## {section}\n", *_table(kind.model_fields, f"{section}.")]
        seen = set()
        for key, field in kind.model_fields.items():
            for one in _kinds(field.annotation):
                if isinstance(one, type) and issubclass(one, BaseModel) and one not in seen:
                    seen.add(one)
                    lines += [f"\n### {section}.{key}\n", *_table(one.model_fields, "")]
    return "\n".join(lines) + "\n"


def _table(fields: dict[str, FieldInfo], before: str) -> list[str]:
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key, field in fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{before}{key}` | {_values(field)} | {_default(field)} | {text} |")
    return lines


def _values(field: FieldInfo) -> str:
    return ", ".join(dict.fromkeys(_word(kind) for kind in _kinds(field.annotation)))


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{format_value(value)}`" for value in get_args(kind))
    kind = get_origin(kind) or kind
    return next((word for base, word in _WORDS.items() if issubclass(kind, base)), "text")


def _kinds(kind: Any) -> Iterator[Any]:
    """Yields the types that a value may have, sections in lists among them, without None."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _kinds(get_args(kind)[0])
    elif origin in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _kinds(one)
    elif origin in (tuple, list, dict):
        yield kind
        for one in get_args(kind):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield one
    elif kind is not type(None):
        yield kind


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", ()) or isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(format_value, value))}]`"
    return f"`{format_value(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
