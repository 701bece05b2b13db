"""The kernels on a real GPU, wherever one is found, compute what PyTorch's operators compute."""

from unittest.mock import patch

import pytest
import torch

from gridformer.models.blocks.dropout import drop_elements
from gridformer.models.kernels import library, products
from tests.support.kernels import (
    ATTENTION,
    LARGE,
    LOSSES,
    MASKS,
    counter_of,
    run_attention,
    run_loss,
)

if not (torch.cuda.is_available() and library.available(torch.device("cuda", 0), torch.bfloat16)):
    pytest.skip("the kernels on a GPU: none was found that runs them", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MASKS)
def test_masks_have_the_bits_of_the_reference(name: str, dtype: torch.dtype) -> None:
    shape, first, places, p = MASKS[name]
    x = torch.randn(shape, dtype=dtype, device="cuda")
    where = counter_of(first, "cuda"), *places, p
    assert torch.equal(torch.ops.gridformer.masked(x, *where), drop_elements(x, *where))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*ATTENTION, "large"])
def test_attention_equals_the_unfused_path(name: str, dtype: torch.dtype) -> None:
    """Twice, since results must also be the same to the bit."""
    with patch.dict(ATTENTION, large=LARGE):
        got, again = (run_attention(name, True, dtype, "cuda", tile=0) for _ in range(2))
        want = run_attention(name, False, torch.float64, "cuda")
    atol = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}[dtype]
    for one, other, same in zip(got, want, again):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)
        assert torch.equal(one, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    got, want = (run_loss(name, dtype, "cuda", fused) for fused in (True, False))
    for one, other in zip(got[:-1], want[:-1], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    rtol = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got[-1].double(), want[-1], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [64, 51])
def test_products_are_summed_in_float32(dtype: torch.dtype, m: int) -> None:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(200, m, generator=generator).to("cuda", dtype).t()
    b = torch.randn(200, 48, generator=generator).to("cuda", dtype)
    want = a.double() @ b.double()
    total = products.wide_product(a, b, torch.float32)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-4)
    products.add_product(total, a, b)
    torch.testing.assert_close(total.double(), 2 * want, rtol=1e-5, atol=1e-4)
    products.write_product(total, a, b)
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-4)
    products.add_product(total, a, b)
    rounded = (a @ b).double()
    assert (rounded - want).abs().max() > 100 * (total.double() / 2 - want).abs().max()
