"""A run: its model, its layout, its data, its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from gridformer.config.base import Config, any_of
from gridformer.config.layout import LayoutConfig
from gridformer.config.model import Family, ModelConfig

Task = Literal["auto", "causal", "masked", "spans", "pairs"]
# Which families may learn from which kind of samples; the first is what `auto` means.
TASKS: dict[Family, tuple[Task, ...]] = {
    "gpt2": ("causal",),
    "bert": ("masked",),
    "t5": ("spans", "pairs"),
    "transformer": ("pairs",),
}


class DataConfig(Config):
    """A folder written by `gridformer prepare`, and how samples are made of it."""

    path: Path
    task: Task = Field(
        default="auto",
        description="next words (gpt2), masked words (bert), masked spans (t5), or the second text "
        "of a pair from the first (transformer, t5)",
    )
    seq_len: int = Field(
        default=0,
        ge=0,
        description="tokens a sample, of its target where it has a source; 0 means "
        "model.max_seq_len, and for spans as many as they take",
    )
    source_len: int = Field(
        default=0, ge=0, description="t5, transformer: of the source; 0 means model.max_seq_len"
    )


class TrainConfig(Config):
    """Optimizer, schedule, precision and what is written when."""

    steps: int = Field(default=1000, ge=1)
    seed: int = Field(default=1234, ge=0, lt=2**63)
    global_batch: int = Field(
        default=8, ge=1, description="sequences an optimizer step, all devices"
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32",
        description="of the computation; bfloat16 and float16 keep float32 parameters and "
        "statistics, float16 scales the loss",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what is computed again for the backward pass instead of kept: attention's "
        "scores (selective), or all of a block but its input (full)",
    )
    update: Literal["after_backward", "in_backward"] = Field(
        default="after_backward",
        description="in_backward: a layer's matrices as soon as their gradients are there, which "
        "are then let go of: one layer's are held at a time (two's, with replicas), but all "
        "layers' with several micro-batches, over which they are summed up; needs clip_by=layer "
        "or clip_norm=0",
    )
    offload: Literal["none", "optimizer"] = Field(
        default="none",
        description="optimizer: its moments are kept in the host's memory, and a layer's copied to "
        "the device while it is updated",
    )
    loss_chunk_tokens: int = Field(
        default=1024,
        ge=0,
        description="of a micro-batch, whose logits exist at a time on a device; 0: all",
    )
    memory_gib: float = Field(
        default=0.0,
        ge=0.0,
        description="that a process may take for tensors; 0: what its device has. A run that needs "
        "more is refused, and settings are named that fit",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = Field(
        default=False,
        description="torch.compile of each block; for layouts whose blocks do not communicate",
    )
    lr: float = Field(default=3e-4, gt=0.0)
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0.0, description="of matrices; never of vectors")
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    clip_norm: float = Field(
        default=1.0, ge=0.0, description="largest gradient norm; 0 turns clipping off"
    )
    clip_by: Literal["global", "layer"] = Field(
        default="global",
        description="the norm of all gradients, or of each layer's matrices and of all else",
    )
    eval_every: int = Field(default=100, ge=0, description="steps; 0 evaluates at the end only")
    eval_batches: int = Field(default=8, ge=1, description="global batches an evaluation")
    save_every: int = Field(default=500, ge=0, description="steps; 0 saves at the end only")
    keep_checkpoints: int = Field(default=3, ge=1)
    trace_step: int = Field(
        default=0,
        ge=0,
        description="this step's timeline is written to trace-step-N.json; 0: none. It is slower",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0.0,
        description="a collective that waits longer ends the run with an error",
    )
    sanity_checks: bool = Field(
        default=False, description="compare replicated parameters over ranks at every evaluation"
    )

    @model_validator(mode="after")
    def _updates_are_possible(self) -> Self:
        if self.update != "in_backward":
            return self
        problems = []
        if self.clip_by == "global" and self.clip_norm:
            problems.append(
                "update=in_backward: layers are updated before the norm of all gradients is known; "
                "use clip_by=layer, or clip_norm=0"
            )
        if self.dtype == "float16":
            problems.append(
                "update=in_backward: a step whose float16 gradients overflow could not be skipped; "
                "use dtype=bfloat16, or update=after_backward"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class RunConfig(Config):
    """Everything a run needs; written to the run directory as it was resolved."""

    name: str = "run"
    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _micro_batches_moved(cls, values: Any) -> Any:
        """They were in the section train, once: runs of then stay readable."""
        train = values.get("train") if isinstance(values, dict) else None
        if not isinstance(train, dict) or "micro_batches" not in train:
            return values
        rest = {key: value for key, value in train.items() if key != "micro_batches"}
        layout = {"micro_batches": train["micro_batches"], **(values.get("layout") or {})}
        return {**values, "train": rest, "layout": layout}

    @model_validator(mode="after")
    def _data_suits_the_model(self) -> Self:
        family, tasks = self.model.family, TASKS[self.model.family]
        problems = []
        if self.data.task not in ("auto", *tasks):
            problems.append(
                f"data.task={self.data.task}: {family} learns from {any_of(tasks)}; use data.task="
                f"{any_of(('auto', *tasks))}"
            )
        if self.data.source_len and not self.model.two_stacks:
            problems.append(
                f"data.source_len={self.data.source_len}: {family} reads no source; use "
                "data.source_len=0"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def seq_len(self) -> int:
        """s: of samples, of their targets where they have a source."""
        return self.data.seq_len or self.model.max_seq_len

    @property
    def source_len(self) -> int:
        """Tokens of a source; 0 for families of one stack."""
        return (self.data.source_len or self.model.max_seq_len) if self.model.two_stacks else 0

    @property
    def task(self) -> Task:
        """What is learned, with `auto` resolved."""
        return TASKS[self.model.family][0] if self.data.task == "auto" else self.data.task

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
