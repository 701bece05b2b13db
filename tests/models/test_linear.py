"""A product in another precision than its weight's gives the same numbers and keeps no copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gridformer.models.blocks.linear import linear


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype).t(), None if bias is None else bias.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_those_of_a_cast_weight(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    found = []
    x0, w0, b0 = torch.randn(3, 5, 8), torch.randn(8, 6), torch.randn(6)
    for product in (plain, linear):
        x = x0.to(dtype).requires_grad_()
        weight, bias = w0.clone().requires_grad_(), b0.clone().requires_grad_()
        y = product(x, weight, bias if biased else None)
        (y * y.detach()).sum().backward()
        found.append((y, x.grad, weight.grad, bias.grad))
    for want, got in zip(*found):
        assert (want is None) == (got is None)
        assert want is None or (want.dtype == got.dtype and torch.equal(want, got))


def test_cast_weights_are_not_kept() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    weight = torch.randn(8, 6, requires_grad=True)
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, weight, None)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), weight.data_ptr()}
