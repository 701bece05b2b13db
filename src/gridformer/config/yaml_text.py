"""Parses YAML, and refuses what is valid but never meant: see `parse_yaml`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import yaml

MOST_DEPTH: Final = 50
MOST_VALUES: Final = 200_000


def parse_yaml(text: str) -> Any:
    """Returns the value of a YAML document.

    This refuses text that is not YAML, and also keys that occur twice (YAML would silently take the
    last one), values that are nested deeper than MOST_DEPTH, and texts whose aliases stand for more
    than MOST_VALUES values or for a value that contains them.

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
    """A loader that counts values where it meets them, before anything is built from them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0  # as many as there are once every alias is written out
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:  # the node that contains this alias is not complete
                raise self._refused("an alias stands for the value that contains it", mark)
            self._count(self._sizes[id(node)], mark)
            return node
        mark = self.peek_event().start_mark
        before = self._values
        self._count(1, mark)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self._refused(f"values are nested deeper than {MOST_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
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
        if isinstance(node, yaml.MappingNode):
            self._refuse_twice(node)
        return super().construct_mapping(node, deep)

    def _refuse_twice(self, node: yaml.MappingNode) -> None:
        """Compares the keys as they are written, before a merge key `<<` adds those of others."""
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in seen and not key.tag.endswith(":merge"):
                before = seen[name].line + 1
                raise self._refused(
                    f"the key {key.value} occurs twice, first in line {before}", key.start_mark
                )
            seen[name] = key.start_mark

    def _count(self, more: int, mark: yaml.Mark) -> None:
        self._values += more
        if self._values > MOST_VALUES:
            raise self._refused(f"there are more than {MOST_VALUES:,} values", mark)

    @staticmethod
    def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
        return yaml.constructor.ConstructorError(None, None, problem, mark)
