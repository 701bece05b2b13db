"""Encoder-decoder families, T5 and the original Transformer."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import (
    AttendingRows,
    Dropout,
    DropoutRng,
    KVCache,
    PaddingMask,
    RelativeBias,
    RMSNorm,
    ScoreBias,
    SinusoidalPositions,
    Spread,
    Style,
    StyledLayer,
    TiedHead,
    TokenEmbedding,
    added_to_scores,
    document_bounds,
    new_norm,
)
from gridformer.models.model import Activations, Link, Model, build_layers
from gridformer.utils.batch import Batch

StackName = Literal["encoder", "decoder"]


class Stack(nn.Module):
    """The encoder's or decoder's layers, and the modules around them.

    These are dropout before the first layer, a norm after the last one if the layers are pre-norm,
    and a relative bias of attention scores in the family t5.
    """

    def __init__(
        self,
        config: ModelConfig,
        style: Style,
        dropout_rng: DropoutRng,
        name: StackName,
        head_scale: float,
    ) -> None:
        super().__init__()
        decoder = name == "decoder"
        n = config.n_decoder_layers if decoder else config.n_layers
        self.dropout = Dropout(config.dropout, f"{name}.embedding", dropout_rng)
        if config.family == "t5":
            buckets, furthest = config.relative_buckets, config.relative_max_distance
            std = config.hidden_size**-0.5
            self.bias = RelativeBias(buckets, furthest, config.n_heads, not decoder, std)
        self.layers = build_layers(
            f"{name}.layers",
            n,
            lambda site: StyledLayer(config, style, dropout_rng, site, causal=decoder),
        )
        if config.norm_position == "pre":
            # Every decoder layer reads the encoder's norm. The head may be all that reads the
            # decoder's.
            reader = "head" if decoder and config.only_token_head else None
            self.norm = new_norm(style.norm, config.hidden_size, config.norm_eps, reader)
            if decoder and isinstance(self.norm, RMSNorm):
                self.norm.scale = head_scale


class EncoderDecoder(Model):
    """Maps source [b, S] and tokens [b, s] to logits [b, s, v], and t5 to those of its branches.

    They are those of `GPT2`. One table embeds source and tokens, and the head shares it.

    Args:
        embedding_std: The standard deviation with which the table is initialized.
        head_scale: A factor on the decoder's last norm, if that is an RMSNorm.
    """

    position_modules: tuple[str, ...] = ()  # the modules that `embed` runs besides `tokens`

    def __init__(
        self, config: ModelConfig, style: Style, embedding_std: float, head_scale: float = 1.0
    ) -> None:
        super().__init__(config)
        self.pre = config.norm_position == "pre"
        self.relative = config.family == "t5"
        self.tokens = TokenEmbedding(config.vocab_size, config.hidden_size, embedding_std)
        self.source_mask, self.mask, self.rows = PaddingMask(), PaddingMask(), AttendingRows()
        self.encoder = Stack(config, style, self.dropout_rng, "encoder", 1.0)
        self.decoder = Stack(config, style, self.dropout_rng, "decoder", head_scale)
        self.head = TiedHead()
        self._add_heads(config.hidden_size**-0.5)

    def forward(
        self, source_BT: Tensor, tokens_BS: Tensor, source_valid_BT: Tensor | None = None
    ) -> Tensor:
        """Computes logits [b, s, v]."""
        batch = {"source": source_BT, "tokens": tokens_BS}
        if source_valid_BT is not None:
            batch["source_valid"] = source_valid_BT
        return self.token_logits(self.hidden(batch))

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        hidden, memory = Activations.taken(entering)
        links = self._link_names() if links is None else links
        encoder, decoder = self.encoder, self.decoder
        encoder_layers = self._layers(encoder.layers, "encoder.layers", links)
        decoder_layers = self._layers(decoder.layers, "decoder.layers", links)
        seen = pairs = None  # which tokens of the source are not padding, or whose pair they are
        if (encoder_layers or decoder_layers) and "source_documents" in batch:
            pairs = self.rows(batch["source_documents"])  # padding has a number of its own
        elif (encoder_layers or decoder_layers) and "source_valid" in batch:
            seen = self.source_mask(batch["source_valid"])

        if "embedding" in links:
            source, positions = batch["source"], batch.get("source_positions")
            hidden = encoder.dropout(self._cast(self.embed(source, 0, positions)))

        if encoder_layers:
            length = self.length(batch["source"])

            def in_source(queries: slice) -> ScoreBias | None:
                n, within = queries.stop - queries.start, None
                bias = encoder.bias(n, length, queries.start) if self.relative else None
                if pairs is not None:
                    within = self.sequence.document_bounds(pairs, queries, length)
                fused = self.fused
                return added_to_scores(n, hidden.dtype, seen, bias, fused=fused, documents=within)

            mask = self.sequence.each_segment(length, in_source)
        for _, layer in encoder_layers:
            hidden = self.recompute.block(layer, hidden, mask)

        if "decoder.embedding" in links:
            if memory is None:  # `decode` passes the memory in
                memory = self._memory_of(hidden)
            tokens, positions = batch["tokens"], batch.get("positions")
            hidden = decoder.dropout(self._cast(self.embed(tokens, start, positions)))

        if decoder_layers:
            fused = self.fused and not caches
            s, dtype = self.length(batch["tokens"]), hidden.dtype
            valid = self.mask(batch["valid"]) if "valid" in batch else None
            of_tokens = None if pairs is None else self.rows(batch["documents"])

            def in_target(queries: slice) -> ScoreBias | None:
                n, keys, within = queries.stop - queries.start, start + queries.stop, None
                bias = decoder.bias(n, keys, start + queries.start) if self.relative else None
                if of_tokens is not None:
                    within = self.sequence.document_bounds(of_tokens, queries, keys)
                here = None if valid is None else valid[..., :keys]
                return added_to_scores(n, dtype, here, bias, True, fused, documents=within)

            def to_source(queries: slice) -> ScoreBias | None:
                n, across = queries.stop - queries.start, None
                if of_tokens is not None:
                    across = document_bounds(of_tokens[:, queries], pairs)
                return added_to_scores(n, dtype, seen, fused=fused, documents=across)

            mask = self.sequence.each_segment(s, in_target)
            memory_mask = self.sequence.each_segment(s, to_source)
        for i, layer in decoder_layers:
            cache = caches[i] if caches else None
            hidden = self.recompute.block(layer, hidden, mask, cache, memory, memory_mask)

        return Activations(hidden, memory)

    def before_head(self) -> tuple[nn.Module, ...]:
        return (self.decoder.norm,) if self.pre else ()

    def embed(self, tokens_BS: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        """Embeds tokens; each family does so in its own way.

        Args:
            start: The position of the first token of each row.
            positions: The position of each token [b, s], where several documents lie in one row;
                None counts on from `start`.
        """
        raise NotImplementedError

    def _memory_of(self, hidden_BTH: Tensor) -> Tensor:
        """Returns the encoder's output [b, S, h], given its last hidden states."""
        memory: Tensor = self.encoder.norm(hidden_BTH) if self.pre else hidden_BTH
        return memory

    # ------------------------------------------------------------------ for generation

    def encode(self, batch: Batch) -> Tensor:
        """Runs the encoder and returns its output [b, S, h], for `decode`."""
        links = self._link_names()[: self.config.n_layers + 1]
        hidden = self.run(batch, links=links).hidden
        assert hidden is not None
        return self._memory_of(hidden)

    def decode(
        self,
        tokens_BS: Tensor,
        memory_BTH: Tensor,
        source_valid_BT: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Runs the decoder and computes logits [b, s, v]; for the arguments see `run`.

        `source_valid_BT` is False where a source token is padding [b, S].
        """
        batch = {"tokens": tokens_BS}
        if source_valid_BT is not None:
            batch["source_valid"] = source_valid_BT
        links = self._link_names()[self.config.n_layers + 1 :]
        hidden = self.run(batch, Activations(memory=memory_BTH), links, caches, start).hidden
        assert hidden is not None
        return self.token_logits(hidden)

    # ------------------------------------------------------------------ for pipelines

    def links(self) -> list[Link]:
        config, norm, bias = self.config, self.pre, self.relative
        embedding = ("tokens", *self.position_modules)
        between = (*("encoder.norm",) * norm, *embedding, "decoder.dropout")
        words = ("head", *("tokens",) * config.token_head, "loss")
        head = (*("decoder.norm",) * norm, *words, *self._branch_modules())

        def layer(stack: StackName, i: int) -> Link:
            shared = (*(f"{stack}.bias",) * bias, "source_mask", "mask", "rows")
            name = f"{stack}.layers.{i}"
            return Link(name, (name, *shared), "reads" if stack == "decoder" else "")

        return [
            Link("embedding", (*embedding, "encoder.dropout")),
            *(layer("encoder", i) for i in range(config.n_layers)),
            Link("decoder.embedding", between, "makes"),
            *(layer("decoder", i) for i in range(config.n_decoder_layers)),
            Link("head", head),
        ]


class T5(EncoderDecoder):
    """T5 as first released (Raffel et al. 2020): RMSNorm, relative positions, no biases, ReLU.

    Attention scores are not scaled; the query matrices are initialized with a smaller std instead.
    The head shares the embedding's table and multiplies its input by h^-1/2. The heads of
    fine-tuning do not.
    """

    def __init__(self, config: ModelConfig) -> None:
        h, f = config.hidden_size, config.ffn_size
        d, inner = config.head_width, config.n_heads * config.head_width
        spread = Spread((h * d) ** -0.5, h**-0.5, h**-0.5, inner**-0.5, h**-0.5, f**-0.5)
        style = Style(spread, "relu", norm="rms", bias=False, scaled=False)
        head_scale = h**-0.5 if config.token_head else 1.0
        super().__init__(config, style, embedding_std=1.0, head_scale=head_scale)

    def embed(self, tokens_BS: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(tokens_BS)
        return x


class Transformer(EncoderDecoder):
    """The original Transformer (Vaswani et al. 2017): post-LayerNorm, sinusoids.

    One table, scaled by h^1/2, embeds source and target; the head shares it (section 3.4).

    Matrices are initialized from a normal distribution with std = (2 / (in + out))^1/2 (Glorot and
    Bengio 2010).
    """

    position_modules = ("positions",)

    def __init__(self, config: ModelConfig) -> None:
        h, f, inner = config.hidden_size, config.ffn_size, config.n_heads * config.head_width
        attention, feed_forward = math.sqrt(2 / (h + inner)), math.sqrt(2 / (h + f))
        spread = Spread(*[attention] * 4, *[feed_forward] * 2)
        super().__init__(config, Style(spread, "relu"), embedding_std=h**-0.5)
        self.positions = SinusoidalPositions(h)

    def embed(self, tokens_BS: Tensor, start: int, positions: Tensor | None = None) -> Tensor:
        x: Tensor = self.tokens(tokens_BS) * math.sqrt(self.config.hidden_size)
        waves: Tensor = self.positions(self.length(tokens_BS), start, x, positions)
        return x + waves
