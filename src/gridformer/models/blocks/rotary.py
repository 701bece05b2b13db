"""Rotary positions: queries and keys are rotated by angles that grow with their position.

See Su et al. 2021. A head's feature i is paired with feature i + d/2, as in the published weights
that Hugging Face distributes. Frequencies and angles are rounded to float32, because these weights
were trained with such angles: at position 100,000, float32 and float64 differ by 0.01.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.config import RopeScaling


class Rotation(NamedTuple):
    """The rotations of s positions.

    Attributes:
        cos: Cosines of all angles [s, 1, d], or [b, s, 1, d] if each row has its own positions.
        sin: Sines of the same shape, negative for the first feature of each pair.
    """

    cos: Tensor
    sin: Tensor

    def of(self, x_BSND: Tensor) -> Tensor:
        """Returns queries or keys [b, s, n, d] rotated."""
        swapped = x_BSND.roll(x_BSND.shape[-1] // 2, -1)  # the two features of each pair
        return torch.addcmul(x_BSND * self.cos, swapped, self.sin)


class RotaryPositions(nn.Module):
    """Computes the rotations of positions; it has no parameters.

    Args:
        theta: The base of the wavelengths, which are 2 pi theta^(2i/d).
        scaling: How the frequencies are changed for sequences that are longer than those of the
            first training, or None.
    """

    def __init__(self, d: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.d, self.theta, self.scaling = d, theta, scaling

    def forward(
        self,
        s: int,
        start: int,
        device: torch.device,
        dtype: torch.dtype,
        positions: Tensor | None = None,
    ) -> Rotation:
        """Returns the rotations of positions `start` to `start + s`.

        With `positions` [b, s], it returns the rotations of these positions, which must be below
        `start + s`.
        """
        at = torch.arange(start, start + s, device=device).float()
        angles = torch.outer(at, self._frequencies(device)).double().unsqueeze(1)
        factor = self.scaling.attention if self.scaling else 1.0
        cos, sin = angles.cos() * factor, angles.sin() * factor
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        rotation = Rotation(*(x.to(dtype) for x in both))
        if positions is None:
            return rotation
        return Rotation(
            *(F.embedding(positions - start, x.squeeze(1)).unsqueeze(2) for x in rotation)
        )

    def _frequencies(self, device: torch.device) -> Tensor:
        """Returns the radians per position of each pair of features, [d/2] in float32."""
        exponents = torch.arange(0, self.d, 2, device=device).float() / self.d
        waves = self.theta**exponents
        match self.scaling:
            case None:
                return 1.0 / waves
            case RopeScaling(kind="linear", factor=factor):
                return 1.0 / waves / factor
            case RopeScaling(kind="llama3") as scaling:
                return _llama3(1.0 / waves, scaling)
        return _yarn(waves, self.scaling, self.theta)


def _llama3(rates: Tensor, scaling: RopeScaling) -> Tensor:
    """Divides low frequencies by the factor, and keeps high ones (Llama 3.1; Meta 2024).

    Frequencies that turn between `low_freq_factor` and `high_freq_factor` times within the original
    length are interpolated.
    """
    length = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / rates
    kept = (length / wavelengths - low) / (high - low)
    between = (1 - kept) * rates / scaling.factor + kept * rates
    slow = torch.where(wavelengths > length / low, rates / scaling.factor, between)
    return torch.where(wavelengths < length / high, rates, slow)


def _yarn(waves: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Interpolates by wavelength (Peng et al. 2023, section 3.2).

    Pairs that turn at least `beta_fast` times within the original length keep their frequency, and
    those that turn at most `beta_slow` times are divided by the factor.
    """
    d = 2 * len(waves)

    def pair_of(turns: float) -> float:
        """Returns the index of the pair that turns this number of times; it may be fractional."""
        length = scaling.original_max_position_embeddings
        return d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 * (first == last)  # the ramp has a slope
    ramp = (torch.arange(d // 2, device=waves.device).float() - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept
