"""The base class of all families: running a model, whole or in pipeline stages, and its losses.

A family implements `run`, which turns a batch into hidden states, and `token_logits` and
`branch_logits`, which turn the last hidden states into logits. A whole model runs every link of
`run`; a pipeline stage runs its own links and passes its `Activations` to the next stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    AttentionHeads,
    Balance,
    Classifier,
    CrossEntropy,
    DropoutRng,
    DropoutSite,
    KVCache,
    LabelLoss,
    LastTokenClassifier,
    MixtureOfExperts,
    PooledDropout,
    Recompute,
    RecomputeMode,
    SequenceRows,
    SpanHead,
    TiedHead,
    TokenEmbedding,
    chunked_loss,
    keep_copies,
    places_per_chunk,
)
from gridformer.utils.batch import Batch, counts

# Maps each loss of a model to the key of a batch that holds its targets.
LOSSES = {"tokens": "targets", "pair": "pair", "labels": "labels", "answer": "answer"}


_held: ContextVar[Collection[str] | None] = ContextVar("held layers", default=None)


@contextmanager
def only_layers(names: Collection[str]) -> Iterator[None]:
    """Builds models with these layers alone, inside the context. They are otherwise complete."""
    before = _held.set(names)
    try:
        yield
    finally:
        _held.reset(before)


def held_layers() -> Collection[str] | None:
    """Returns the names of `only_layers`; None outside that context."""
    return _held.get()


def build_layers(stack: str, n: int, layer: Callable[[str], nn.Module]) -> nn.ModuleDict:
    """Builds the n layers of a stack that are to be built, given a function of a layer's name.

    A ModuleDict keeps parameter names the same on a device that holds only some layers.
    """
    held = held_layers()
    names = {i: f"{stack}.{i}" for i in range(n)}
    return nn.ModuleDict({str(i): layer(x) for i, x in names.items() if held is None or x in held})


@dataclass
class Activations:
    """What a pipeline stage sends to the next, which computes the rest from the batch.

    Attributes:
        hidden: Hidden states [b, s, h], or [b, S, h] while an encoder runs.
        memory: The encoder's output [b, S, h], once it exists.
    """

    hidden: Tensor | None = None
    memory: Tensor | None = None

    @staticmethod
    def taken(entering: Activations | None) -> tuple[Any, Any]:
        """Takes `hidden` and `memory` out of `entering`, or (None, None) for the first stage.

        `entering` is emptied, so that what the previous stage sent is freed once it has been used.
        """
        if entering is None:
            return None, None
        taken = entering.hidden, entering.memory
        entering.hidden = entering.memory = None
        return taken


@dataclass(frozen=True)
class Link:
    """A part of a model that a pipeline does not split: the embedding, a layer, or the head.

    Attributes:
        name: The name of the link within its model.
        modules: Names of the submodules that it runs. Several links may run the same submodule.
        memory: Whether the link makes `Activations.memory` from the hidden states that enter it, or
            reads it.
    """

    name: str
    modules: tuple[str, ...]
    memory: Literal["", "makes", "reads"] = ""


class Model(nn.Module):
    """The base class of the families.

    Build a model on torch's meta device and pass it to `gridformer.parallel.parallelize`, which
    shards it, then allocates and initializes the parameters of this device.

    Attributes:
        compute_dtype: The dtype of activations; None keeps that of the embedding's result.
        stages: The pipeline stages of all ranks, as ranges of links; empty without a pipeline.
        loss_chunk_tokens: How many tokens' logits exist at a time while the loss is computed; 0
            means all of them.
        recompute: Which activations of layers are kept for the backward pass.
        fused: Whether GPUs use `gridformer.models.kernels`; `uses_kernels` sets it.
        sequence: Which tokens of the sequences of a batch the model gets; `reads_tokens` sets it.
        balance: What all mixtures of experts share; None for a model without them.

    Raises:
        ValueError: `config.vocab_size` is not known yet.
    """

    keeps_keys = True  # in caches, with which it continues texts
    tokens: TokenEmbedding
    head: TiedHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(
                f"model.vocab_size is {config.vocab_size}: set it to at least 1 before building a "
                "model"
            )
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.stages: tuple[range, ...] = ()
        self.dropout_rng = DropoutRng()
        self.loss = CrossEntropy(config.label_smoothing, config.vocab_size)
        self.label_loss = LabelLoss()
        self.loss_chunk_tokens = 0
        self.recompute = Recompute()
        self.fused = True
        self.sequence = SequenceRows()
        self.balance = Balance(config) if config.n_experts else None

    # ------------------------------------------------------------------ implemented by a family

    def links(self) -> list[Link]:
        """Returns the parts between which a pipeline may split, in the order `run` runs them."""
        raise NotImplementedError

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        """Runs a batch through the model up to its last hidden states [b, s, h].

        Args:
            entering: The activations of the previous stage, which are taken out of it.
            links: Names of the links to run, which must be consecutive; None runs all of them.
            caches: For generation, one cache per layer, which the tokens continue.
            start: The position of the first token, the number of tokens in the caches.
        """
        raise NotImplementedError

    def token_logits(
        self, hidden_BSH: Tensor, table: Tensor | None = None, padded: bool = False
    ) -> Tensor:
        """Computes logits [b, s, v] from the last hidden states, or from some positions of them.

        Args:
            table: The head's table as `TiedHead.prepare` returned it, for callers that use it many
                times; None reads `table`.
            padded: Whether the logits may have more than v columns, of which `loss` reads v.
        """
        x_BSH, prepared = hidden_BSH, table is not None
        for module in self.before_head():
            x_BSH = module(x_BSH)
        logits: Tensor = self.head(x_BSH, table if prepared else self.table, prepared, padded)
        return logits

    def before_head(self) -> tuple[nn.Module, ...]:
        """Returns the modules between the last hidden states and the head, such as the last norm.

        They are part of the logits, so that a chunked loss runs them on one chunk at a time.
        """
        raise NotImplementedError

    def branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Computes the logits of the classification branches that a batch asks for, by loss."""
        if "at" in batch or "answer" in batch:
            for module in self.before_head():
                hidden_BSH = module(hidden_BSH)
        return self._branch_logits(hidden_BSH, batch)

    # ------------------------------------------------------------------ the whole model

    @property
    def table(self) -> Tensor:
        """The table [v, h] of the head, or of the embedding if tied; None where others hold it."""
        table: Any = self.tokens.weight if self.config.tied_head else self.head.weight
        return table

    def hidden(
        self, batch: Batch, caches: Sequence[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        """Returns the last hidden states of a model that is run as a whole; see `run`."""
        hidden = self.run(batch, caches=caches, start=start).hidden
        assert hidden is not None
        return hidden

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Computes logits by loss: `tokens` [b, s, v], and those of the batch's branches."""
        hidden = self.hidden(batch)
        words = {"tokens": self.token_logits(hidden)} if self.config.token_head else {}
        return words | self.branch_logits(hidden, batch)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Computes each loss, summed over this device's targets; `counts` returns their number."""
        return self.losses_of(self.hidden(batch), batch)

    def losses_of(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Computes `losses` from the last hidden states, as a pipeline's last stage does."""
        logits = self.branch_logits(hidden_BSH, batch)
        losses: dict[str, Tensor] = {}
        for name, key in LOSSES.items():
            if key not in batch:
                continue
            if name == "tokens":
                losses[name] = self._token_loss(hidden_BSH, batch[key])
            else:
                losses[name] = self.label_loss(logits[name], batch[key])
        return losses

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Computes the token loss of a family that reads nothing but tokens."""
        return self.losses({"tokens": tokens_BS, "targets": targets_BS})["tokens"]

    def _token_loss(self, hidden_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        places = places_per_chunk(hidden_BSH, targets_BS, self.loss_chunk_tokens)
        # On meta the hidden states belong to another device, so there is no memory to save.
        if places >= hidden_BSH.shape[1] or hidden_BSH.is_meta:
            loss: Tensor = self.loss(self.token_logits(hidden_BSH, padded=True), targets_BS)
            return loss
        whole = self.table
        parameters = [
            p
            for part in (*self.before_head(), self.head)
            for p in part.parameters()
            if p is not whole
        ]
        with keep_copies([*parameters, whole], once=False):  # for all chunks
            table = self.head.prepare(whole, hidden_BSH.dtype)
            head = partial(self.token_logits, table=table, padded=True)
            mine = [*parameters, table]
            return chunked_loss(hidden_BSH, targets_BS, places, head, self.loss, mine)

    @staticmethod
    def counts(batch: Batch) -> dict[str, Tensor]:
        """Returns how many targets each loss has in a batch, as scalar tensors."""
        # Not sum(), which would first convert every boolean to an integer.
        return {
            name: counts(batch[key]).count_nonzero() for name, key in LOSSES.items() if key in batch
        }

    @staticmethod
    def n_tokens(batch: Batch) -> Tensor:
        """Returns how many tokens of a batch the model reads, without padding.

        In an encoder-decoder's batch it counts the source's tokens and the decoder's targets;
        fine-tuning has no such targets.
        """

        def real(key: str, mask: str) -> Tensor:
            return batch.get(mask, torch.ones_like(batch[key], dtype=torch.bool)).count_nonzero()

        if "source" not in batch:
            return real("tokens", "valid")
        source = real("source", "source_valid")
        return source + counts(batch["targets"]).count_nonzero() if "targets" in batch else source

    # ------------------------------------------------------------------ for the families

    def recomputes(self, mode: RecomputeMode, layers: int = 0) -> None:
        """Sets which activations are recomputed; see `gridformer.models.blocks.Recompute`.

        `layers` is how many layers of each stack in a stage are recomputed, the first ones; 0 means
        all of them.
        """
        self.recompute.mode = mode
        links = self.links()
        whole: set[str] = set()
        for stage in (self.stages or (range(len(links)),)) if layers else ():
            seen: Counter[str] = Counter()
            for link in (links[i] for i in stage):
                stack, _, number = link.name.rpartition(".")
                seen[stack] += number.isdigit()
                whole |= {link.modules[0]} if number.isdigit() and seen[stack] > layers else set()
        self.recompute.whole = {part for name, part in self.named_modules() if name in whole}
        for module in self.modules():
            if isinstance(module, AttentionHeads):
                module.recompute = self.recompute
            elif isinstance(module, MixtureOfExperts):
                module.tokens.recompute = self.recompute

    def reads_tokens(self, sequence: SequenceRows) -> None:
        """Sets which tokens of every sequence the model gets, if rows of a grid divide them.

        A batch then has these tokens, targets, segments and positions, and `valid` and documents of
        whole sequences; see gridformer.train.forward_backward.
        """
        self.sequence = sequence
        for module in self.modules():
            if isinstance(module, AttentionHeads):
                module.sequence = sequence

    def length(self, tokens_BS: Tensor) -> int:
        """Returns the length of the sequences of which a batch has these tokens."""
        return tokens_BS.shape[1] * self.sequence.n

    def uses_kernels(self, fused: bool) -> None:
        """Sets whether GPUs use `gridformer.models.kernels`, or PyTorch's operators only."""
        self.fused = self.loss.fused = fused
        for module in self.modules():
            if isinstance(module, DropoutSite):
                module.fused = fused

    def sites(self) -> dict[str, int]:
        """Returns the name and the `sample_block` of each module that drops elements."""
        sites = [module for module in self.modules() if isinstance(module, DropoutSite)]
        return {module.site: module.sample_block for module in sites if module.p > 0.0}

    def _add_heads(self, std: float) -> None:
        """Adds the heads of sequences and spans that the config names."""
        config, h = self.config, self.config.hidden_size
        if config.n_labels and not config.pooled_labels:
            self.classifier: nn.Module = LastTokenClassifier(h, config.n_labels, std)
        elif config.n_labels:
            # A fine-tuned BERT drops out what the pooler returns. Pre-training and T5 do not.
            drops = config.dropout * (config.family == "bert" and not config.token_head)
            dropout = PooledDropout(drops, "classifier", self.dropout_rng) if drops else None
            self.classifier = Classifier(h, config.n_labels, std, dropout)
        if config.span_head:
            self.span = SpanHead(h, std)

    def _branch_logits(self, hidden_BSH: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Computes the logits of the heads of `_add_heads`."""
        logits: dict[str, Tensor] = {}
        if "at" in batch:
            logits["labels"] = self.classifier(hidden_BSH, batch["at"])
        if "answer" in batch:
            logits["answer"] = self.span(hidden_BSH)
        return logits

    def _branch_modules(self) -> tuple[str, ...]:
        """Returns the names of the heads of `_add_heads`."""
        heads = {"classifier": bool(self.config.n_labels), "span": self.config.span_head}
        return tuple(name for name, there in heads.items() if there)

    def _link_names(self) -> list[str]:
        return [link.name for link in self.links()]

    @staticmethod
    def _layers(
        layers: nn.ModuleDict, prefix: str, links: Collection[str]
    ) -> list[tuple[int, nn.Module]]:
        """Returns the layers of a stack that `links` names, with their numbers."""
        return [(int(i), layer) for i, layer in layers.items() if f"{prefix}.{i}" in links]

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.compute_dtype or x.dtype)


class OneStack(Model):
    """The base class of the families with one stack of layers, which run link by link.

    A family implements `embed` and `layer_inputs`.
    """

    layers: nn.ModuleDict
    dropout: nn.Module

    def embed(self, batch: Batch, start: int) -> Tensor:
        """Embeds the tokens of a batch, the first of which is at position `start`: [b, s, h]."""
        raise NotImplementedError

    def layer_inputs(
        self, batch: Batch, dtype: torch.dtype, start: int, caches: Sequence[KVCache] | None
    ) -> tuple[Any, ...]:
        """Returns what all layers read besides hidden states and caches, such as masks."""
        raise NotImplementedError

    def after_layers(self, hidden_BSH: Tensor) -> Tensor:
        """Returns the last hidden states, given the result of the last layer."""
        return hidden_BSH

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        hidden, _ = Activations.taken(entering)
        links = self._link_names() if links is None else links
        if "embedding" in links:
            hidden = self.dropout(self._cast(self.embed(batch, start)))
        layers = self._layers(self.layers, "layers", links)
        shared = self.layer_inputs(batch, hidden.dtype, start, caches) if layers else ()
        for i, layer in layers:
            cache = caches[i] if caches else None
            hidden = self.recompute.block(layer, hidden, *shared, cache)
        if "head" in links:
            hidden = self.after_layers(hidden)
        return Activations(hidden)

    def _links(
        self, embedding: tuple[str, ...], shared: tuple[str, ...], head: tuple[str, ...]
    ) -> list[Link]:
        """Returns the links, given the modules that each runs; layers run themselves, too."""
        layers = (f"layers.{i}" for i in range(self.config.n_layers))
        return [
            Link("embedding", embedding),
            *(Link(name, (name, *shared)) for name in layers),
            Link("head", head),
        ]
