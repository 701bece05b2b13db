"""Dynamic loss scaling, which keeps float16 gradients within the range of float16.

float16 ends at 65,504 and loses digits below 6e-5. The loss is multiplied by a power of two before
the backward pass, and the gradients, which are float32 by then, are divided by it afterward
(Micikevicius et al. 2018, section 3.2). A step whose gradients overflow on any rank is skipped on
all ranks and halves the scale; many good steps in a row double it.

The scale is applied after the forward pass, so it cannot help if the forward pass itself overflows:
the loss is then NaN and the run ends.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SCALE = 2.0**16
GROWS_AFTER = 1000  # steps without an overflow
LARGEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """The loss scale of the next step.

    Attributes:
        scale: The factor on the loss; always 1 unless `dynamic`.
        good: Number of good steps since the scale last changed.
        skipped: Number of skipped steps in the whole run.
        dynamic: Whether the scale changes, which it does for float16.
    """

    scale: float = 1.0
    good: int = 0
    skipped: int = 0
    dynamic: bool = False

    @staticmethod
    def of(dtype: str) -> LossScale:
        """Returns the scale with which a run in `dtype` (as in `train.dtype`) starts."""
        half = dtype == "float16"
        return LossScale(FIRST_SCALE if half else 1.0, dynamic=half)

    def go_on(self, scale: float, good: int) -> None:
        """Resumes from the scale and the good steps of a float16 run's checkpoint.

        Args:
            scale: The loss scale.
            good: How many steps were good since the scale last changed.
        """
        if self.dynamic:
            self.scale, self.good = scale, good

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot help against an overflow."""
        return not self.dynamic or self.scale <= 1.0

    def overflowed(self) -> None:
        """Counts a skipped step and halves the scale."""
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1

    def succeeded(self) -> None:
        """Counts a good step; after GROWS_AFTER of them in a row, doubles the scale."""
        if not self.dynamic:
            return
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(2 * self.scale, LARGEST_SCALE), 0
