"""`RunConfig`, which holds the four sections of a run."""

from __future__ import annotations

from typing import Any, Self

import yaml
from pydantic import Field, model_validator

from gridformer.config.base import Config, FileName, any_of
from gridformer.config.data import TASKS, DataConfig, Task
from gridformer.config.layout import LayoutConfig
from gridformer.config.model import ModelConfig
from gridformer.config.train import TrainConfig

_MOST_NUMBERS = 2**58


class RunConfig(Config):
    """Everything that a run needs. Its resolved form is written to the run directory."""

    name: FileName = Field(
        default="run", description="The run directory is runs/NAME unless --out sets another."
    )
    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _move_micro_batches(cls, values: Any) -> Any:
        """Accepts micro_batches in the train section, where older versions had it."""
        train = values.get("train") if isinstance(values, dict) else None
        if not isinstance(train, dict) or "micro_batches" not in train:
            return values
        rest = {key: value for key, value in train.items() if key != "micro_batches"}
        layout = {"micro_batches": train["micro_batches"], **(values.get("layout") or {})}
        return {**values, "train": rest, "layout": layout}

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        family, tasks = self.model.family, TASKS[self.model.family]
        problems = []
        if self.data.task not in ("auto", *tasks):
            problems.append(
                f"data.task={self.data.task}: {family} learns from {any_of(tasks)}; use data.task="
                f"{any_of(('auto', *tasks))}"
            )
        if self.data.source_len and not self.model.two_stacks:
            problems.append(
                f"data.source_len={self.data.source_len}: {family} has no source; use "
                "data.source_len=0"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """No tensor of a step may have more numbers than can be counted in bytes with 64 bits."""
        model, batch = self.model, self.train.global_batch
        length = max(self.seq_len, self.source_len)
        widest = max(model.vocab_size, model.ffn_size, model.hidden_size, model.n_heads * length)
        if batch * length * widest <= _MOST_NUMBERS:
            return self
        most = _MOST_NUMBERS // (length * widest)
        remedy = f"train.global_batch={most} or less" if most else "data.seq_len=1024"
        raise ValueError(
            f"train.global_batch={batch} samples of {length} tokens are tensors of more than 2^58 "
            f"numbers, which no machine holds: use {remedy}"
        )

    @property
    def seq_len(self) -> int:
        """The length s of samples in tokens, or of their targets if they have a source."""
        return self.data.seq_len or self.model.max_seq_len

    @property
    def source_len(self) -> int:
        """The length of sources in tokens; 0 for models without an encoder-decoder pair."""
        return (self.data.source_len or self.model.max_seq_len) if self.model.two_stacks else 0

    @property
    def task(self) -> Task:
        """The task, with `auto` resolved."""
        return TASKS[self.model.family][0] if self.data.task == "auto" else self.data.task

    def to_yaml(self) -> str:
        """Returns the run as YAML text that `parse_run` reads back to an equal run."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
