"""Writes the page with all keys of a run file: python docs/reference/keys.py > PAGE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridformer.config.run import RunConfig
from gridformer.utils.units import format_value

# What a value is, by the name of its type, or format, in a JSON schema.
_WORDS = {
    "boolean": "`true`, `false`",
    "integer": "whole number",
    "number": "number",
    "path": "path",
    "string": "text",
    "array": "list",
    "object": "mapping",
}
_SECTIONS = ("model", "data", "layout", "train")
_BEGIN = """# All keys of a run file

A run file is YAML with four sections, and `name`. This page is generated from the descriptions in
`gridformer.config`: `python docs/reference/keys.py > docs/reference/config.md`. An unknown
key is refused, and the error names the closest known one. `SECTION.KEY=VALUE` on the command line
overrides the file. Where a model is shipped (`model: gpt2-124m`, or with changes
`model: {name: gpt2-124m, dropout: 0.1}`), its values take the place of the defaults of `model`.
"""


def reference() -> str:
    """Returns the page, in Markdown."""
    run = RunConfig.model_json_schema()
    sections = run["$defs"]
    lines = [_BEGIN, *_table({"properties": {"name": run["properties"]["name"]}}, "")]
    for name in _SECTIONS:
        section = sections[_section_of(run["properties"][name])]
        lines += [f"\n## {name}\n", *_table(section, f"{name}.")]
        parts: dict[str, str] = {}
        for key, field in section["properties"].items():
            for kind in _types(field):
                parts.setdefault(_section_of(kind), key)
        for part, key in parts.items():
            if part:
                lines += [f"\n### {name}.{key}\n", *_table(sections[part], "")]
    return "\n".join(lines) + "\n"


def _table(section: dict[str, Any], before: str) -> list[str]:
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key, field in section["properties"].items():
        text = " ".join(field.get("description", "").split()).replace("|", "\\|")
        values = ", ".join(dict.fromkeys(map(_word, _types(field))))
        required = key in section.get("required", ())
        default = "required" if required else _default(field.get("default"))
        lines.append(f"| `{before}{key}` | {values} | {default} | {text} |")
    return lines


def _types(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the schemas of the types that a value may have, without null."""
    for kind in field.get("anyOf", [field]):
        if kind.get("type") != "null":
            yield kind


def _section_of(kind: dict[str, Any]) -> str:
    """Returns the name of the section that a value, or each of a list, is; empty if it is none."""
    reference: str = kind.get("items", kind).get("$ref", "")
    return reference.rpartition("/")[2]


def _word(kind: dict[str, Any]) -> str:
    if "enum" in kind:
        return ", ".join(f"`{format_value(value)}`" for value in kind["enum"])
    if _section_of(kind):
        return "section" if "$ref" in kind else "list of sections"
    return _WORDS[kind.get("format", kind["type"])]


def _default(value: Any) -> str:
    if value in (None, "", []) or isinstance(value, dict):
        return ""
    if isinstance(value, list):
        return f"`[{', '.join(map(format_value, value))}]`"
    return f"`{format_value(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
