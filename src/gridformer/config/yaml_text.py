"""Parses YAML, and refuses some YAML that is valid: repeated keys, deep nesting and aliases."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import yaml

MOST_DEPTH: Final = 50


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML document.

    This refuses text that is not YAML, and also keys that occur twice (YAML would silently take the
    last one), values that are nested deeper than MOST_DEPTH, and aliases, a few of which can stand
    for billions of values.

    Raises:
        ValueError: The text is refused; the message is a part of a sentence.
    """
    try:
        return yaml.load(text, _Loader)  # which is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        words = " ".join(str(error.problem or error.context).split())
        raise ValueError(f"{where}{words}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ValueError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise self._refused("aliases are not supported: write the value itself", mark)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._refused(f"values are nested deeper than {MOST_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # Dates that do not exist, numbers of thousands of digits, and tags that do not fit.
        except (ValueError, TypeError, LookupError, AttributeError):
            kind = str(node.tag).rpartition(":")[2]
            value = str(node.value)[:40] if isinstance(node, yaml.ScalarNode) else "this"
            raise self._refused(f"{value} is not valid as {kind}", node.start_mark) from None

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            if before := lines.get((key.tag, key.value)):
                problem = f"the key {key.value} occurs twice, first in line {before}"
                raise self._refused(problem, key.start_mark)
            lines[key.tag, key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    @staticmethod
    def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
        return yaml.constructor.ConstructorError(None, None, problem, mark)
