"""Products with one weight or several side by side: values, gradients, and what is kept."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.blocks import (
    Init,
    Linear,
    MergedLinear,
    PartSize,
    Role,
    attach_copies,
    keep_copies,
)
from gridformer.models.blocks.cast import cast, copy_of

ROLE = Role("qkv", "attention")
KINDS = pytest.mark.parametrize("kind", ["one", "several side by side"])


def made(kind: str, dtype: torch.dtype, bias: bool = False) -> Linear | MergedLinear:
    parts = {name: PartSize(n, Init(std=1.0)) for name, n in {"q": 12, "k": 4, "v": 4}.items()}
    one = kind == "one"
    product = Linear(8, 6, ROLE, Init(), bias) if one else MergedLinear(8, parts, ROLE, bias)
    generator = torch.Generator().manual_seed(1)
    for parameter in product.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return product


def together(product: Linear | MergedLinear, x: Tensor) -> Sequence[Tensor]:
    out = product(x)
    return out if isinstance(product, MergedLinear) else (out,)


def separately(product: Linear | MergedLinear, x: Tensor) -> Sequence[Tensor]:
    out = []
    for part in product.parts() if isinstance(product, MergedLinear) else (product,):
        bias = None if part.bias is None else part.bias.to(x.dtype)
        out.append(F.linear(x, part.weight.to(x.dtype).t(), bias))
    return out


@KINDS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_separate_products(kind: str, dtype: torch.dtype, bias: bool) -> None:
    """So do the gradients of a loss that reads every output differently."""
    product = made(kind, torch.float64 if dtype == torch.float64 else torch.float32, bias)
    attach_copies(product, dtype, once=True)
    x0 = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for how in (together, separately):
        x = x0.clone().requires_grad_()
        with keep_copies(product.parameters()):
            out = how(product, x)
            losses = [(i + 1) * part.float().square().sum() for i, part in enumerate(out)]
            grads = torch.autograd.grad(torch.stack(losses).sum(), (x, *product.parameters()))
        results.append([*(part.detach() for part in out), *grads])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if kind == "one" and not (got.ndim == 1 and dtype == torch.bfloat16):
            assert torch.equal(got, want)
            continue
        rtol, atol = (3e-2, 1e-1) if dtype == torch.bfloat16 else (1e-5, 1e-5)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def test_copies_of_a_step_are_one_tensor() -> None:
    product = made("several side by side", torch.float32)
    assert isinstance(product, MergedLinear)
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


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_keeps_no_second_copy_of_the_weights(kind: str, dtype: torch.dtype) -> None:
    """What autograd saves is the input, the parameters, and a tensor of one element."""
    product = made(kind, torch.float32)
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
