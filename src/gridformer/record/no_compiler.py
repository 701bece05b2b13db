"""Keeps torch's compiler, symbolic shapes with sympy, and DTensors from being loaded.

torch's fake tensors import them and need little of them. A command that traces would take 2.0 s of
a processor longer with the compiler, 0.7 s with DTensors and 0.5 s with sympy.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from importlib.util import find_spec
from typing import Any

from gridformer.utils.placeholder_module import PlaceholderModule, substituted, without_dynamo
from gridformer.utils.process import ends_with_its_work


def _same(x: Any) -> Any:
    return x


def _equal(a: Any, b: Any) -> bool:
    """A list and a tuple of the same sizes are equal, as they are for torch."""
    return bool(tuple(a) == tuple(b) if isinstance(a, list | tuple) else a == b)


# What torch's rules for fake tensors ask about sizes that may be symbols. All sizes are numbers.
_SHAPES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious"), _same),
    **dict.fromkeys(("statically_known_true", "guarding_hint_or_throw", "guard_scalar"), _same),
    **dict.fromkeys(("expect_true", "guard_bool", "guard_int"), _same),
    **dict.fromkeys(("has_free_symbols", "has_free_unbacked_symbols"), lambda x: False),
    "free_unbacked_symbols": lambda x: set(),
    "has_guarding_hint": lambda x: True,
    "is_nested_int": lambda x: False,
    "sym_and": lambda *all_of: reduce(operator.and_, all_of),
    "sym_or": lambda *any_of: reduce(operator.or_, any_of),
    "sym_eq": _equal,
    "compute_unbacked_bindings": lambda shape_env, *_, **__: None,
}


class _Nothing:
    """The class of symbols and of DTensors, of which there are none."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replaces what is not yet loaded of these modules by placeholders inside the context.

    Code that needs more of them than the placeholders have gets the real ones. For each tensor of a
    subclass torch asks whether it is a DTensor, and remembers the class of DTensors from then on.
    So only processes that end with their traces get a placeholder for it.
    """
    names: dict[str, dict[str, Any]] = {
        "sympy": {"Basic": _Nothing},
        "torch.fx.experimental.symbolic_shapes": _SHAPES,
        # The largest of some symbols, which torch imports even for numbers.
        "torch.utils._sympy.functions": {"Max": max},
    }
    if ends_with_its_work():
        names["torch.distributed.tensor"] = {"DTensor": _Nothing}
    with ExitStack() as stack:
        stack.enter_context(without_dynamo())
        for name, has in names.items():
            if name not in sys.modules:
                spec = find_spec(name) if name == "sympy" else None
                places = (spec and spec.submodule_search_locations) or [""]
                placeholder = PlaceholderModule(name, places[0])
                vars(placeholder).update(has)
                stack.enter_context(substituted(placeholder))
        yield
