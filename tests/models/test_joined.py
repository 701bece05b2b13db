"""Products with several weights side by side: values, gradients, and what is kept of weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.blocks import Init, MergedLinear, PartSize, Role, attach_copies, keep_copies
from gridformer.models.blocks.cast import cast, copy_of

WIDTHS = {"q": 12, "k": 4, "v": 4}


def made(dtype: torch.dtype, bias: bool = False) -> MergedLinear:
    parts = {name: PartSize(n, Init(std=1.0)) for name, n in WIDTHS.items()}
    product = MergedLinear(8, parts, Role("qkv", "attention"), bias)
    generator = torch.Generator().manual_seed(1)
    for parameter in product.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return product


def loss_of(out: Sequence[Tensor]) -> Tensor:
    return torch.stack([(i + 1) * part.float().square().sum() for i, part in enumerate(out)]).sum()


def results(product: MergedLinear, x: Tensor) -> list[Tensor]:
    """Return the outputs and all gradients of a loss that reads every output differently."""
    x = x.clone().requires_grad_()
    with keep_copies(product.parameters()):
        out = product(x)
        grads = torch.autograd.grad(loss_of(out), (x, *product.parameters()))
    return [*(part.detach() for part in out), *grads]


def separately(product: MergedLinear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = []
    for part in product.parts():
        bias = None if part.bias is None else part.bias.to(x.dtype)
        out.append(F.linear(x, part.weight.to(x.dtype).t(), bias))
    grads = torch.autograd.grad(loss_of(out), (x, *product.parameters()))
    return [*(part.detach() for part in out), *grads]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_separate_products(dtype: torch.dtype, bias: bool) -> None:
    product = made(torch.float64 if dtype == torch.float64 else torch.float32, bias)
    attach_copies(product, dtype, once=True)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    for got, want in zip(results(product, x), separately(product, x), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        rtol, atol = (3e-2, 1e-1) if dtype == torch.bfloat16 else (1e-5, 1e-5)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_copies_of_a_step_are_one_tensor() -> None:
    product = made(torch.float32)
    attach_copies(product, torch.bfloat16, once=True)
    weight, _ = product.operands(torch.bfloat16)
    parts = product.parts()
    with keep_copies(product.parameters()):
        first = cast(weight, torch.bfloat16)
        assert cast(product.operands(torch.bfloat16)[0], torch.bfloat16) is first
        q, k = copy_of(parts[0].weight), copy_of(parts[1].weight)
        assert q is not None
        assert k is not None
        assert k.value is not None
        assert k.value.data_ptr() == first[:, 12:].data_ptr()
        with torch.no_grad():
            parts[0].weight.add_(1.0)  # an update during the step
        q.drop()
        again = cast(weight, torch.bfloat16)
        assert torch.equal(again[:, :12], parts[0].weight.detach().bfloat16())
        assert torch.equal(again[:, 12:16], parts[1].weight.detach().bfloat16())
    assert q.value is None
    assert k.value is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_no_second_copy_of_the_weights(dtype: torch.dtype) -> None:
    """What autograd saves is the input, the parameters, and a tensor of one element."""
    product = made(torch.float32)
    attach_copies(product, dtype, once=False)
    x = torch.randn(2, 5, 8).to(dtype).requires_grad_()
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        product(x)
    mine = {p.untyped_storage().data_ptr() for p in (x, *product.parameters())}
    assert sum(size for where, size in kept.items() if where not in mine) <= 8
