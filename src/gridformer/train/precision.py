"""Dynamic loss scaling: what keeps float16's gradients between its smallest and largest numbers.

float16 ends at 65,504 and loses digits below 6e-5. The loss is multiplied by a power of two before
the backward pass, the gradients, which are float32 by then, are divided by it after (Micikevicius
et al. 2018, section 3.2). A step whose gradients overflow on any rank is skipped on all of them and
halves the scale; many good steps in a row double it.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SCALE = 2.0**16
GROWS_AFTER = 1000  # steps without an overflow
LARGEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """The scale of the next step. `good`: steps since it last changed; `skipped`: of the run."""

    scale: float = 1.0
    good: int = 0
    skipped: int = 0

    @staticmethod
    def of(dtype: str) -> LossScale:
        return LossScale(FIRST_SCALE if dtype == "float16" else 1.0)

    @property
    def exhausted(self) -> bool:
        """An overflow now is the model's own: no smaller scale would help."""
        return self.scale <= 1.0

    def overflowed(self) -> None:
        """The step is skipped."""
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1

    def succeeded(self) -> None:
        self.good += 1
        if self.good == GROWS_AFTER and 1.0 < self.scale < LARGEST_SCALE:
            self.scale, self.good = self.scale * 2, 0
