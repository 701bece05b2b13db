"""The key `model.rope_scaling`: rotary positions of longer sequences."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from gridformer.config.base import Config

_LENGTH = "original_max_position_embeddings"
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")


class RopeScaling(Config):
    """How rotary positions are changed for longer sequences than those of the first training.

    Keys and defaults are those of Hugging Face's `rope_scaling`, whose `rope_type` is `kind` here.
    """

    kind: Literal["linear", "llama3", "yarn"] = Field(
        description="All frequencies are divided by factor (linear), or low frequencies are "
        "(llama3, as in Llama 3.1, and yarn)."
    )
    factor: float = Field(ge=1.0, description="Sequences may be longer by about this factor.")
    original_max_position_embeddings: int = Field(
        default=0,
        ge=0,
        description="For llama3 and yarn, the first training had sequences of this length.",
    )
    low_freq_factor: float = Field(
        default=1.0,
        gt=0.0,
        description="For llama3, frequencies below this number of turns in the original length "
        "are divided by factor.",
    )
    high_freq_factor: float = Field(
        default=4.0,
        gt=0.0,
        description="For llama3, frequencies above this number of turns in the original length "
        "are kept.",
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0.0,
        description="For yarn, rotated queries and keys are multiplied by this; the default is "
        "0.1 ln(factor) + 1.",
    )
    beta_fast: float = Field(
        default=32.0,
        gt=0.0,
        description="For yarn, frequencies of at least this number of turns in the original "
        "length are kept.",
    )
    beta_slow: float = Field(
        default=1.0,
        gt=0.0,
        description="For yarn, frequencies of at most this number of turns in the original length "
        "are divided by factor.",
    )
    truncate: bool = Field(
        default=True,
        description="For yarn, true rounds the borders of the interpolated frequencies outward.",
    )

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        others = {"linear": (_LENGTH, *_LLAMA3, *_YARN), "llama3": _YARN, "yarn": _LLAMA3}[
            self.kind
        ]
        problems = [
            f"{key}={getattr(self, key)} does not belong to kind={self.kind}: leave it out"
            for key in others
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.kind != "linear" and not self.original_max_position_embeddings:
            problems.append(
                f"kind={self.kind} needs original_max_position_embeddings, the length of sequences "
                "in the first training, such as 8192"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            problems.append(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.beta_slow >= self.beta_fast:
            problems.append(f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def attention(self) -> float:
        """The factor of rotated queries and keys, which is `attention_factor` or its default."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor
