"""Dynamic loss scaling, which keeps float16 gradients within the range of float16.

float16 ends at 65,504 and loses digits below 6e-5. The loss is multiplied by a power of two before
the backward pass, and the gradients, which are float32 by then, are divided by it afterward
(Micikevicius et al. 2018, section 3.2). A step whose gradients overflow on any rank is skipped on
all ranks and halves the scale; many good steps in a row double it. If the forward pass overflows,
no scale helps: the loss is then NaN and the run ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridformer.config import TrainConfig
from gridformer.utils.errors import DivergedError

FIRST_SCALE = 2.0**16
GROWS_AFTER = 1000  # steps without an overflow
LARGEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """The loss scale of the next step."""

    scale: float = 1.0  # the factor on the loss; always 1 unless `dynamic`
    good: int = 0  # number of good steps since the scale last changed
    skipped: int = 0  # number of skipped steps in the whole run
    dynamic: bool = False  # whether the scale changes, which it does for float16

    @staticmethod
    def of(dtype: str) -> LossScale:
        """Returns the scale with which a run in `dtype` (as in `train.dtype`) starts."""
        half = dtype == "float16"
        return LossScale(FIRST_SCALE if half else 1.0, dynamic=half)

    def go_on(self, scale: float, good: int) -> None:
        """Resumes from the scale and the good steps of a float16 run's checkpoint."""
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


@dataclass(frozen=True)
class FiniteCheck:
    """Judges whether the loss and the gradient norm of a step are finite, and adapts the scale.

    It does not know the `Stepper`, so that a step whose result nobody reads keeps no model alive.
    """

    train: TrainConfig
    scale: LossScale

    def __call__(self, step: int, loss: float, norm: float) -> bool:
        """Returns whether a step has updated the parameters.

        Raises:
            DivergedError: The loss or the norm is not finite, and no smaller loss scale can help.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.scale.succeeded()
            return True
        if math.isfinite(loss) and not self.scale.exhausted:
            self.scale.overflowed()
            return False
        train, unchanged = self.train, "nothing was updated"
        if train.update == "in_backward":
            unchanged = "layers were updated before this was known, so resume from a checkpoint"
        # It helps if the forward pass, or gradients at loss scale 1, overflow.
        wider = ", use train.dtype=bfloat16" if train.dtype == "float16" else ""
        raise DivergedError(
            f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; {unchanged}. "
            f"Lower train.lr ({train.lr:g}), raise train.warmup_steps ({train.warmup_steps})"
            f"{wider} or inspect the data of this step",
            step,
        )
