"""Writes the page with all keys of a run file: python -m gridformer.config.reference > PAGE."""

from __future__ import annotations

import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gridformer.config.run import RunConfig
from gridformer.utils.units import format_value

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
    parts = [_BEGIN, *_table({"name": RunConfig.model_fields["name"]}, "")]
    for section in _SECTIONS:
        kind = RunConfig.model_fields[section].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        parts += [f"\n## {section}\n", *_table(kind.model_fields, f"{section}.")]
        parts += [line for one in _inner(kind) for line in _inner_section(section, *one)]
    return "\n".join(parts) + "\n"


def _inner_section(section: str, key: str, kind: type[BaseModel]) -> list[str]:
    return [f"\n### {section}.{key}\n", *_table(kind.model_fields, "")]


def _inner(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields the keys of a section whose values have keys of their own."""
    seen = set()
    for key, field in kind.model_fields.items():
        for one in _kinds(field.annotation):
            if isinstance(one, type) and issubclass(one, BaseModel) and one not in seen:
                seen.add(one)
                yield key, one


def _table(fields: dict[str, FieldInfo], before: str) -> list[str]:
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key, field in fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{before}{key}` | {_values(field)} | {_default(field)} | {text} |")
    return lines


def _values(field: FieldInfo) -> str:
    words = []
    for kind in _kinds(field.annotation):
        if get_origin(kind) is Literal:
            words += [f"`{format_value(value)}`" for value in get_args(kind)]
        elif isinstance(kind, type) and issubclass(kind, Enum):
            words += [f"`{one.value}`" for one in kind]
        elif kind is bool:
            words += ["`true`", "`false`"]
        elif kind is int:
            words.append("whole number")
        elif kind is float:
            words.append("number")
        elif isinstance(kind, type) and issubclass(kind, str):
            words.append("text")
        elif isinstance(kind, type) and issubclass(kind, Path):
            words.append("path")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            words.append("section")
        else:
            words.append(
                {tuple: "list", list: "list", dict: "mapping"}.get(get_origin(kind), "text")
            )
    return ", ".join(dict.fromkeys(words))


def _kinds(kind: Any) -> Iterator[Any]:
    """Yields the types that a value may have, those in lists among them, without None."""
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
    elif kind not in (type(None), Ellipsis):
        yield kind


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None or value == ():
        return ""
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(format_value, value))}]`"
    return f"`{format_value(value)}`" if value != "" else ""


if __name__ == "__main__":
    print(reference(), end="")
