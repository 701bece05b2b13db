"""The `data` section of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gridformer.config.base import AnyPath, Config
from gridformer.config.model import Family
from gridformer.utils.limits import MOST_TOKENS

Task = Literal["auto", "causal", "masked", "spans", "pairs"]
# The tasks that each family can be trained on. The first one is what `auto` means.
TASKS: dict[Family, tuple[Task, ...]] = {
    "gpt2": ("causal",),
    "bert": ("masked",),
    "t5": ("spans", "pairs"),
    "transformer": ("pairs",),
    "llama": ("causal",),
}


class DataConfig(Config):
    """A folder written by `gridformer prepare`, and how samples are made from it."""

    path: AnyPath = Field(description="This is the token folder that `gridformer prepare` wrote.")
    task: Task = Field(
        default="auto",
        description="The model learns to predict next tokens (causal, for gpt2 and llama), masked "
        "tokens (masked, for bert), masked spans (spans, for t5), or the second text of a pair "
        "from the first (pairs, for transformer and t5). auto means the first task of the family.",
    )
    seq_len: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="A sample, or its target if it has a source, has this number of tokens. 0 "
        "means model.max_seq_len, or for spans as many tokens as the masked spans take.",
    )
    source_len: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="For t5 and transformer, a source has this number of tokens; 0 means "
        "model.max_seq_len.",
    )
    restart: bool = Field(
        default=False,
        description="true lets a run that resumes have another train.global_batch, or other "
        "values of this section. If it does, the order of samples begins anew at that step.",
    )
