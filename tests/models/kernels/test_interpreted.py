"""The kernels' own code, run by Triton's interpreter, computes what PyTorch's operators compute.

The interpreter computes bfloat16 in its own way, so that only masks are compared in it.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer.models.blocks import DropoutRng
from gridformer.models.blocks.dropout import Dropout, drop_elements
from gridformer.models.kernels import attention
from gridformer.utils import rng
from tests.support import kernels
from tests.support.marks import full_unless

InProcess = Callable[..., Any]


@pytest.fixture(scope="module")
def cpu() -> Iterator[InProcess]:
    with kernels.interpreter() as call:
        yield call


@pytest.fixture(scope="module")
def loops(cpu: InProcess) -> InProcess:
    """The same process, if it can run the kernels of attention, which have loops."""
    if not cpu(kernels.runs_loops):
        pytest.skip(kernels.NO_LOOPS)
    return cpu


# --------------------------------------------------------------------------- dropout


def masked(*arguments: Any) -> Tensor:
    out: Tensor = torch.ops.gridformer.masked(*arguments)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", kernels.MASKS)
def test_masks_have_the_bits_of_the_reference(
    cpu: InProcess, name: str, dtype: torch.dtype
) -> None:
    """So have the results, NaN, infinity and negative zero included, and those of a transpose."""
    shape, first, places, p = kernels.MASKS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype)
    x[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    if dtype == torch.bfloat16:
        x = torch.ones(shape, dtype=dtype)
    where = kernels.counter_of(first), *places, p
    for y in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        got, want = cpu(masked, y, *where), drop_elements(y, *where)
        if dtype == torch.bfloat16:
            got, want = got.ne(0).float(), want.ne(0).float()
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit(), want.signbit())


def test_backward_computes_the_mask_again(cpu: InProcess) -> None:
    """The gradient of ones is the mask, and nothing is kept."""
    out, gradient = cpu(run_dropout)
    assert torch.equal(out, gradient)
    assert 0 < float(out.eq(0).double().mean()) < 1


def run_dropout() -> tuple[Tensor, Tensor]:
    module = Dropout(0.5, "x", DropoutRng(1, 2, 3))
    x = torch.ones(2, 3, 32, requires_grad=True)

    def kept(_: Tensor) -> Tensor:
        raise AssertionError("a tensor is kept for backward")

    with (
        torch.autograd.graph.saved_tensors_hooks(kept, kept),
        patch.object(rng, "keep", side_effect=AssertionError),
    ):
        out = module(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out).transpose(0, 1).transpose(0, 1))
    return out.detach(), gradient


# --------------------------------------------------------------------------- attention


QUICK_ATTENTION = {"everything", "wide window", "documents", "documents of two rows"}


@pytest.mark.parametrize("name", full_unless(QUICK_ATTENTION.__contains__, kernels.ATTENTION))
def test_attention_of_several_tiles(loops: InProcess, name: str) -> None:
    """Results and all gradients equal the unfused path's, with its dropout masks."""
    got, want = (
        loops(kernels.run_attention, name, fused, torch.float64, "cpu") for fused in (True, False)
    )
    assert len(got) == len(want) == 4 + kernels.ATTENTION[name][3]
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "dtype", full_unless(lambda dtype: dtype == torch.float16, [torch.float16, torch.float32])
)
def test_attention_in_types_of_gpus(loops: InProcess, dtype: torch.dtype) -> None:
    got = loops(kernels.run_attention, "everything", True, dtype, "cpu")
    want = loops(kernels.run_attention, "everything", False, torch.float64, "cpu")
    atol = {torch.float32: 1e-5, torch.float16: 2e-2}[dtype]
    for one, other in zip(got, want):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)


def test_a_query_that_sees_no_key_gets_zeros(loops: InProcess) -> None:
    assert loops(run_without_keys) == [0.0] * 4


def run_without_keys() -> list[float]:
    """Return the largest numbers of the result and of the gradients; NaN is larger than all."""
    q, k, v = (torch.ones(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    valid = torch.zeros(1, 3, dtype=torch.bool)
    settings = attention.Settings(causal=False, scale=1.0)
    out = attention.attention(q, k, v, valid, None, settings)
    found = (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v)))
    return [float(x.abs().max()) for x in found]


