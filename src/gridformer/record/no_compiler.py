"""Keeps torch's compiler, symbolic shapes with sympy, and DTensors from being loaded.

torch's fake tensors import them, and need little of them. A command that traces would take 2.0 s of
a processor longer with the compiler, 0.7 s with DTensors and 0.5 s with sympy.

torch's rules for fake tensors ask about sizes that may be symbols. Here all sizes are numbers, for
which the answers are simple, and the functions of a placeholder give them. Code that asks about a
symbol, or needs more of these modules, gets the real ones.

For each tensor of a subclass torch asks whether it is a DTensor, and remembers the class of
DTensors from then on. So only processes that end with their traces get a placeholder for it: one
that may use DTensors later must see the real ones.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from gridformer.utils.placeholder_module import PlaceholderModule, substituted, without_dynamo
from gridformer.utils.process import ends_with_its_work

_DTENSORS = "torch.distributed.tensor"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_FUNCTIONS = "torch.utils._sympy.functions"


def _same(x: Any) -> Any:
    return x


_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("guard_or_false", "guard_or_true", "guard_size_oblivious"), _same),
    **dict.fromkeys(("statically_known_true", "guarding_hint_or_throw", "guard_scalar"), _same),
    **dict.fromkeys(("expect_true", "guard_bool", "guard_int"), _same),
    **dict.fromkeys(("has_free_symbols", "has_free_unbacked_symbols"), lambda x: False),
    "free_unbacked_symbols": lambda x: set(),
    "has_guarding_hint": lambda x: True,
    "is_nested_int": lambda x: False,
    "sym_and": lambda *all_of: reduce(operator.and_, all_of),
    "sym_or": lambda *any_of: reduce(operator.or_, any_of),
    "sym_eq": operator.eq,
}
_NUMBERS = (bool, int, float)


def _is_plain(x: Any) -> bool:
    if isinstance(x, Tensor):
        return all(map(_is_plain, (*x.shape, *x.stride(), x.storage_offset())))
    return type(x) in _NUMBERS or (isinstance(x, tuple | list) and all(map(_is_plain, x)))


class _SymbolicShapes(PlaceholderModule):
    """A placeholder for torch's module."""

    def __init__(self) -> None:
        super().__init__(_SHAPES)
        for name, answer in _ANSWERS.items():
            setattr(self, name, partial(self._asked, name, answer))

    def _asked(self, name: str, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(map(_is_plain, args)):
            return self._of_real(name, *args, **kwargs)
        # A list and a tuple of the same sizes are equal, as they are for torch.
        return answer(*(tuple(x) if isinstance(x, list) else x for x in args))

    def _of_real(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.real(), name)(*args, **kwargs)

    def compute_unbacked_bindings(self, shape_env: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns None without an environment of shapes, as torch does."""
        if shape_env is None:
            return None
        return self._of_real("compute_unbacked_bindings", shape_env, *args, **kwargs)


class _Functions(PlaceholderModule):
    """A placeholder for torch's functions of symbols, which it imports even for numbers."""

    def __init__(self) -> None:
        super().__init__(_FUNCTIONS)

    def Max(self, *args: Any) -> Any:
        """Returns the largest of some symbols."""
        return self.real().Max(*args)


class _Sympy(PlaceholderModule):
    """A placeholder for sympy. Nothing is a symbol until the real one is loaded."""

    class Basic:
        """The class of symbols, to which no number belongs."""


class _DTensors(PlaceholderModule):
    """A placeholder for DTensors."""

    class DTensor:
        """The class of no tensor."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replaces what is not yet loaded of these modules by placeholders inside the context."""
    placeholders: list[PlaceholderModule] = [_SymbolicShapes(), _Functions()]
    if "sympy" not in sys.modules:
        spec = find_spec("sympy")
        places = (spec and spec.submodule_search_locations) or [""]
        placeholders.insert(0, _Sympy("sympy", places[0]))
    if ends_with_its_work():
        placeholders.append(_DTensors(_DTENSORS))
    with ExitStack() as stack:
        stack.enter_context(without_dynamo())
        for placeholder in placeholders:
            stack.enter_context(substituted(placeholder))
        yield
