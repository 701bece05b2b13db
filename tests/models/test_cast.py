"""Copies of weights in the type of the computation: their values, and when they exist."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks import IGNORE, CrossEntropy, attach_copies, cast, copy_of, keep_copies
from gridformer.models.blocks.cast import transposed
from gridformer.models.blocks.linear import linear
from tests.support.memory_log import MemoryLog

HALF = torch.bfloat16


class Holder(nn.Module):
    """A matrix [rows, 8] and a bias of `rows` that a head reads."""

    cast_parameters, cast_multiple = ("weight", "bias"), 64

    def __init__(self, rows: int, once: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        self.weight = nn.Parameter(torch.randn(rows, 8, generator=generator))
        self.bias = nn.Parameter(torch.randn(rows, generator=generator))
        attach_copies(self, HALF, once)


@pytest.mark.parametrize("rows", [8, 64, 70])
def test_a_copy_has_the_values_of_the_cast_weight(rows: int) -> None:
    held = Holder(rows)
    weight = held.weight
    for wanted in (weight, weight.t(), held.bias):
        got = cast(wanted, HALF)
        assert torch.equal(got, wanted.detach().to(HALF))
        assert not got.requires_grad
    padded = cast(weight.t(), HALF, padded=True)
    assert padded.shape == (8, -(-rows // 64) * 64)
    assert torch.equal(padded[:, :rows], weight.detach().t().to(HALF))
    assert not padded[:, rows:].any()
    assert torch.equal(cast(weight[:3], HALF), weight[:3].detach().to(HALF)), "a part of it"


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1)])
def test_a_single_row_or_column_is_not_taken_for_its_transpose(shape: tuple[int, int]) -> None:
    """A matrix that is stored column by column then has the strides of its transpose."""
    held = Holder(1)
    held.weight = nn.Parameter(torch.arange(1.0, 1 + max(shape)).as_strided(shape, (1, 1)))
    held.bias = nn.Parameter(torch.zeros(shape[0]))
    attach_copies(held, HALF, once=True)
    for wanted in (held.weight, held.weight.t()):
        assert torch.equal(cast(wanted, HALF), wanted.detach().to(HALF))


def test_a_copy_is_kept_until_the_context_ends_or_the_weight_is_updated() -> None:
    held = Holder(8)
    copy = copy_of(held.weight)
    assert copy is not None
    cast(held.weight, HALF)
    assert copy.value is None, "there is no context"
    with keep_copies(held.parameters()):
        first = cast(held.weight, HALF)
        assert cast(held.weight.t(), HALF).data_ptr() == first.data_ptr()
        with torch.no_grad():
            held.weight.add_(1.0)
        copy.drop()
        assert torch.equal(cast(held.weight, HALF), held.weight.detach().to(HALF))
    assert copy.value is None


def test_whether_copies_are_kept_is_a_setting() -> None:
    held = Holder(8, once=False)
    copy = copy_of(held.weight)
    assert copy is not None
    with keep_copies(held.parameters()):
        cast(held.weight, HALF)
        assert copy.value is None
        with keep_copies(held.parameters(), once=False):
            cast(held.weight, HALF)
            assert copy.value is not None
        assert copy.value is None


def test_a_freed_parameter_is_not_read() -> None:
    held = Holder(8)
    held.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not gathered"):
        cast(held.weight, HALF)


def test_the_transpose_of_a_freed_parameter_is_that_of_its_copy() -> None:
    held = Holder(8)
    whole = held.weight.detach().clone()
    assert torch.equal(transposed(held.weight), whole.t())
    copy = copy_of(held.weight)
    assert copy is not None
    copy.allocate(held.weight).copy_(whole)
    held.weight.untyped_storage().resize_(0)
    turned = transposed(held.weight)
    assert turned.shape == (8, 8)
    assert torch.equal(cast(turned, HALF), whole.to(HALF).t())
    grad = torch.randn(8, 8)
    turned.backward(grad)
    assert held.weight.grad is not None
    assert torch.equal(held.weight.grad, grad.t())


def loss_of(held: Holder, x: Tensor, targets: Tensor, padded: bool) -> list[Tensor]:
    """Return a loss and its gradients, with or without additional columns of logits."""
    x = x.clone().requires_grad_()
    logits = linear(x, held.weight.t(), held.bias, padded)
    assert (logits.shape[-1] > len(held.weight)) == padded
    loss = CrossEntropy(0.1, len(held.weight)).train()(logits, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, held.weight, held.bias))]


def test_additional_columns_of_logits_change_nothing() -> None:
    held = Holder(70)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 8, generator=generator).to(HALF)
    targets = torch.randint(0, 70, (2, 5), generator=generator)
    targets[0, 0] = IGNORE
    want, got = (loss_of(held, x, targets, padded) for padded in (False, True))
    plain = x.clone().requires_grad_()
    logits = F.linear(plain, held.weight.to(HALF), held.bias.to(HALF))
    loss = CrossEntropy(0.1).train()(logits, targets)
    right = [loss.detach(), *torch.autograd.grad(loss, (plain, held.weight, held.bias))]
    for a, b, c in zip(want, got, right):
        assert a.shape == b.shape == c.shape
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(c, a, rtol=1e-2, atol=1e-3)


def test_additional_columns_cost_no_pass_over_the_logits() -> None:
    """As many tensors of the size of the logits are made with them as without."""

    def made(rows: int) -> int:
        held = Holder(rows)
        x, targets = torch.randn(2, 32, 8).to(HALF), torch.zeros(2, 32, dtype=torch.long)
        with MemoryLog() as tracker:
            loss_of(held, x, targets, padded=rows % 64 > 0)
        return sum(entry.n_bytes >= 2 * 64 * 500 for entry in tracker.entries)

    assert made(500) == made(512)
