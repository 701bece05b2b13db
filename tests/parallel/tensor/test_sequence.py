"""Attention where rows divide sequences: heads travel in chunks only where all have one mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.mesh import Axis
from gridformer.models.blocks.scores import ScoreBias, ScoreParts, SharedBias
from gridformer.parallel.tensor.sequence import MOST_CHUNKS, GatheringRows

N, S = MOST_CHUNKS, 3
ONE, EACH = torch.zeros(2, 1, S, S), torch.zeros(2, N, S, S)
MASKS: dict[str, tuple[ScoreBias | None, int]] = {  # and in how many chunks heads travel
    "none": (None, N),
    "one for all heads": (ONE, N),
    "one for each head": (EACH, 1),
    "a learned bias of all layers": (SharedBias(EACH[0], EACH, None), 1),
    "a learned bias and padding": (ScoreParts(ONE[:, 0, 0] == 0, EACH[0], causal=False), 1),
    "padding": (ScoreParts(ONE[:, 0, 0] == 0, None, causal=False), N),
}


@pytest.mark.parametrize("name", MASKS)
def test_heads_with_masks_of_their_own_stay_together(name: str) -> None:
    mask, n_chunks = MASKS[name]
    q = torch.arange(2 * N * S * 5.0).view(2, N, S, 5)
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Any, first: int) -> Tensor:
        seen.append(q)
        return (q + k + v).transpose(1, 2).flatten(2)

    out = GatheringRows.over(Axis("sequence")).attend(attend, q, q + 1, q + 2, False, mask)
    assert len(seen) == n_chunks
    assert torch.equal(out, (3 * q + 3).transpose(1, 2).flatten(2))
