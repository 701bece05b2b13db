"""Where in a model a thread is, found from its stack while it is there."""

import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridformer.launch.watch import StackLocation

PLACES: list[str] = []
WHERE = StackLocation()


class Sum(torch.autograd.Function):
    """Notes where it runs, as a message would be noted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        PLACES.append(WHERE.module(sys._getframe()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        PLACES.append(WHERE.module(sys._getframe()))
        return grads[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(Sum.apply(self.norm(x)))
        return found


def test_the_module_of_a_message_is_named() -> None:
    WHERE.model = nn.Sequential(Layer(), Layer())
    try:
        WHERE.model(torch.ones(2, 4)).sum().backward()
        there = [*PLACES]
        assert WHERE.module(sys._getframe()) == ""
    finally:
        WHERE.model = None
        PLACES.clear()
    assert there[:2] == ["0 (forward)", "1 (forward)"]
    assert there[2].startswith("the backward pass near 1.norm.")
    assert there[3].startswith("the backward pass near 0.norm.")


def test_a_call_between_two_lines_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python then knows none, and the watch, which asks once a second, must not end of it."""
    calls = [(sys._getframe(), None)]
    monkeypatch.setattr(traceback, "walk_stack", lambda frame: calls)
    (line,) = WHERE.stack(sys._getframe())
    assert line.endswith("line ?, in test_a_call_between_two_lines_has_no_number\n")


def test_the_stack_ends_with_the_innermost_call() -> None:
    call = WHERE.stack(sys._getframe())[-1]
    source = "    call = WHERE.stack(sys._getframe())[-1]\n"
    assert call.endswith("in test_the_stack_ends_with_the_innermost_call\n" + source)
