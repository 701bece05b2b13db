"""Heads for fine-tuning compute what the classes of transformers compute."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gridformer.config import ModelConfig
from gridformer.data.samples.batches import SequentialBatches
from gridformer.data.samples.examples import ChoiceExamples, Reading
from gridformer.mesh import Axes
from gridformer.models import Model, build_model
from gridformer.models.blocks import IGNORE
from gridformer.train.forward_backward import RowSplit
from gridformer.utils.batch import Batch
from tests.support.data import split_of
from tests.support.marks import full_unless
from tests.support.reference import heads
from tests.support.reference.shared import (
    CONFIGS,
    V,
    assert_close,
    lengths_mask,
    randomize,
    tokens_of,
)


def assert_same_gradients(kind: str, ours: Model, theirs: Any, zero: tuple[str, ...]) -> None:
    """Compare all gradients but those that are zero in exact arithmetic, as are those of keys."""
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    expected = heads.in_our_names(kind, ours.config, grads)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        # Their tables have no gradient of padding.
        first = heads.PAD + 1 if name == "tokens.weight" else 0
        if not name.endswith((*zero, "qkv.bias", "k.bias")):
            assert_close(parameter.grad[first:], expected[name][first:])


LENGTHS = [24, 17, 5, 12]
OF_CLASSES: tuple[tuple[heads.Head, int], ...] = (
    ("ForSequenceClassification", 3),
    ("ForSequenceClassification", 1),
    ("ForQuestionAnswering", 2),
)
KINDS_HEADS = [(kind, head, n) for kind in CONFIGS for head, n in OF_CLASSES]
KINDS_HEADS.append(("bert", "ForMultipleChoice", 1))
QUICK_HEADS = {
    ("bert", "ForMultipleChoice", 1),
    ("bert", "ForSequenceClassification", 3),
    ("bert", "ForQuestionAnswering", 2),
    ("gpt2", "ForSequenceClassification", 1),
    ("llama", "ForSequenceClassification", 3),
    ("qwen2", "ForQuestionAnswering", 2),
    ("t5", "ForSequenceClassification", 3),
    ("t5", "ForQuestionAnswering", 2),
}


@pytest.mark.parametrize(
    ("kind", "head", "n_labels"), full_unless(QUICK_HEADS.__contains__, KINDS_HEADS, unpack=True)
)
def test_every_class_gives_the_same_logits_loss_and_gradients(
    kind: str, head: heads.Head, n_labels: int
) -> None:
    """With one label their loss is the mean squared difference, and ours has numbers as labels."""
    ours, theirs = heads.pair(kind, head, n_labels)
    draw = torch.Generator().manual_seed(3)
    n_each = 3 if head == "ForMultipleChoice" else 1
    rows = [torch.randint(2, 211, (n,), generator=draw) for n in n_each * LENGTHS]
    for row in rows:
        row[-1] = heads.END
    batch = heads.batch_of(ours, rows, 24)
    labels = {"labels": torch.tensor([2, 0, 1, 2])}
    if n_labels == n_each == 1:
        labels = {"labels": torch.tensor([0.5, -1.25, 4.0, 2.0], dtype=torch.float64)}
    if head == "ForQuestionAnswering":
        del batch["at"]
        answer = torch.tensor([[3, 5], [0, 0], [2, 2], [7, 11]])
        labels = {"start_positions": answer[:, 0], "end_positions": answer[:, 1]}
        batch["answer"] = answer
    else:
        batch |= labels
    inputs = heads.inputs_of(batch)
    if n_each > 1:
        inputs = {key: value.view(4, n_each, -1) for key, value in inputs.items()}
    want = theirs(**inputs, **labels)
    want.loss.backward()
    (logits,) = ours.logits(batch).values()
    if head == "ForQuestionAnswering":
        assert_close(logits.detach(), torch.stack((want.start_logits, want.end_logits), 1).detach())
    else:
        assert_close(logits.detach().view_as(want.logits), want.logits.detach())
    (loss,), (count,) = ours.losses(batch).values(), ours.counts(batch).values()
    (loss / count).backward()
    assert_close((loss / count).detach(), want.loss.detach())
    # Softmax does not see what is added to all tokens of a span (or the bias of the last norm), or
    # to all choices.
    zero = {
        "ForQuestionAnswering": ("span.ends.bias", "layers.1.norm2.bias", "norm.bias"),
        "ForMultipleChoice": ("classifier.labels.bias",),
    }
    assert_same_gradients(kind, ours, theirs, zero.get(head, ()))


# Tokens of the passage and of three choices of each question. In one sequence nothing is padding.
CHOICES = ((9, 3, 13, 1), (2, 6, 2, 11), (5, 1, 1, 4), (1, 7, 8, 2))
RIGHT = [2, 0, 1, 1]


def questions(two_stacks: bool) -> tuple[Batch, list[list[int]]]:
    """Return a batch of questions, and each of its sequences without padding."""
    draw = np.random.default_rng(4)
    texts = [[draw.integers(2, V, n).tolist() for n in one] for one in CHOICES]
    documents = [[i for text in one for i in text] for one in texts]
    split = split_of(documents, heads.END, parts=CHOICES, right=RIGHT)
    samples = ChoiceExamples(split, Reading(24, heads.SPECIAL, two_stacks), 3)
    batch = {k: torch.from_numpy(v) for k, v in SequentialBatches(samples, 4).batch(0).items()}
    return batch, [
        [*passage, heads.END, *choice, heads.END] for passage, *rest in texts for choice in rest
    ]


KINDS_CHOICES = [kind for kind in CONFIGS if kind != "bert"]  # which has a class of its own


@pytest.mark.parametrize("kind", full_unless(("gpt2", "llama", "t5").__contains__, KINDS_CHOICES))
def test_choices_are_scored_as_their_class_with_one_label_scores_each_alone(kind: str) -> None:
    """It reads one sequence without padding at a time, so no choice sees another, nor padding."""
    ours, theirs = heads.pair(kind, "ForSequenceClassification", 1)
    batch, sequences = questions(ours.config.two_stacks)
    alone = [theirs(input_ids=torch.tensor([ids])).logits.view(()) for ids in sequences]
    want = torch.stack(alone).view(4, 3)
    loss = F.cross_entropy(want, torch.tensor(RIGHT))
    loss.backward()
    losses = []
    for n, micro in enumerate(RowSplit(4, 2, Axes()).micro_batches(batch)):
        got = ours.logits(micro.batch)["labels"].detach()
        assert_close(got.view(2, 3), want.detach()[2 * n : 2 * n + 2])
        assert int(ours.counts(micro.batch)["labels"]) == 2
        losses.append(ours.losses(micro.batch)["labels"])
        (losses[-1] / 4).backward()
    assert_close(torch.stack(losses).detach().sum() / 4, loss.detach())
    # Softmax does not see what is added to the scores of all choices.
    assert_same_gradients(kind, ours, theirs, ("classifier.labels.bias", "norm.bias"))


def test_numbers_that_are_not_there_count_nothing() -> None:
    ours, _ = heads.pair("gpt2", "ForSequenceClassification", 1)
    batch = heads.batch_of(ours, [torch.arange(2, 9)] * 3, 24)
    numbers = torch.tensor([1.0, math.nan, 3.0])
    with torch.no_grad():
        logits = ours.logits(batch)["labels"].squeeze(1)
        batch["labels"] = numbers
        assert int(ours.counts(batch)["labels"]) == 2
        want = (logits[0] - 1.0) ** 2 + (logits[2] - 3.0) ** 2
        assert_close(ours.losses(batch)["labels"], want)


def test_micro_batches_of_choices_are_sequences() -> None:
    """The sequences of a sample stay together, and the numbers of rows count sequences."""
    tokens = torch.arange(4 * 3 * 5).view(4, 3, 5)
    of_tokens = ("tokens", "valid", "segments", "source", "source_valid")
    batch = {"at": torch.zeros(4, 3), "labels": torch.arange(4), **dict.fromkeys(of_tokens, tokens)}
    first, second = RowSplit(4, 2, Axes()).micro_batches(batch)
    assert (first.rows, second.rows) == (slice(0, 6), slice(6, 12))
    for key in of_tokens:
        assert torch.equal(second.batch[key], tokens[2:].flatten(0, 1)), key
    assert second.batch["at"].shape == (6,)
    assert second.batch["labels"].tolist() == [2, 3]
    assert np.array_equal(RowSplit(4, 2, Axes()).all_rows, np.arange(4))


def test_labels_that_are_ignored_count_nothing() -> None:
    ours, _ = heads.pair("gpt2", "ForSequenceClassification", 1)
    (micro,) = RowSplit(4, 1, Axes()).micro_batches(questions(two_stacks=False)[0])
    ignored = torch.tensor([True, False, False, True])
    labels, some = micro.batch["labels"], {}
    with torch.no_grad():
        for name, hidden in (("all", ignored & ~ignored), ("some", ignored), ("rest", ~ignored)):
            micro.batch["labels"] = labels.masked_fill(hidden, IGNORE)
            some[name] = ours.losses(micro.batch)["labels"]
    assert_close(some["some"] + some["rest"], some["all"])


def labeled(family: str) -> Model:
    """Return a random model of words with a branch for labels."""
    size: dict[str, Any] = {"n_layers": 2, "hidden_size": 48, "n_heads": 4, "vocab_size": 211}
    size |= {"sentence_pair": False} if family == "bert" else {}
    size |= {"family": family, "max_seq_len": 12, "n_labels": 5}
    config = ModelConfig.model_validate(size)
    model: Model = randomize(build_model(config), torch.float64)
    return model


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_labels_come_from_the_hidden_vector_of_a_chosen_token(family: str) -> None:
    """By a product, tanh and another product. Padding has no effect on it, nor on words."""
    ours, tokens, valid = labeled(family), tokens_of(211, 4, 12), lengths_mask([12, 7, 1, 5], 12)
    batch = {"tokens": tokens, "valid": valid, "at": torch.tensor([11, 3, 0, 4])}
    branch: Any = ours.classifier
    with torch.no_grad():
        got, hidden = ours.logits(batch), ours.hidden(batch)
        if family == "gpt2":
            hidden = ours.get_submodule("norm")(hidden)
        chosen = torch.stack([hidden[row, at] for row, at in enumerate(batch["at"].tolist())])
        pooled = torch.tanh(chosen @ branch.pooler.weight + branch.pooler.bias)
        assert_close(got["labels"], pooled @ branch.labels.weight + branch.labels.bias)
        other = ours.logits({**batch, "tokens": torch.where(valid, tokens, 0)})
    assert torch.equal(got["labels"], other["labels"])
    assert torch.equal(got["tokens"][valid], other["tokens"][valid])
    assert int(ours.n_tokens(batch)) == 12 + 7 + 1 + 5


def test_smoothing_and_labels_do_not_mix() -> None:
    """Label smoothing applies to words; a branch's labels are used as they are."""
    ours = labeled("gpt2")
    ours.loss.smoothing = 0.1
    batch = {"tokens": tokens_of(211, 2, 12), "at": torch.tensor([3, 11])}
    batch["labels"], batch["targets"] = torch.tensor([1, 3]), tokens_of(211, 2, 12, seed=2)
    with torch.no_grad():
        logits, losses = ours.logits(batch), ours.train().losses(batch)
    want = F.cross_entropy(logits["labels"], batch["labels"], reduction="sum")
    assert_close(losses["labels"], want)
