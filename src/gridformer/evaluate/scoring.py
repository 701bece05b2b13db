"""How likely a model finds given tokens, on any layout: the base of all measures of likelihood.

Windows of tokens go through the model in batches, whose rows are divided as in training. Each
process sums over its own rows, and one sum over all processes at the end gives every process the
results of all windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer import comm
from gridformer.data import Tokenizer
from gridformer.evaluate.loading import Trained
from gridformer.models import Model
from gridformer.models.blocks import places_per_chunk
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.train.forward_backward import Passes, RowSplit, WholeModel
from gridformer.utils.batch import IGNORE, Batch

CHUNK_TOKENS = 1024  # about how many tokens' logits exist at a time on a device
LABEL = "scores"


@dataclass(frozen=True)
class ScoredWindow:
    """Tokens that a model reads at once, and how many at the end it is asked to predict."""

    tokens: Sequence[int]  # one more than the model reads: the last one is only predicted
    n_targets: int


@dataclass(frozen=True)
class Score:
    """The likelihood of the targets of a window."""

    log_likelihood: float  # the sum of the natural logarithms of their probabilities
    greedy: bool  # whether each of them is the most likely token


def score(trained: Trained, windows: Sequence[ScoredWindow], batch_size: int) -> list[Score]:
    """Scores windows, about `batch_size` at a time.

    All processes call it together and get the same results.
    """
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))

    def batch_of(numbers: Sequence[int], multiple: int) -> Batch:
        length = len(windows[numbers[0]].tokens) - 1
        length = -(-length // multiple) * multiple
        tokens = torch.zeros(len(numbers), length, dtype=torch.int64)
        targets = torch.full((len(numbers), length), IGNORE)
        for row, i in enumerate(numbers):
            # Padding on the right changes nothing, because no token sees what follows it.
            ids, n = torch.tensor(windows[i].tokens), len(windows[i].tokens) - 1
            tokens[row, :n] = ids[:-1]
            targets[row, n - windows[i].n_targets : n] = ids[n + 1 - windows[i].n_targets :]
        return {"tokens": tokens, "targets": targets}

    def columns(hidden: Tensor, batch: Batch) -> Tensor | None:
        return likelihoods(trained.model, hidden, batch["targets"])

    scores = in_batches(trained, order, batch_size, batch_of, columns, 2)
    return [Score(likelihood, misses == 0) for likelihood, misses in scores.tolist()]


def in_batches(
    trained: Trained,
    order: Sequence[int],
    batch_size: int,
    batch_of: Callable[[Sequence[int], int], Batch],
    columns: Callable[[Tensor, Batch], Tensor | None],
    n_columns: int,
) -> Tensor:
    """Runs items through a model in batches, and returns some numbers for each of them.

    Args:
        trained: The model.
        order: The numbers of the items, in the order in which they are batched. Items that are next
            to each other should be of about equal length.
        batch_size: About how many of them go through the model together.
        batch_of: Makes the batch of some items, whose length is a multiple of its second argument.
        columns: Maps the last hidden states of a micro-batch, and the micro-batch, to the numbers
            [b, n_columns]; None where other processes compute them.
        n_columns: Numbers for each item.

    Returns:
        The numbers [items, n_columns] in float64, the same on every process.
    """
    axes, layout, device = trained.axes, trained.layout, trained.device
    parts = RowSplit.n_parts(layout.micro_batches, axes)
    n_rows = max(1, batch_size // parts) * parts
    split = RowSplit(n_rows, layout.micro_batches, axes)
    speaks = axes.same_batch.index == 0
    # A row more, for rows that fill up the last batch.
    results = torch.zeros(len(order) + 1, n_columns, dtype=torch.float64, device=device)

    def finish(hidden: Tensor, batch: Batch) -> None:
        values = columns(hidden, batch)
        if values is not None and speaks:
            results[batch["item"]] = values.double()

    passes = passes_of(trained)
    with torch.no_grad(), trained.in_use():
        for start in range(0, len(order), n_rows):
            numbers = [*order[start : start + n_rows]]
            item = torch.full((n_rows,), len(order))
            item[: len(numbers)] = torch.tensor(numbers)
            numbers += [numbers[0]] * (n_rows - len(numbers))
            batch = {**batch_of(numbers, trained.position_multiple), "item": item}
            mine = {key: value[split.all_rows].to(device) for key, value in batch.items()}
            passes.executor.evaluate(split.micro_batches(mine), finish)
    return comm.all_reduce(results[:-1].contiguous(), axes.world, label=LABEL).cpu()


def passes_of(trained: Trained) -> Passes:
    """Returns what runs micro-batches through the model."""
    model, pipelined = trained.model, trained.axes.pp.size > 1
    return Passes(model, trained.executor if pipelined else WholeModel(model, GradientSums([], [])))


def likelihoods(model: Model, hidden_BSH: Tensor, targets_BS: Tensor) -> Tensor | None:
    """Returns, for each row, the log-likelihood of its targets and how many are not most likely.

    Only the logits of about CHUNK_TOKENS tokens exist at a time. Where the sequence is sharded, a
    chunk takes positions from every device's part of it, because the head gathers them.

    Args:
        model: This process's part of a model.
        hidden_BSH: The last hidden states, sharded as they are between sections.
        targets_BS: Targets, IGNORE where there is none.

    Returns:
        [b, 2] in float64; None if another process computes them.
    """
    b, n_here = hidden_BSH.shape[:2]
    if hidden_BSH.is_meta:
        return None
    targets = targets_BS.view(b, -1, n_here)
    places = places_per_chunk(hidden_BSH, targets_BS, CHUNK_TOKENS)
    total = torch.zeros(b, 2, dtype=torch.float64, device=targets_BS.device)
    for start in range(0, n_here, places):
        chunk = slice(start, start + places)
        wanted = targets[..., chunk].reshape(b, -1)
        logits = model.token_logits(hidden_BSH[:, chunk])
        counts = wanted != IGNORE
        at, top, log_sum = _at_targets(model, logits, wanted.masked_fill(~counts, 0))
        likelihood = (at - log_sum).double().masked_fill(~counts, 0.0)
        total += torch.stack((likelihood.sum(1), ((at < top) & counts).sum(1)), 1)
    return total


def _at_targets(model: Model, logits: Tensor, wanted_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of targets, the largest logits, and the logarithms of summed exponentials.

    All are [b, s] and in at least float32. Where the vocabulary is sharded, three numbers for each
    token are communicated instead of logits.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = model.loss
    if not isinstance(loss, VocabParallelCrossEntropy):
        x = x[..., : model.config.vocab_size]
        at = x.gather(-1, wanted_BS.unsqueeze(-1)).squeeze(-1)
        return at, x.amax(-1), x.logsumexp(-1)
    wanted_BS, x = loss.of_all(wanted_BS), x[..., : loss.width]
    first, width = loss.axis.index * x.shape[-1], x.shape[-1]
    n_words = min(max(0, loss.vocab_size - first), width)  # the rest is padding
    x = x.masked_fill(torch.arange(width, device=x.device) >= n_words, -torch.inf)
    top = comm.all_reduce(x.amax(-1), loss.axis, "max", LABEL)
    here = (wanted_BS >= first) & (wanted_BS < first + width)
    at = x.gather(-1, torch.where(here, wanted_BS - first, 0).unsqueeze(-1)).squeeze(-1)
    at = comm.all_reduce(at.masked_fill(~here, 0.0), loss.axis, label=LABEL)
    exp_sum = comm.all_reduce((x - top.unsqueeze(-1)).exp().sum(-1), loss.axis, label=LABEL)
    at, top, exp_sum = (loss.of_mine(y) for y in (at, top, exp_sum))
    return at, top, exp_sum.log() + top


# Names of a begin-of-text token, for tokenizers that do not put it before texts themselves.
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")


def prefix_id(tokenizer: Tokenizer) -> int:
    """Returns the token that is read before the first token of a text.

    It is the tokenizer's begin-of-text token, such as that of `prepare --bos`, or else the
    end-of-text token, which precedes a text in training.
    """
    if tokenizer.begin_ids:
        return tokenizer.begin_ids[-1]
    begins = (tokenizer.id_of(name) for name in _BEGINS)
    return next((i for i in begins if i is not None), tokenizer.eos_id)


def sliding(ids: Sequence[int], prefix: int, length: int, stride: int) -> Iterator[ScoredWindow]:
    """Yields windows in which each token of a text is predicted once, in order.

    The first window predicts up to `length` tokens, each further one the next `stride` tokens, or
    what is left, with as many tokens before them as the model reads. With a stride of `length`
    these are the windows of lm-evaluation-harness.

    Args:
        ids: The text.
        prefix: The token of `prefix_id`.
        length: How many tokens the model reads at once.
        stride: From 1 to `length`; small strides give each token a longer context and take longer.
    """
    whole, done = [prefix, *ids], 0
    while done < len(ids):
        new = min(stride if done else length, len(ids) - done)
        done += new
        yield ScoredWindow(whole[max(0, done - length) : done + 1], new)


def continuation(tokenizer: Tokenizer, context: str, text: str, length: int) -> ScoredWindow:
    """Returns the window that predicts `text` after `context`.

    As in lm-evaluation-harness, both are tokenized together, spaces at the end of the context
    belong to the text, and a context that is too long loses its first tokens.
    The model reads `length` tokens at once.
    """
    bare = context.rstrip()
    text = context[len(bare) :] + text
    whole, before = (
        [*tokenizer.begin_ids, *ids] for ids in tokenizer.encode_batch([bare + text, bare])
    )
    return after(before or [prefix_id(tokenizer)], whole[len(before) :], length)


def after(context: Sequence[int], ids: Sequence[int], length: int) -> ScoredWindow:
    """Returns the window that predicts tokens after those of a context of at least one token.

    The model reads `length` tokens at once; of more than these only the last ones are predicted.
    """
    return ScoredWindow([*context, *ids][-(length + 1) :], min(len(ids), length))
