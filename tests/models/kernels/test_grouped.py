"""Products of groups of rows, as experts compute them."""

from __future__ import annotations

import pytest
import torch

from gridformer.models.blocks.experts import expert_product

ENDS = torch.tensor([2, 2, 5, 7], dtype=torch.int32)  # the second group is empty


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_every_row_meets_the_matrix_of_its_group(turned: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    shape = (4, 5, 3) if turned else (4, 3, 5)
    w = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return expert_product(x, w.transpose(1, 2) if turned else w, ENDS)

    y, matrices = product(x, w), w.transpose(1, 2) if turned else w
    for row, group in enumerate([0, 0, 2, 2, 2, 3, 3]):
        torch.testing.assert_close(y[row], x[row] @ matrices[group])
    assert torch.autograd.gradcheck(product, (x, w))
