"""Finds the line of gridformer's code, and the module, that caused an event.

The line is the innermost one outside `gridformer.comm`. If torch calls that in a backward pass, it
is the line of the forward pass, which is noted on the node of the autograd graph.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as modules

import gridformer
from gridformer.comm import autograd
from gridformer.record.events import Place

_ROOT = f"{Path(gridformer.__file__).parent}/"
_DOORS = tuple(f"{_ROOT}{name}/" for name in ("comm", "record"))
_NOTE = "traced_at"  # an attribute of autograd nodes
_NOWHERE = Place("", 0, "")
_NO_NUMBER = 1 << 62


class Places:
    """Names the places of what happens, while `watching` is open."""

    def __init__(self) -> None:
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._known: dict[Place, Place] = {}  # one object for each place makes records small
        # When a module began or ended to run, by torch's number of the next node of a graph.
        self._nodes: list[int] = []
        self._ran: list[str] = []
        self._last = ""

    def name(self, model: nn.Module) -> None:
        """Sets the model whose modules are named in places."""
        self._names = {module: name for name, module in model.named_modules()}

    def here(self) -> Place:
        """Returns the place of what happens now."""
        frame: FrameType | None = sys._getframe(1)
        outside: FrameType | None = None  # the innermost line of code that calls gridformer
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(_DOORS):
                if file.startswith(_ROOT):
                    return self._place(file[len(_ROOT) :], frame)
                if outside is None and "/torch/" not in file:
                    outside = frame
            elif frame.f_code.co_name == "backward":
                noted: Place | None = getattr(_running_node(), _NOTE, None)
                if noted is not None:
                    return self._one(noted._replace(backward=True))
            frame = frame.f_back
        return self._place(Path(outside.f_code.co_filename).name, outside) if outside else _NOWHERE

    def of_kernel(self) -> Place:
        """Returns the module and the direction of what the device does now, without a line.

        The nodes of a graph are numbered in the order in which they were made, so a node's number
        tells which module was running then. The node that adds up a gradient has no number of its
        own.
        """
        node = _running_node()
        if node is None:
            return self._of_module(self._module(), False)
        if self._running:  # a block that is recomputed
            return self._of_module(self._running[-1], True)
        if node._sequence_nr() < _NO_NUMBER:
            self._last = self._maker(node)
        return self._of_module(self._last, True)

    def _module(self) -> str:
        return self._running[-1] if self._running else ""

    def _maker(self, node: Any) -> str:
        """Returns the module that was running when a node was made."""
        at = bisect_right(self._nodes, node._sequence_nr()) - 1
        return self._ran[at] if at >= 0 else ""

    def _of_module(self, module: str, backward: bool) -> Place:
        return self._one(Place("", 0, "", module, backward))

    def of_error(self, error: BaseException) -> Place:
        """Returns the innermost line of gridformer from which an error came."""
        place = _NOWHERE
        for frame in extract_tb(error.__traceback__):
            file = frame.filename
            if file.startswith(_ROOT) and not file.startswith(_DOORS[1]):
                place = Place(file[len(_ROOT) :], frame.lineno or 0, frame.name)
        return place._replace(module=self._module())

    def _place(self, file: str, frame: FrameType) -> Place:
        function = frame.f_code.co_qualname.split(".<locals>")[0]
        module, node = self._module(), _running_node()
        if not module and isinstance(node, BackwardCFunction):
            module = self._maker(node)
        return self._one(Place(file, frame.f_lineno, function, module, node is not None))

    def _one(self, place: Place) -> Place:
        return self._known.setdefault(place, place)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which module runs, and notes on nodes of `comm` where they were made."""

        def applied(out: Tensor) -> None:
            if out.grad_fn is not None:
                setattr(out.grad_fn, _NOTE, self.here())

        def note() -> None:  # which module makes the nodes from now on
            self._nodes.append(torch._C._autograd._get_sequence_nr())
            self._ran.append(self._module())

        def enter(module: nn.Module, _: Any) -> None:
            self._running.append(self._names.get(module, "") or self._module())
            note()

        def leave(*_: Any) -> None:
            self._running.pop()
            note()

        handles = [
            modules.register_module_forward_pre_hook(enter),
            modules.register_module_forward_hook(leave, always_call=True),
        ]
        autograd.listeners.append(applied)
        try:
            yield
        finally:
            autograd.listeners.remove(applied)
            for handle in handles:
                handle.remove()


def _running_node() -> Any:
    """Returns the autograd node whose backward pass runs; None outside of backward passes."""
    return torch._C._current_autograd_node()
