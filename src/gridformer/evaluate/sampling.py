"""Chooses next tokens from logits, with random numbers that depend on seed and place alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.utils import rng
from gridformer.utils.errors import ConfigError

MOST_SEED = 2**62 - 1  # `rng` reads integers up to this one


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token.

    temperature 0 is greedy. top_k 0 and top_p 1 keep all tokens.

    Raises:
        ConfigError: `temperature`, `top_k` or `seed` is negative, `top_p` is not in (0, 1], or
            `seed` is too large.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(
                f"--temperature {self.temperature} is negative: use 0 for greedy search"
            )
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} is negative: use 0 to keep all tokens")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed <= MOST_SEED:
            problems.append(f"--seed {self.seed} must be from 0 to {MOST_SEED}")
        if problems:
            raise ConfigError(problems)


def uniform(seeds_B: Tensor, places_B: Tensor) -> Tensor:
    """Returns one random number in [0, 1) for each pair of a seed and a place, float64 [b].

    They are the same on every device and in every batch.

    Args:
        seeds_B: Seeds, int64 [b].
        places_B: How many tokens of the text were chosen before, int64 [b].
    """
    words = rng.bits(
        rng.key("generate"),
        rng.hash_indices(seeds_B, places_B),
        torch.arange(2, device=seeds_B.device),
    ).double()
    return (words[:, 0] + words[:, 1] / 2**32) / 2**32


def sample_tokens(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor) -> Tensor:
    """Samples tokens: applies temperature, then top-k, then top-p (Holtzman et al. 2020).

    Args:
        logits_BV: Logits [b, V].
        sampling: The settings.
        uniform_B: A random number in [0, 1) for each row, float64 [b].

    Returns:
        The ids of the tokens, int64 [b]; -1 where no logit is the largest, because some are NaN or
        infinite.
    """
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    chosen_B = _sampled(logits_BV, largest_B1, sampling, uniform_B)
    return torch.where(largest_B1.squeeze(-1).isfinite(), chosen_B, -1)


def _sampled(
    logits_BV: Tensor, largest_B1: Tensor, sampling: Sampling, uniform_B: Tensor
) -> Tensor:
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    # The largest becomes 0, so that no temperature makes it infinite.
    logits_BV = (logits_BV.double() - largest_B1.double()) / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        smallest = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, -torch.inf)
    probabilities, order = logits_BV.softmax(-1).sort(descending=True, stable=True)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities  # the first token is always kept
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    up_to = probabilities.cumsum(-1)
    place = (up_to <= uniform_B[:, None] * up_to[:, -1:]).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not lead beyond it
    return order.gather(1, torch.minimum(place, last).clamp_min(0)).squeeze(1)
