"""Families of models, and the section of a run that names one and its size."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gridformer.config.base import Config, any_of, divisors

Family = Literal["gpt2", "bert", "t5", "transformer"]
ENCODER_DECODER: tuple[Family, ...] = ("t5", "transformer")
_ONLY_IN: dict[str, tuple[Family, ...]] = {
    "n_decoder_layers": ENCODER_DECODER,
    "sentence_pair": ("bert",),
    "n_labels": ("gpt2", "bert"),
    "relative_buckets": ("t5",),
    "relative_max_distance": ("t5",),
    "init_std": ("gpt2", "bert"),
}


class ModelConfig(Config):
    """A transformer of one of four families, and its size.

    gpt2: decoder; bert: encoder; t5, transformer: encoder and decoder. Symbols of the
    specification: N = n_layers (of the encoder, where there are two stacks), h = hidden_size,
    n = n_heads, f = ffn_size, v = vocab_size, and max_seq_len is the largest s. Fields that a
    family does not have keep their defaults.
    """

    name: str = "custom"
    family: Family = "gpt2"
    n_layers: int = Field(ge=1)
    n_decoder_layers: int = Field(
        default=0, ge=0, description="of t5 and transformer; 0 means n_layers"
    )
    hidden_size: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    head_dim: int = Field(default=0, ge=0, description="0 means hidden_size / n_heads")
    ffn_size: int = Field(default=0, ge=0, description="0 means 4 times hidden_size")
    vocab_size: int = Field(default=0, ge=0, description="0 means the data's vocabulary")
    max_seq_len: int = Field(default=1024, ge=1)
    norm_position: Literal["auto", "pre", "post"] = Field(
        default="auto",
        description="LayerNorm at the input of each sub-layer, or after its residual; auto: post "
        "for bert and transformer, as published. gpt2 and t5 have pre only",
    )
    sentence_pair: bool = Field(
        default=True, description="bert: a branch that tells whether sentence B follows A"
    )
    n_labels: int = Field(
        default=0, ge=0, description="gpt2, bert: of a classification branch; 0 leaves it out"
    )
    relative_buckets: int = Field(default=32, ge=4, description="t5: of distances of two tokens")
    relative_max_distance: int = Field(default=128, ge=2, description="t5: the last bucket's")
    label_smoothing: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="of the training loss (Vaswani et al. 2017: 0.1)"
    )
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    attention_dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="dropout of attention probabilities; takes the unfused attention path",
    )
    norm_eps: float = Field(default=1e-5, gt=0.0)
    init_std: float = Field(
        default=0.02,
        gt=0.0,
        description="gpt2, bert: of matrices; t5 and transformer go by each matrix's size",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        """What 0 and auto mean, so that a resolved config says it."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        family, hidden = values.get("family", "gpt2"), values.get("hidden_size")
        if not values.get("ffn_size") and isinstance(hidden, int):
            filled["ffn_size"] = 4 * hidden
        if values.get("norm_position", "auto") == "auto":
            filled["norm_position"] = "post" if family in ("bert", "transformer") else "pre"
        if not values.get("n_decoder_layers") and family in ENCODER_DECODER:
            filled["n_decoder_layers"] = values.get("n_layers", 0)
        return filled

    @model_validator(mode="after")
    def _fits_the_family(self) -> Self:
        problems = [
            f"{key}={getattr(self, key)} belongs to family {any_of(families)}, not {self.family}: "
            f"leave it out"
            for key, families in _ONLY_IN.items()
            if self.family not in families
            and getattr(self, key) != type(self).model_fields[key].default
        ]
        if self.norm_position == "post" and self.family in ("gpt2", "t5"):
            problems.append(f"norm_position=post: {self.family} normalizes inputs; use pre")
        if self.family == "t5" and self.relative_max_distance <= self.relative_buckets // 2:
            problems.append(
                f"relative_max_distance={self.relative_max_distance}: the first half of "
                f"relative_buckets={self.relative_buckets} holds one distance each; use "
                f"relative_max_distance={self.relative_buckets // 2 + 1} or more"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if not self.head_dim and self.hidden_size % self.n_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of n_heads={self.n_heads}: use "
                f"n_heads {any_of(divisors(self.hidden_size))}, or set head_dim"
            )
        return self

    @property
    def head_width(self) -> int:
        """d: head_dim, or what it is by default."""
        return self.head_dim or self.hidden_size // self.n_heads

    @property
    def two_stacks(self) -> bool:
        """An encoder and a decoder."""
        return self.family in ENCODER_DECODER

    @property
    def n_links(self) -> int:
        """Steps that a pipeline can be cut between: layers, embeddings and the head."""
        if self.two_stacks:
            return self.n_layers + self.n_decoder_layers + 3
        return self.n_layers + 2
