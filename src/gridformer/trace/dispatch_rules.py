"""Lets torch find the rules of dispatch modes for operators in less time.

Before torch calls a mode, it asks in Python whether a rule for this operator and this mode was
registered, and looks the operator up by its name. That takes a fifth of a trace.
"""

from __future__ import annotations

from typing import Any

from torch._library import simple_registry

# By the id of an operator, which is kept because its id must not become that of another one.
_rules: dict[int, tuple[Any, Any]] = {}


def remember_rules() -> None:
    """Makes torch remember where the rules for an operator are.

    Torch keeps the function that finds them from its first use on, so this must come before the
    first dispatch mode of a process; later it changes nothing. Rules are found as before, also
    those that are registered later.
    """
    setattr(simple_registry, "find_torch_dispatch_rule", _rule_of)  # noqa: B010


def _rule_of(op: Any, mode: type) -> Any:
    found = _rules.get(id(op))
    if found is None:
        rules = simple_registry.singleton.find(op.__qualname__).torch_dispatch_rules
        found = _rules[id(op)] = op, rules
    return found[1].find(mode)
