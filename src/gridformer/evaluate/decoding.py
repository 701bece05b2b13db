"""Reads texts with a model token by token, with cached keys and values, on any layout.

All rows of a batch are at the same position, so no row is padded and a row's logits are those that
it has alone. The rows are divided over replicas and over rows of the grid or branches, as in
training. A rank keeps the keys and values of its own heads, for the layers of its stages and the
rows that its attention reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.evaluate.loading import Trained
from gridformer.models import Activations, Model
from gridformer.models.blocks import KVCache
from gridformer.parallel.pipeline.stage_io import LABEL
from gridformer.parallel.registry import spec_of
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.train.rows import RowSplit
from gridformer.utils.batch import Batch


class Decoder:
    """Reads the same number of further tokens of each text, and returns what may follow them.

    All processes of the layout create and call it together, inside `Trained.in_use`.

    Args:
        trained: A decoder model on its layout.
        n_rows: The number of texts, a multiple of `row_parts`.

    Attributes:
        rows: The texts whose logits this process computes.
        speaks: Whether this process is the one that tells the others what follows its texts.
    """

    def __init__(self, trained: Trained, n_rows: int) -> None:
        self.trained, self.model = trained, trained.model
        self.axes, self.n_rows = trained.axes, n_rows
        self.rows = RowSplit(n_rows, 1, self.axes).rows(0)
        boundary = spec_of(trained.layout).boundary(trained.layout)
        # Where positions are sharded over devices, a pass has a multiple of so many of them.
        self.multiple = self.axes[boundary.axis].size if boundary.lies == "s" else 1
        last = self.axes.pp.index == self.axes.pp.size - 1
        self.speaks = last and self.axes.same_batch.index == 0
        self.reset()

    def reset(self) -> None:
        """Forgets the texts."""
        self.caches = [KVCache() for _ in range(self.model.config.n_layers)]
        self.tokens_BS = torch.empty(
            (self.rows.stop - self.rows.start, 0), dtype=torch.int64, device=self.trained.device
        )

    def read(self, tokens_BS: Tensor) -> Tensor | None:
        """Reads further tokens of all texts.

        Args:
            tokens_BS: The tokens [n_rows, s], the same on every process.

        Returns:
            Logits [rows, v] after the last token of each of this process's texts; None where other
            processes compute them.
        """
        mine = tokens_BS[self.rows].to(self.trained.device)
        done, self.tokens_BS = self.tokens_BS.shape[1], torch.cat((self.tokens_BS, mine), 1)
        n = self.tokens_BS.shape[1]
        even = done + (n - done) // self.multiple * self.multiple
        logits = None
        for start, stop in ((done, even), (even, n)):
            if start < stop:
                logits = self._read(start, stop)
        return logits

    def _read(self, start: int, stop: int) -> Tensor | None:
        """Reads the tokens from position `start` to `stop`.

        If the positions are sharded over more devices than there are tokens, the tokens before them
        are read once more, or padding after them, which causal attention cannot see.
        """
        missing = -(stop - start) % self.multiple
        again = min(start, missing)
        for cache in self.caches:
            cache.keep(start - again)
        tokens = F.pad(self.tokens_BS[:, start - again : stop], (0, missing - again))
        hidden = self._hidden({"tokens": tokens}, start - again)
        for cache in self.caches:
            cache.keep(stop)
        if hidden is None:
            return None
        return self._logits(hidden, stop - start + again - 1)

    def _hidden(self, batch: Batch, start: int) -> Tensor | None:
        """Returns the last hidden states, or None if another stage computes them."""
        if self.axes.pp.size == 1:
            return self.model.hidden(batch, self.caches, start)
        executor, pp = self.trained.executor, self.axes.pp
        sent: list[Pending] = []
        hidden = None
        for stage in range(pp.index, len(self.model.stages), pp.size):
            entering = self._receive(stage, batch) if stage else None
            links = [executor.links[i].name for i in self.model.stages[stage]]
            leaving = self.model.run(batch, entering, links, self.caches, start)
            if stage == len(self.model.stages) - 1:
                hidden = leaving.hidden
            elif not executor.stage_io.absent:
                assert leaving.hidden is not None
                part = executor.stage_io.slice(leaving.hidden)
                sent.append(executor.channel.send(part, (stage + 1) % pp.size, LABEL))
        for pending in sent:
            pending.wait()
        return hidden

    def _receive(self, stage: int, batch: Batch) -> Activations:
        executor, pp = self.trained.executor, self.axes.pp
        entering = executor.stage_io.entering(stage, batch)
        if not executor.stage_io.absent:
            for x in entering.values():
                buffer = executor.stage_io.receive_buffer(x)
                received = executor.channel.receive(buffer, (stage - 1) % pp.size, LABEL).wait()
                executor.stage_io.fill(x, received)
        return Activations(**entering)

    def _logits(self, hidden_BSH: Tensor, place: int) -> Tensor | None:
        """Returns logits [b, v] at one position from hidden states [b, s, h], or a part of them.

        Where positions are sharded, every device passes one of its positions to the head, which
        gathers them.
        """
        owner, local = divmod(place, hidden_BSH.shape[1])
        logits = whole_logits(self.model, hidden_BSH[:, local : local + 1])
        return None if logits is None else logits[:, owner]


def whole_logits(model: Model, hidden_BSH: Tensor) -> Tensor | None:
    """Returns logits [b, s, v] in at least float32, also where the vocabulary is sharded.

    Args:
        model: This process's part of a model.
        hidden_BSH: The last hidden states, sharded as they are between sections.

    Returns:
        The logits, gathered over the vocabulary; None if another process computes them.
    """
    logits, loss = model.token_logits(hidden_BSH), model.loss
    if logits.is_meta:  # on other sub-grids in D&SP-cSub
        return None
    if isinstance(loss, VocabParallelCrossEntropy):
        logits = comm.all_gather(logits[..., : loss.width], loss.axis, -1, "logits")
    logits = logits[..., : model.config.vocab_size]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def row_parts(trained: Trained) -> int:
    """Returns over how many processes the rows of a batch are divided."""
    return RowSplit.n_parts(1, trained.axes)
