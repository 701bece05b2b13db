"""Gradients of a weight that products add to those of earlier backward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from gridformer.models.blocks import (
    Init,
    Linear,
    MergedLinear,
    PartSize,
    Role,
    attach_copies,
    attach_gradient_slots,
    gradient_slot,
)
from gridformer.models.blocks.cast import transposed
from gridformer.models.blocks.gradient_sum import GradientSum, continued, summed

ROLE = Role("qkv", "attention")
PARTS = {"q": PartSize(6, Init(std=1.0)), "k": PartSize(2, Init(std=1.0))}


def made(kind: str) -> nn.Module:
    """Return a product of bfloat16 activations with float32 weights, which are filled."""
    product = Linear(8, 6, ROLE, Init(std=1.0)) if kind == "one" else MergedLinear(8, PARTS, ROLE)
    generator = torch.Generator().manual_seed(1)
    for parameter in product.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    attach_copies(product, torch.bfloat16, once=True)
    attach_gradient_slots(product)
    return product


@contextmanager
def adding(module: nn.Module) -> Iterator[None]:
    places = [at for p in module.parameters() if (at := gradient_slot(p))]
    assert places
    for place in places:
        place.continued = True
    yield
    for place in places:
        place.continued = False


def backward(product: nn.Module, micro_batch: int) -> None:
    generator = torch.Generator().manual_seed(micro_batch)
    x = torch.randn(3, 5, 8, generator=generator).bfloat16().requires_grad_()
    out = product(x)
    outs = out if isinstance(out, tuple) else (out,)
    torch.stack([one.float().square().sum() for one in outs]).sum().backward()


def weights(product: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in product.parameters() if parameter.dim() == 2]


@pytest.mark.parametrize("kind", ["one", "several side by side"])
def test_the_sum_is_that_of_autograd_and_stays_where_it_is(kind: str) -> None:
    alone, together = made(kind), made(kind)
    places: list[list[int]] = []
    for micro_batch in range(3):
        backward(alone, micro_batch)
        with adding(together):
            backward(together, micro_batch)
        places.append([parameter.grad.data_ptr() for parameter in weights(together)])  # type: ignore[union-attr]
    assert places[1] == places[0] == places[2], "autograd made a copy"
    for mine, other in zip(together.parameters(), alone.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-6)


def test_without_a_step_gradients_are_left_alone() -> None:
    """Somebody may ask for gradients while a parameter has some."""
    product = made("one")
    backward(product, 0)
    (weight,) = weights(product)
    assert weight.grad is not None
    before = weight.grad.clone()
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    (again,) = torch.autograd.grad(product(x).float().sum(), [weight])
    assert torch.equal(weight.grad, before)
    torch.testing.assert_close(again, torch.full((8, 6), 2.0))


def test_a_chunk_of_a_loss_gets_its_own_gradient() -> None:
    product = made("one")
    (weight,) = weights(product)
    with adding(product):
        backward(product, 0)
        assert weight.grad is not None
        with summed([weight]):
            assert continued(weight) is None
        assert weight.grad is not None
        assert continued(weight) is not None
        assert weight.grad is None, "it was taken"


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_may_be_read_in_either_order(by_columns: bool, turned: bool) -> None:
    product = Linear(8, 6, ROLE, Init(std=1.0))
    if by_columns:
        product.weight = nn.Parameter(torch.randn(6, 8).t())
    attach_gradient_slots(product)
    parameter = product.weight
    earlier = torch.randn_like(parameter)
    assert earlier.stride() == parameter.stride()
    a, b = torch.randn(8, 5), torch.randn(5, 6)
    weight = parameter
    if turned:
        weight, a, b = transposed(parameter), b.t(), a.t()  # type: ignore[assignment]
    parameter.grad = earlier.clone(memory_format=torch.preserve_format)
    with adding(product):
        gradient = continued(weight)
        assert gradient is not None
        gradient.add_product(a, b)
        gradient.add(a @ b)
        found = gradient.value
    assert found.shape == weight.shape
    found = found.t() if turned else found
    assert found.stride() == parameter.stride(), "autograd would copy it otherwise"
    want = earlier + 2 * (a @ b).t() if turned else earlier + 2 * (a @ b)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_weight_is_not_the_weight() -> None:
    product = Linear(8, 6, ROLE, Init(std=1.0))
    attach_gradient_slots(product)
    with adding(product):
        assert continued(product.weight[:, :3]) is None
        assert continued(product.weight * 2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_room_for_what_follows_it(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 5).to(dtype), torch.randn(5, 3).to(dtype)
    total = GradientSum((4, 3), torch.float32, elements=15)

    def room(x: Tensor) -> int:
        return x.untyped_storage().nbytes() // x.element_size()

    total.add_product(a, b)
    assert room(total.value) == 15
    total.add_product(a, b)
    assert room(total.value) == 15
    torch.testing.assert_close(total.value, 2 * (a @ b).float(), rtol=1e-2, atol=1e-2)
    if dtype != torch.float32:  # a gradient of the sum's type is taken as it is
        one = GradientSum((4, 3), torch.float32, elements=15)
        one.add(a @ b)
        assert room(one.value) == 15
        assert torch.equal(one.value, (a @ b).float())
