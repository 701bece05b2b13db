"""Classes of transformers for fine-tuning with random weights, and ours with the same weights."""

from typing import Any, Literal

import torch
from torch import Tensor

from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.config import ModelConfig
from gridformer.data.samples.examples import read_by
from gridformer.data.samples.sample import SpecialIds
from gridformer.models import Model
from gridformer.utils.batch import Batch
from tests.support.reference import shared
from tests.support.reference.shared import V, class_of, plain, randomize, to_ours, widened

Head = Literal["ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice"]
SIZES: dict[str, Any] = {"n_layers": 2, "max_seq_len": 24}
PAD, END = 0, 1
SPECIAL = SpecialIds(END, PAD, None, None, None, PAD, (), V, V, frozenset())


def pair(kind: str, head: Head, n_labels: int = 3) -> tuple[Model, Any]:
    """Return our model and theirs in float64; `n_labels` is 2 for answers in any case."""
    # With a shorter window our padding also sees itself, and so do its logits of spans.
    window = {"window": SIZES["max_seq_len"]} if kind == "mistral" else {}
    tokens, theirs = shared.pair(kind, **SIZES, **window)
    of_tokens = theirs.config.to_dict()
    n_theirs = 2 if head == "ForQuestionAnswering" else n_labels
    config = type(theirs.config)(
        **{**of_tokens, "id2label": {i: f"LABEL_{i}" for i in range(n_theirs)}},
        attn_implementation=theirs.config._attn_implementation,
    )
    config.pad_token_id, config.eos_token_id, config.architectures = PAD, END, None
    theirs = randomize(class_of(kind, head)(config), torch.float64)
    widened(theirs)
    changes: dict[str, Any] = {"token_head": False}
    changes |= {"span_head": True} if head == "ForQuestionAnswering" else {"n_labels": n_labels}
    changes |= {"sentence_pair": False} if kind == "bert" else {}
    model = ModelConfig.model_validate(tokens.config.model_dump() | changes)
    return plain(model, torch.float64, in_our_names(kind, model, theirs.state_dict())), theirs


def in_our_names(kind: str, model: ModelConfig, theirs: dict[str, Any]) -> dict[str, Tensor]:
    """Return what they have for each of our parameters: weights, or gradients."""
    named = {}
    for name, value in theirs.items():
        for old, new in KINDS[kind].old_names.items():
            name = name.replace(old, new)
        named[name] = value
    return to_ours(KINDS[kind].entries(model), named)


def batch_of(model: Model, rows: list[Tensor], seq_len: int) -> Batch:
    """Return a batch of sequences, each read as a run of fine-tuning reads it."""
    read = [read_by(row.numpy(), seq_len, SPECIAL, model.config.two_stacks) for row in rows]
    batch = {key: torch.stack([torch.from_numpy(one[key]) for one in read]) for key in read[0]}
    bert = model.config.family == "bert"
    return batch | {"at": torch.tensor([0 if bert else len(row) - 1 for row in rows])}


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Return what their models take for a batch."""
    if "source" in batch:
        return {"input_ids": batch["source"], "attention_mask": batch["source_valid"].long()}
    segments = {"token_type_ids": batch["segments"]} if "segments" in batch else {}
    return {"input_ids": batch["tokens"], "attention_mask": batch["valid"].long()} | segments