def test_fake_tensors_see_what_the_operators_return(loops: InProcess) -> None:
    loops(check_operators)


def check_operators() -> None:
    """Check shapes, strides, types and the schemas, as `torch.library.opcheck` does."""
    ops, b, n, s, seen, d = torch.ops.gridformer, 1, 1, 5, 7, 4
    q = torch.randn(b, s, n, d).transpose(1, 2)
    k, v = torch.randn(2, b, n, seen, d)
    valid, bias = torch.ones(b, seen, dtype=torch.bool), torch.randn(n, s, seen)
    settings = attention.Settings(True, 0.5, 4, 0.1, 0, 2, 1).arguments()
    found = (q, k, v, valid, bias, None, kernels.counter_of(3))
    out, lse = ops.attention(*found, *settings)
    tests = ("test_schema", "test_faketensor")
    x = torch.randn(2, 3, 4).transpose(0, 1)
    for op in (ops.masked, ops.masked_unfused):
        torch.library.opcheck(
            op.default, (x, kernels.counter_of(3), 0, 3, 0, 0, 0.1), test_utils=tests
        )
    scores = (kernels.counter_of(3), (b, n, s, seen), (0, 2, 1), 0.1)
    torch.library.opcheck(ops.keep_scores.default, scores, test_utils=tests)
    torch.library.opcheck(ops.attention.default, (*found, *settings), test_utils=tests)
    for wants_bias in (False, True):
        given = (out, *found, None, out, lse, *settings, wants_bias)
        torch.library.opcheck(ops.attention_backward.default, given, test_utils=tests)


# --------------------------------------------------------------------------- whole models


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_kernels_are_part_of_compiled_blocks(loops: InProcess, family: str) -> None:
    """Without a graph break; other steps and rows compile nothing, and change the masks."""
    losses, gradients, breaks = loops(kernels.run_compiled, family, "aot_eager")
    want, others, _ = loops(kernels.run_compiled, family, "")
    assert losses == pytest.approx(want, rel=1e-6)
    assert len(set(losses)) == 3
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6, msg=name)
    assert breaks == 0


# By family, padding, the rate of dropout, and whether rows consist of documents.
MODELS = {
    (family, padded, rate, False)
    for family in ("gpt2", "bert", "t5", "transformer", "llama")
    for padded in (False, True)
    for rate in (0.0, 0.2)
    if family in ("t5", "llama") or padded or rate  # else there is nothing that the kernels compute
}
MODELS |= {
    (family, False, rate, True)
    for family in ("gpt2", "llama", "t5", "transformer")
    for rate in (0.0, 0.2)
}
QUICK = {
    ("gpt2", False, 0.2, False),
    ("bert", True, 0.0, False),
    ("t5", True, 0.2, False),
    ("llama", False, 0.0, True),
    ("t5", False, 0.0, True),
}


@pytest.mark.parametrize(
    ("family", "padded", "rate", "documents"),
    full_unless(QUICK.__contains__, sorted(MODELS), unpack=True),
)
def test_models_have_the_same_loss_and_gradients(
    loops: InProcess, family: str, padded: bool, rate: float, documents: bool
) -> None:
    (got, gradients), (want, others) = (
        loops(kernels.run_model, family, padded, rate, fused, documents) for fused in (True, False)
    )
    assert got == pytest.approx(want, rel=1e-12)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-9, atol=1e-11, msg=name)


# --------------------------------------------------------------------------- loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", kernels.LOSSES)
def test_the_loss_and_its_gradient_are_those_of_float64(
    loops: InProcess, name: str, dtype: torch.dtype
) -> None:
    """The gradient is in the place of the logits, and zero where these are padding."""
    got = loops(kernels.run_loss, name, dtype, "cpu", True)
    want = kernels.run_loss(name, dtype, "cpu", False)
    for one, other in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    atol = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got[-1].double(), want[-1], rtol=1e-3, atol=atol)
    n_words = kernels.LOSSES[name][3]
    assert not got[-1][:, n_words:].any()
