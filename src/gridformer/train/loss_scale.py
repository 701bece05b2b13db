"""Dynamic loss scaling: what keeps float16's gradients between its smallest and largest numbers.

float16 ends at 65,504 and loses digits below 6e-5. The loss is multiplied by a power of two before
the backward pass, the gradients, which are float32 by then, are divided by it after (Micikevicius
et al. 2018, section 3.2). A step whose gradients overflow on any rank is skipped on all of them and
halves the scale; many good steps in a row double it.

The scale is applied behind the forward pass, so it cannot mend a forward pass that overflows: then
the loss is no number, and the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SCALE = 2.0**16
GROWS_AFTER = 1000  # steps without an overflow
LARGEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """The scale of the next step; 1, and always so, unless it is `dynamic`.

    good: steps since it last changed. skipped: steps of the whole run.
    """

    scale: float = 1.0
    good: int = 0
    skipped: int = 0
    dynamic: bool = False

    @staticmethod
    def of(dtype: str) -> LossScale:
        half = dtype == "float16"
        return LossScale(FIRST_SCALE if half else 1.0, dynamic=half)

    def go_on(self, scale: float, good: int) -> None:
        """From where a float16 run before stopped."""
        if self.dynamic:
            self.scale, self.good = scale, good

    @property
    def exhausted(self) -> bool:
        """An overflow now is the model's own: no smaller scale would help."""
        return not self.dynamic or self.scale <= 1.0

    def overflowed(self) -> None:
        """The step is skipped."""
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1

    def succeeded(self) -> None:
        if not self.dynamic:
            return
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(2 * self.scale, LARGEST_SCALE), 0
