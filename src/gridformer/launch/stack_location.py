"""Where in a program and in its model a thread is, from its stack."""

from __future__ import annotations

import linecache
import traceback
from collections import deque
from types import FrameType
from typing import Any

from torch import nn

_DEEPEST = 40  # calls shown of a stack
_NODES = 200  # of the graph that are looked at to find a parameter


class StackLocation:
    """Names places of the model of this process.

    Attributes:
        model: The model, once there is one.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None

    def stack(self, frame: FrameType) -> list[str]:
        """Returns the calls of a thread, the innermost last, as a traceback shows them."""
        calls = []
        for call, number in [*traceback.walk_stack(frame)][:_DEEPEST]:
            name = call.f_code.co_filename
            # Between two lines, such as on leaving a `with`, Python may know none.
            source = linecache.getline(name, number or 0).strip()
            text = f'  File "{name}", line {number or "?"}, in {call.f_code.co_name}\n'
            calls.append(text + (f"    {source}\n" if source else ""))
        return calls[::-1]

    def module(self, frame: FrameType) -> str:
        """Returns the part of the model in which a thread is; empty if it is in none.

        In a forward pass this is the innermost module on the stack. In a backward pass there are no
        modules on the stack, but the autograd function that runs, and the next parameter of its
        graph is one of the same module or of the one before it.
        """
        if self.model is None:
            return ""
        modules = {id(module): name for name, module in self.model.named_modules()}
        for call, _ in traceback.walk_stack(frame):
            found = call.f_locals
            if (name := modules.get(id(found.get("self")))) is not None:
                return f"{name or 'the model'} (forward)"
            node = found.get("ctx")  # also in the forward pass of an autograd function
            if call.f_code.co_name == "backward" and hasattr(node, "next_functions"):
                parameter = self._next_parameter(node)
                return f"the backward pass near {parameter}" if parameter else "the backward pass"
        return ""

    def _next_parameter(self, node: Any) -> str:
        assert self.model is not None
        names = {id(p): name for name, p in self.model.named_parameters()}
        waiting, seen = deque([node]), {node}
        while waiting and len(seen) < _NODES:
            for found, _ in waiting.popleft().next_functions:
                if found is None or found in seen:
                    continue
                name = names.get(id(getattr(found, "variable", None)))
                if name is not None:
                    return name
                seen.add(found)
                waiting.append(found)
        return ""
