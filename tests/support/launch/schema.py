"""Checks objects against the parts of JSON Schema that schemas/kubernetes.json uses."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "string": str,
}


@cache
def kubernetes() -> dict[str, Any]:
    path = Path(__file__).with_name("schemas") / "kubernetes.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def problems(thing: Any, schema: dict[str, Any], where: str) -> list[str]:
    """Return what a schema of kubernetes() refuses in a thing."""
    if "$ref" in schema:
        return problems(thing, kubernetes()["$defs"][schema["$ref"].rsplit("/", 1)[1]], where)
    if "anyOf" in schema or "oneOf" in schema:
        ways = [problems(thing, one, where) for one in (schema.get("anyOf") or schema["oneOf"])]
        return [] if [] in ways else ways[0]
    found = []
    kind = schema.get("type")
    if kind and not _is_a(thing, kind):
        return [f"{where}: {thing!r} is no {kind}"]
    if thing not in schema.get("enum", [thing]):
        found.append(f"{where}: {thing!r} is not one of {schema['enum']}")
    if isinstance(thing, list):
        for i, item in enumerate(thing):
            found += problems(item, schema.get("items", {}), f"{where}[{i}]")
    if isinstance(thing, dict):
        found += [f"{where}: no {key}" for key in schema.get("required", []) if key not in thing]
        for key, value in thing.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            if inner is False:
                found.append(f"{where}: unknown key {key}")
            elif isinstance(inner, dict):
                found += problems(value, inner, f"{where}.{key}")
    return found


def _is_a(thing: Any, kinds: str | list[str]) -> bool:
    if isinstance(thing, bool):
        return "boolean" in kinds
    names = [kinds] if isinstance(kinds, str) else kinds
    return any(name != "null" and isinstance(thing, _TYPES[name]) for name in names)
