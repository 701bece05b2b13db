"""`RunConfig`, which holds the four sections of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import model_validator

from gridformer.config.base import Config, FileName, any_of
from gridformer.config.data import FINE_TUNING, TASKS, DataConfig, Task
from gridformer.config.layout import LayoutConfig
from gridformer.config.model import ModelConfig
from gridformer.config.train import TrainConfig
from gridformer.utils.units import format_value

_MOST_NUMBERS = 2**58


def _heads_of(task: Task, family: Any) -> dict[str, Any]:
    """Returns the keys of `model` that a task of fine-tuning sets."""
    pair = {"sentence_pair": False} if family == "bert" else {}
    return {"token_head": False} | pair | FINE_TUNING[task]


class RunConfig(Config):
    """Everything that a run needs. Its resolved form is written to the run directory."""

    name: FileName = "run"
    """The run directory is runs/NAME unless --out sets another."""
    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="before")
    @classmethod
    def _choose_heads(cls, values: Any) -> Any:
        """Fills in which heads a task of fine-tuning gives the model, unless the run sets them."""
        if not isinstance(values, dict):
            return values
        model, data = values.get("model"), values.get("data")
        if not isinstance(model, dict) or not isinstance(data, dict):
            return values
        task = data.get("task")
        if not isinstance(task, str) or task not in FINE_TUNING:
            return values
        heads = _heads_of(task, model.get("family"))
        return {**values, "model": heads | model}

    def _problems(self) -> Iterator[str]:
        data, family, tasks = self.data, self.model.family, TASKS[self.model.family]
        if data.task not in ("auto", *tasks):
            yield (
                f"data.task={data.task}: {family} learns from {any_of(tasks)}; use data.task="
                f"{any_of(('auto', *tasks))}"
            )
            return
        yield from self._head_problems()
        if data.source_len and not self.model.two_stacks:
            yield (
                f"data.source_len={data.source_len}: {family} has no source; use data.source_len=0"
            )
        if self.train.bleu_every and self.task != "pairs":
            yield (
                f"train.bleu_every={self.train.bleu_every}: data.task={self.task} has no pairs to "
                "translate; use train.bleu_every=0"
            )
        if data.task == "chat" and self.model.n_labels:
            yield (
                f"model.n_labels={self.model.n_labels}: conversations have no labels; use "
                "model.n_labels=0"
            )
        yield from self._document_problems()
        yield from self._size_problems()

    def _head_problems(self) -> Iterator[str]:
        """The heads of the model must be those that the task trains."""
        model, task = self.model, self.task
        if task not in FINE_TUNING:
            if not model.token_head or model.span_head:
                key = "token_head=false" if not model.token_head else "span_head=true"
                yield (
                    f"model.{key} does not fit data.task={task}: use data.task="
                    f"{any_of([t for t in TASKS[model.family] if t in FINE_TUNING])}"
                )
            return
        for key, value in _heads_of(task, model.family).items():
            if getattr(model, key) != value:
                here = format_value(getattr(model, key))
                yield (
                    f"data.task={task} does not fit model.{key}={here}: "
                    f"use model.{key}={format_value(value)}, or leave it out"
                )
        if task == "classify" and not model.n_labels:
            yield (
                "data.task=classify needs model.n_labels, the number of labels: use "
                "model.n_labels=2, for example"
            )
        if model.two_stacks and self.data.source_len not in (0, self.seq_len):
            yield (
                f"data.source_len={self.data.source_len}: with data.task={task} encoder and "
                f"decoder read the same {self.seq_len} tokens; use data.source_len=0"
            )
        if task == "answer" and model.n_labels:
            yield (
                f"data.task=answer does not fit model.n_labels={model.n_labels}: use "
                "model.n_labels=0"
            )

    def _document_problems(self) -> Iterator[str]:
        """Attention can stay within documents of running text, and packed samples need that."""
        data, task = self.data, self.task
        if not data.document_mask and data.packing != "windows":
            yield (
                f"data.packing={data.packing}: documents that share a sample must not see each "
                "other; use data.document_mask=true, or data.packing=windows"
            )
        if not data.document_mask or (task == "causal" and not self.model.n_labels):
            return
        if task not in ("chat", "pairs"):
            why = f"samples of data.task={task} ({self.model.family}) are not running text"
            if task == "causal":
                why = f"with model.n_labels={self.model.n_labels} each sample is one document"
            yield (
                f"data.document_mask=true: {why}; use data.document_mask=false and "
                "data.packing=windows"
            )
        elif data.packing != "documents":
            one = "conversation" if task == "chat" else "pair"
            yield (
                f"data.document_mask=true: each sample of data.task={task} is one {one}; use "
                "data.packing=documents to put several into one, or data.document_mask=false"
            )
        elif task == "pairs" and not data.reset_positions:
            yield (
                "data.reset_positions=false: source and target of a pair begin at position 0 "
                "each; use data.reset_positions=true"
            )

    def _size_problems(self) -> Iterator[str]:
        """No tensor of a step may have so many elements that 64 bits cannot count its bytes."""
        model, batch = self.model, self.train.global_batch
        length = max(self.seq_len, self.source_len)
        widest = max(model.vocab_size, model.ffn_size, model.hidden_size, model.n_heads * length)
        if batch * length * widest > _MOST_NUMBERS:
            most = _MOST_NUMBERS // (length * widest)
            remedy = f"train.global_batch={most} or less" if most else "data.seq_len=1024"
            yield (
                f"train.global_batch={batch} samples of {length} tokens are tensors of more than "
                f"2^58 numbers, which no machine holds: use {remedy}"
            )

    @property
    def seq_len(self) -> int:
        """The length s of samples in tokens, or of their targets if they have a source."""
        return self.data.seq_len or self.model.max_seq_len

    @property
    def source_len(self) -> int:
        """The length of sources in tokens; 0 for models that are not encoder-decoders."""
        if self.model.two_stacks and self.task in FINE_TUNING:
            return self.seq_len
        return (self.data.source_len or self.model.max_seq_len) if self.model.two_stacks else 0

    @property
    def sequences_per_sample(self) -> int:
        """How many sequences a model reads for each sample of a batch: more than 1 for choice."""
        return self.data.n_choices if self.task == "choice" else 1

    @property
    def task(self) -> Task:
        """The task, with `auto` resolved."""
        return TASKS[self.model.family][0] if self.data.task == "auto" else self.data.task

    def to_yaml(self) -> str:
        """Returns the run as YAML text that `parse_run` reads back to an equal run."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
