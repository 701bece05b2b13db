"""Families of two stacks: an encoder reads a source, a decoder continues a text about it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

from gridformer.batch import Batch
from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    Dropout,
    DropoutClock,
    KVCache,
    Layer,
    PaddingMask,
    RelativeBias,
    RMSNorm,
    Style,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
    new_norm,
)
from gridformer.models.model import Link, Model, State

StackName = Literal["encoder", "decoder"]


class Stack(nn.Module):
    """Layers and what belongs to them all: dropout before, a norm after where they are pre-norm,
    and a bias of scores where the family has one (t5)."""

    def __init__(
        self,
        config: ModelConfig,
        style: Style,
        clock: DropoutClock,
        name: StackName,
        head_scale: float,
    ) -> None:
        super().__init__()
        decoder = name == "decoder"
        n = config.n_decoder_layers if decoder else config.n_layers
        self.dropout = Dropout(config.dropout, f"{name}.embedding", clock)
        if config.family == "t5":
            std = config.hidden_size**-0.5
            self.bias = RelativeBias(
                config.relative_buckets,
                config.relative_max_distance,
                config.n_heads,
                both_ways=not decoder,
                std=std,
            )
        self.layers = nn.ModuleDict(
            {
                str(i): Layer(
                    config,
                    style,
                    clock,
                    "decoder." if decoder else "encoder.",
                    f"{name}.layers.{i}",
                    causal=decoder,
                    crossed=decoder,
                )
                for i in range(n)
            }
        )
        if config.norm_position == "pre":
            # The encoder's is read by every layer of the decoder.
            reader = "head" if decoder else None
            self.norm = new_norm(style.norm, config.hidden_size, config.norm_eps, reader)
            if decoder and isinstance(self.norm, RMSNorm):
                self.norm.scale = head_scale


class EncoderDecoder(Model):
    """Source [b, S] and tokens [b, s] to logits [b, s, v]. One table embeds both and is the head's.

    head_scale: of the decoder's last norm, where that is an RMSNorm.
    """

    def __init__(
        self, config: ModelConfig, style: Style, embedding_std: float, head_scale: float = 1.0
    ) -> None:
        super().__init__(config)
        self.pre = config.norm_position == "pre"
        self.relative = config.family == "t5"
        self.tokens = TokenEmbedding(config.vocab_size, config.hidden_size, embedding_std)
        self.source_mask, self.mask = PaddingMask(), PaddingMask()
        self.encoder = Stack(config, style, self.clock, "encoder", 1.0)
        self.decoder = Stack(config, style, self.clock, "decoder", head_scale)
        self.head = TiedHead()

    def links(self) -> list[Link]:
        config, ends = self.config, ("norm",) * self.pre
        layer = ("bias",) * self.relative

        def layers(stack: StackName, n: int) -> list[Link]:
            shared = (*(f"{stack}.{name}" for name in layer), "source_mask", "mask")
            run = self._encode if stack == "encoder" else self._decode
            names = [f"{stack}.layers.{i}" for i in range(n)]
            memory: Literal["", "reads"] = "reads" if stack == "decoder" else ""
            return [
                Link(name, partial(run, i), (name, *shared), memory) for i, name in enumerate(names)
            ]

        embedding = ("tokens", *self._positions())
        between = (*(f"encoder.{end}" for end in ends), *embedding, "decoder.dropout")
        last = (*(f"decoder.{end}" for end in ends), "head", "tokens", "loss")
        return [
            Link("embedding", self._embed_source, (*embedding, "encoder.dropout")),
            *layers("encoder", config.n_layers),
            Link("decoder.embedding", self._embed_tokens, between, "makes"),
            *layers("decoder", config.n_decoder_layers),
            Link("head", self._finish, last),
        ]

    def encode(self, batch: Batch) -> Tensor:
        """The encoder's result [b, S, h], for `decode`."""
        state = State()
        for link in self.links()[: self.config.n_layers + 1]:
            link.run(state, batch)
        return self._memory(state)

    def decode(
        self,
        tokens_BS: Tensor,
        memory_BTH: Tensor,
        source_valid_BT: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Logits; with `caches` (one a decoder layer) `tokens_BS` continue at position `start`."""
        batch = {"tokens": tokens_BS}
        if source_valid_BT is not None:
            batch["source_valid"] = source_valid_BT
        state = State(memory=memory_BTH, caches=caches, start=start, logits=True)
        for link in self.links()[self.config.n_layers + 1 :]:
            link.run(state, batch)
        return state.outputs["tokens"]

    def forward(
        self, source_BT: Tensor, tokens_BS: Tensor, source_valid_BT: Tensor | None = None
    ) -> Tensor:
        """Logits; source_valid: which tokens of the source are no padding."""
        batch = {"source": source_BT, "tokens": tokens_BS}
        if source_valid_BT is not None:
            batch["source_valid"] = source_valid_BT
        return self.outputs(batch)["tokens"]

    def _positions(self) -> tuple[str, ...]:
        """Names of the modules that `_embed` needs besides the table."""
        return ()

    def _embed(self, tokens_BS: Tensor, start: int) -> Tensor:
        """The family's own: a vector for each token."""
        raise NotImplementedError

    def _embed_source(self, state: State, batch: Batch) -> None:
        state.x = self.encoder.dropout(self._cast(self._embed(batch["source"], 0)))

    def _embed_tokens(self, state: State, batch: Batch) -> None:
        if state.memory is None:
            state.memory = self._memory(state)
        x = self._embed(batch["tokens"], state.start)
        state.x = self.decoder.dropout(self._cast(x))

    def _memory(self, state: State) -> Tensor:
        memory: Tensor = self.encoder.norm(state.hidden) if self.pre else state.hidden
        return memory

    def _encode(self, i: int, state: State, batch: Batch) -> None:
        layer, mask = self.encoder.layers[str(i)], self._encoder_mask(state, batch)
        state.x = self.recompute.block(layer, state.hidden, mask)

    def _decode(self, i: int, state: State, batch: Batch) -> None:
        state.x = self.recompute.block(
            self.decoder.layers[str(i)],
            state.hidden,
            self._decoder_mask(state, batch),
            state.memory,
            self._memory_mask(state, batch),
            state.caches[i] if state.caches else None,
        )

    def _finish(self, state: State, batch: Batch) -> None:
        self._predict(state, state.hidden)

    def _before_head(self) -> tuple[nn.Module, ...]:
        return (self.decoder.norm,) if self.pre else ()

    # What layers add to their scores, once a stage: see `added_to_scores`.

    def _encoder_mask(self, state: State, batch: Batch) -> Tensor | None:
        size, dtype = batch["source"].shape[1], state.hidden.dtype

        def make() -> Tensor | None:
            bias = self.encoder.bias(size, size) if self.relative else None
            return added_to_scores(size, dtype, self._source_seen(state, batch), bias)

        return state.once("encoder.mask", make)

    def _decoder_mask(self, state: State, batch: Batch) -> Tensor | None:
        size, dtype = batch["tokens"].shape[1], state.hidden.dtype

        def make() -> Tensor | None:
            bias = self.decoder.bias(size, state.start + size) if self.relative else None
            seen = self.mask(batch["valid"]) if "valid" in batch else None
            return added_to_scores(size, dtype, seen, bias, causal=True)

        return state.once("decoder.mask", make)

    def _memory_mask(self, state: State, batch: Batch) -> Tensor | None:
        dtype = state.hidden.dtype
        return state.once(
            "memory.mask", lambda: added_to_scores(1, dtype, self._source_seen(state, batch))
        )

    def _source_seen(self, state: State, batch: Batch) -> Tensor | None:
        if "source_valid" not in batch:
            return None
        return state.once("source_mask", lambda: self.source_mask(batch["source_valid"]))
