"""A loss over chunks of the tokens gives the same numbers without holding all logits."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gridformer.models.blocks import IGNORE, CrossEntropy, TiedHead, chunked_loss, places_per_chunk
from gridformer.models.kernels import products
from tests.support.memory_log import MemoryLog

H = 6


class Head(nn.Module):
    def __init__(self, v: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm = nn.LayerNorm(H, dtype=dtype)
        self.table = nn.Parameter(torch.randn(v, H, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return F.linear(x, self.table.to(x.dtype))


def in_chunks(
    x: Tensor,
    targets: Tensor,
    head: Head,
    loss: CrossEntropy,
    parameters: list[Tensor],
    tokens: int,
) -> Tensor:
    places = places_per_chunk(x, targets, tokens)
    if places >= x.shape[1]:
        whole: Tensor = loss(head(x), targets)
        return whole
    return chunked_loss(x, targets, places, head, loss, parameters)


def loss_of(
    tokens: int, x: Tensor, targets: Tensor, head: Head, smoothing: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss, and 3 times its gradients."""
    x = x.detach().clone().requires_grad_()
    loss = CrossEntropy(smoothing).train()
    parameters: list[Tensor] = [*head.parameters()]
    found = in_chunks(x, targets, head, loss, parameters, tokens)
    return found.detach(), list(torch.autograd.grad(3.0 * found, (x, *parameters)))


def data(b: int, s: int, v: int, ignored: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(b * 100 + s)
    targets = torch.randint(0, v, (b, s), generator=generator)
    dropped = torch.rand(b, s, generator=generator) < ignored
    x = torch.randn(b, s, H, generator=generator, dtype=torch.float64)
    return x, torch.where(dropped, IGNORE, targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_torch(smoothing: float) -> None:
    x, targets = data(3, 7, H, 0.3)
    found = []
    for loss in (
        CrossEntropy(smoothing).train(),
        lambda x, t: F.cross_entropy(
            x.flatten(0, 1), t.flatten(), reduction="sum", label_smoothing=smoothing
        ),
    ):
        logits = x.clone().requires_grad_()
        value = loss(logits, targets)
        found.append((value.detach(), *torch.autograd.grad(3.0 * value, logits)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(
    b=st.integers(1, 4),
    s=st.integers(1, 13),
    tokens=st.integers(0, 60),
    smoothing=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_chunks_add_up(b: int, s: int, tokens: int, smoothing: float, ignored: float) -> None:
    """Loss and gradients agree for indivisible sizes and for chunks where no target counts."""
    head = Head(11, torch.float64)
    x, targets = data(b, s, 11, ignored)
    want, gradients = loss_of(0, x, targets, head, smoothing)
    got, found = loss_of(tokens, x, targets, head, smoothing)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        again = in_chunks(x, targets, head, CrossEntropy(smoothing).train(), [], tokens)
    torch.testing.assert_close(again, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_add_up_in_bfloat16(parameters: torch.dtype) -> None:
    """In bfloat16, chunks lose no more of the gradients than one piece, against float64.

    If parameters are in bfloat16 too, hundreds of chunks are accumulated in float32.
    """
    head = Head(11, parameters)
    x, targets = data(4, 128, 11, 0.1)
    _, right = loss_of(0, x, targets, copy.deepcopy(head).double(), 0.0)
    whole, (_, *want) = loss_of(0, x.bfloat16(), targets, head, 0.0)
    parts, (_, *got) = loss_of(4, x.bfloat16(), targets, head, 0.0)
    assert [g.dtype for g in got] == 3 * [parameters]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=0.0)
    for ours, other, exact in zip(got, want, right[1:]):
        scale = float(exact.abs().max())
        lost, lost_whole = (float((g.double() - exact).abs().max()) / scale for g in (ours, other))
        assert lost < max(1.1 * lost_whole, 0.005)


@pytest.mark.parametrize("training", [True, False])
def test_logits_exist_for_one_chunk_at_a_time(training: bool) -> None:
    """In chunks nothing is larger than a chunk's logits, and few of them live at once.

    The whole loss needs the logits and what is made of them, several times b s v elements.
    """
    b, s, v, tokens = 4, 64, 500, 32
    head, (x, targets) = Head(v, torch.float32), data(b, s, v, 0.2)
    x = x.float().requires_grad_()
    # the table's gradient: its sum, a chunk's, and one being made
    part, rest = tokens * v * 4, 3 * v * H * 4

    def run(tokens: int) -> tuple[int, int]:
        """Return the peak above the start, and the largest storage, in bytes."""
        with MemoryLog() as tracker, torch.set_grad_enabled(training):
            tracker.mark([x, targets, *head.parameters()], "before")
            before = tracker.live()
            found = in_chunks(x, targets, head, CrossEntropy(), [*head.parameters()], tokens)
            if training:
                found.backward()
        return tracker.peak() - before, max(e.n_bytes for e in tracker.entries if not e.kind)

    peak, largest = run(0)
    assert largest == b * s * v * 4
    assert peak >= 2 * largest
    peak, largest = run(tokens)
    assert largest == part
    assert peak <= (3 if training else 2) * part + rest


def test_products_add_to_the_sum_of_the_gradients() -> None:
    """The head's table is float32 and its products are bfloat16, as in training."""
    generator = torch.Generator().manual_seed(3)
    table = nn.Parameter(torch.randn(11, H, generator=generator))
    bias = nn.Parameter(torch.randn(11, generator=generator))
    hidden = torch.randn(2, 8, H, generator=generator).bfloat16()
    targets = torch.randint(0, 11, (2, 8), generator=generator)
    head, loss = TiedHead(biases=11), CrossEntropy()
    head.bias = bias

    def logits(x: Tensor) -> Tensor:
        out: Tensor = head(x, table)
        return out

    with patch.object(products, "add_product", wraps=products.add_product) as added:
        x = hidden.clone().requires_grad_()
        total = chunked_loss(x, targets, 2, logits, loss, [table, bias])
        got = torch.autograd.grad(total, (x, table, bias))
    assert added.call_count == 3  # the sum begins with the first of four chunks

    x = hidden.clone().requires_grad_()
    for one, other in zip(got, torch.autograd.grad(loss(logits(x), targets), (x, table, bias))):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)
    assert not [name for name in vars(table) if name.startswith("_gridformer")]
