"""Reads texts with a model token by token, with cached keys and values, on any layout.

All rows of a batch are at the same position, so no row is padded and a row's logits are those that
it has alone. The rows are divided over replicas and over rows of the grid or branches, as in
training. A rank keeps the keys and values of its own heads, for the layers of its stages and the
rows that its attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.comm import Pending
from gridformer.evaluate.loading import Trained
from gridformer.models import Activations, Model
from gridformer.models.blocks import KVCache
from gridformer.parallel.pipeline.stages import LABEL
from gridformer.parallel.registry import spec_of
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.train.forward_backward import RowSplit
from gridformer.utils.batch import Batch


class Decoder:
    """Reads the same number of further tokens of each text, and returns the logits after them.

    All processes of the layout create and call it together, inside `Trained.in_use`.

    Args:
        trained: A model on its layout that predicts next tokens.
        n_texts: The number of texts.
        sources: For encoder-decoders, the source of each text.

    Attributes:
        n_rows: The number of rows; those after the last text fill up the batch.
        rows: The rows whose logits this process computes.
        speaks: Whether this process tells the others what it computes for its rows.
    """

    def __init__(
        self, trained: Trained, n_texts: int, sources: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.trained, self.model, self.axes = trained, trained.model, trained.axes
        n_parts = RowSplit.n_parts(1, self.axes)
        self.n_rows = -(-n_texts // n_parts) * n_parts
        self.rows = RowSplit(self.n_rows, 1, self.axes).rows(0)
        self.multiple = trained.position_multiple
        # In D&SP a branch attends for the texts of all branches.
        boundary = spec_of(trained.layout).boundary(trained.layout)
        self.attends_for = self.axes.batch.size if boundary.activation_layout == "b" else 1
        last = self.axes.pp.index == trained.layout.stage_ranks[-1]
        self.speaks = last and self.axes.same_batch.index == 0
        self.source = self._sources(sources) if sources is not None else None
        self.reset()

    def reset(self) -> None:
        """Forgets the texts, but not their sources."""
        config = self.model.config
        n_layers = config.n_decoder_layers if config.two_stacks else config.n_layers
        self.caches = [KVCache() for _ in range(n_layers)]
        self.encoded = False
        self.tokens_BS = torch.empty(
            (self.rows.stop - self.rows.start, 0), dtype=torch.int64, device=self.trained.device
        )

    def select(self, order: Tensor, k: int = 1) -> None:
        """Replaces each row by one of the rows of this process, as a beam search needs.

        Args:
            order: The row that takes each place, int64 [k n_rows].
            k: How many rows take the place of one.
        """
        order = order.to(self.trained.device)
        self.n_rows *= k
        self.rows, before = slice(self.rows.start * k, self.rows.stop * k), self.rows
        mine = order[self.rows] - before.start
        self.tokens_BS = self.tokens_BS[mine]
        if self.source is not None:
            self.source = {key: value[mine] for key, value in self.source.items()}
        n = (before.stop - before.start) * self.attends_for
        first = before.start // n * n
        cached = order[first * k : (first + n) * k] - first
        for cache in self.caches:
            cache.select(cached)

    def _sources(self, sources: Sequence[Sequence[int]]) -> Batch:
        longest = max(map(len, sources))
        length = -(-longest // self.multiple) * self.multiple
        sources = [*sources, *[sources[0]] * (self.n_rows - len(sources))]
        sizes = torch.tensor([len(ids) for ids in sources])
        rows = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in sources])
        batch = {"source": rows, "source_valid": torch.arange(length) < sizes[:, None]}
        return {key: value[self.rows].to(self.trained.device) for key, value in batch.items()}

    def read(self, tokens_BS: Tensor) -> Tensor | None:
        """Reads further tokens of all rows.

        Args:
            tokens_BS: The tokens [n_rows, s], the same on every process.

        Returns:
            Logits [rows, v] after the last token of each of this process's rows; None where other
            processes compute them.
        """
        mine = tokens_BS[self.rows].to(self.trained.device)
        done, self.tokens_BS = self.tokens_BS.shape[1], torch.cat((self.tokens_BS, mine), 1)
        n = self.tokens_BS.shape[1]
        even = done + (n - done) // self.multiple * self.multiple
        logits = None
        spans = ((done, even), (even, n)) if self.model.keeps_keys else ((0, n),)
        for start, stop in spans:
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
        hidden_BSH = self._hidden({"tokens": tokens, **(self.source or {})}, start - again)
        self.encoded = True
        for cache in self.caches:
            cache.keep(stop)
        if hidden_BSH is None:
            return None
        # Where positions are sharded, every device passes one of its positions to the head, which
        # gathers them.
        owner, local = divmod(stop - start + again - 1, hidden_BSH.shape[1])
        logits = whole_logits(self.model, hidden_BSH[:, local : local + 1])
        return None if logits is None else logits[:, owner]

    def _hidden(self, batch: Batch, start: int) -> Tensor | None:
        """Returns the last hidden states, or None if another stage computes them."""
        links: list[str] | None = None
        entering: Activations | None = None
        if self.source is not None and self.encoded:
            links = [link.name for link in self.model.links()]
            links = links[self.model.config.n_layers + 1 :]  # of the decoder
            # Nothing reads the encoder's output again, because its keys and values are cached.
            entering = Activations(memory=torch.empty(0, device=self.trained.device))
        if self.axes.pp.size == 1:
            return self.model.run(batch, entering, links, self.caches, start).hidden
        executor, pp = self.trained.executor, self.axes.pp
        sent: list[Pending] = []
        ranks = self.trained.layout.stage_ranks
        stages = [[executor.links[i].name for i in stage] for stage in self.model.stages]
        stages = [[name for name in stage if not links or name in links] for stage in stages]
        first = next(number for number, stage in enumerate(stages) if stage)
        hidden = None
        for stage in self.trained.layout.stages_on(pp.index):
            if stage > first and ranks[stage - 1] != pp.index:
                entering = self._receive(stage, ranks[stage - 1], batch)
            if stage >= first:
                leaving = self.model.run(batch, entering, stages[stage], self.caches, start)
                if stage == len(stages) - 1:
                    hidden = leaving.hidden
                elif ranks[stage + 1] == pp.index:
                    entering = leaving
                elif not executor.stage_io.absent:
                    sent += self._send(stage, ranks[stage + 1], leaving)
        for pending in sent:
            pending.wait()
        return hidden

    def _passed(self, stage: int) -> list[str]:
        """Returns the names of the activations that enter a stage in this pass."""
        names = self.trained.executor.stage_io.names(stage)
        return [name for name in names if not (name == "memory" and self.encoded)]

    def _send(self, stage: int, to: int, leaving: Activations) -> list[Pending]:
        executor = self.trained.executor
        made = [getattr(leaving, name) for name in self._passed(stage + 1)]
        return [executor.channel.send(executor.stage_io.slice(x), to, LABEL) for x in made]

    def _receive(self, stage: int, source: int, batch: Batch) -> Activations:
        executor = self.trained.executor
        entering = executor.stage_io.entering(stage, batch)
        if not executor.stage_io.absent:
            for x in (entering[name] for name in self._passed(stage)):
                buffer = executor.stage_io.receive_buffer(x)
                received = executor.channel.receive(buffer, source, LABEL).wait()
                executor.stage_io.fill(x, received)
        return Activations(**entering)


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
        logits = loss.whole(logits, "logits")
    logits = logits[..., : model.config.vocab_size]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
