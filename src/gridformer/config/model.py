"""The `model` section of a run: a model family and the sizes of the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gridformer.config.base import Config, any_of, divisors
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.files import UnreadableError, read_text
from gridformer.utils.units import MIB, MOST_LAYERS, MOST_TOKENS, WIDEST

Family = Literal["gpt2", "bert", "t5", "transformer", "llama", "network"]
ENCODER_DECODER: tuple[Family, ...] = ("t5", "transformer")
_ONLY_IN: dict[str, tuple[Family, ...]] = {
    "n_decoder_layers": ENCODER_DECODER,
    "sentence_pair": ("bert",),
    "n_labels": ("gpt2", "bert", "t5", "llama"),
    "span_head": ("gpt2", "bert", "t5", "llama"),
    "token_head": ("gpt2", "bert", "t5", "llama"),
    "relative_buckets": ("t5",),
    "relative_max_distance": ("t5",),
    "init_std": ("gpt2", "bert", "llama"),
    "n_kv_heads": ("llama", "network"),
    "rope_theta": ("llama",),
    "rope_scaling": ("llama",),
    "qkv_bias": ("llama",),
    "qk_norm": ("llama",),
    "qk_norm_over": ("llama",),
    "window": ("llama",),
    "n_experts": ("llama",),
    "tied_head": ("llama", "network"),
    "folder": ("network",),
    "factory": ("network",),
    "plan": ("network",),
}
_OF_EXPERTS = (
    *("experts_per_token", "expert_size", "shared_size", "dense_layers", "router", "router_bias"),
    *("normalized_gates", "routed_scale", "balance_loss", "z_loss", "balance_rate"),
)
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")


class RopeScaling(Config):
    """How rotary positions are changed for longer sequences than those of the first training.

    Keys and defaults are those of Hugging Face's `rope_scaling`, whose `rope_type` is `kind` here.
    """

    kind: Literal["linear", "llama3", "yarn"]
    """All frequencies are divided by factor (linear), or low frequencies are (llama3, as in Llama
    3.1, and yarn)."""
    factor: float = Field(ge=1.0)
    """Sequences may be longer by about this factor."""
    original_max_position_embeddings: int = Field(default=0, ge=0)
    """For llama3 and yarn, the first training had sequences of this length."""
    low_freq_factor: float = Field(default=1.0, gt=0.0)
    """For llama3, frequencies below this number of turns in the original length are divided by
    factor."""
    high_freq_factor: float = Field(default=4.0, gt=0.0)
    """For llama3, frequencies above this number of turns in the original length are kept."""
    attention_factor: float | None = Field(default=None, gt=0.0)
    """For yarn, rotated queries and keys are multiplied by this; the default is 0.1 ln(factor) +
    1."""
    beta_fast: float = Field(default=32.0, gt=0.0)
    """For yarn, frequencies of at least this number of turns in the original length are kept."""
    beta_slow: float = Field(default=1.0, gt=0.0)
    """For yarn, frequencies of at most this number of turns in the original length are divided by
    factor."""
    truncate: bool = True
    """For yarn, true rounds the borders of the interpolated frequencies outward."""

    def _problems(self) -> Iterator[str]:
        others = {"linear": (_LENGTH, *_LLAMA3, *_YARN), "llama3": _YARN, "yarn": _LLAMA3}[
            self.kind
        ]
        for key in others:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                yield f"{key}={value} does not belong to kind={self.kind}: leave it out"
        if self.kind != "linear" and not self.original_max_position_embeddings:
            yield (
                f"kind={self.kind} needs original_max_position_embeddings, the length of sequences "
                "in the first training, such as 8192"
            )
        if self.low_freq_factor >= self.high_freq_factor:
            yield (
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.beta_slow >= self.beta_fast:
            yield (f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")

    @property
    def attention(self) -> float:
        """The factor of rotated queries and keys, which is `attention_factor` or its default."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor


class Patterns(dict[str, str]):
    """Roles by patterns of names; a mapping that nobody changes."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _patterns(plan: Any) -> Any:
    """Returns a plan, which may be in a YAML file."""
    if not isinstance(plan, str | Path):
        return plan
    from gridformer.config.reading import read_yaml

    try:
        return read_yaml(Path(plan), "patterns of names") if plan else {}
    except ConfigError as error:
        raise ValueError(str(error)) from None


class ModelConfig(Config):
    """A transformer of one of five families, or any network of tokens, and its sizes.

    gpt2 and llama are decoders, bert is an encoder, and t5 and transformer are encoder-decoder
    models. llama stands for Llama, Mistral, Qwen2 and Qwen3. In the documentation's symbols N is
    n_layers (of the encoder, for encoder-decoder models), h is hidden_size, n is n_heads, f is
    ffn_size, v is vocab_size, and max_seq_len is the largest s. Keys that a family does not have
    must keep their defaults.
    """

    name: str = "custom"
    """A run file may name a shipped model, whose values are used where the file sets none, or give
    a model any other name."""
    family: Family = "gpt2"
    """The family determines the architecture of the model; network is what `folder` holds, or what
    `factory` returns."""
    folder: str = ""
    """A Hugging Face folder holds the network, as its config.json says, with its weights if there
    are any, and otherwise with new ones. The other keys of this section are read from there. No
    code in it is run, and its rates of dropout are not used."""
    factory: str = ""
    """A function without arguments, package.module:function, returns the network, or a tuple of it,
    inputs and its plan. It is imported from the current directory or installed packages, and never
    from the folder of a run. Sizes that the network does not tell must be given."""
    plan: Annotated[dict[str, str], BeforeValidator(_patterns), AfterValidator(Patterns)] = Field(
        default={}
    )
    """Roles by patterns of names shard the network, given here or in a YAML file. The default is
    the plan that comes with the network."""
    n_layers: int = Field(ge=1, le=MOST_LAYERS)
    """The model has this number of layers, or for t5 and transformer this number of encoder
    layers."""
    n_decoder_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """t5 and transformer have this number of decoder layers; 0 means n_layers."""
    hidden_size: int = Field(ge=1, le=WIDEST)
    """The residual stream has this width (h)."""
    n_heads: int = Field(ge=1, le=WIDEST)
    """Each layer has this number of attention heads (n)."""
    n_kv_heads: int = Field(default=0, ge=0, le=WIDEST)
    """For llama, each layer has this number of key/value heads (m), which n / m attention heads
    share; 0 means n_heads."""
    head_dim: int = Field(default=0, ge=0, le=WIDEST)
    """Each attention head has this width; 0 means hidden_size / n_heads."""
    ffn_size: int = Field(default=0, ge=0, le=WIDEST)
    """The feed-forward layers have this inner width (f); 0 means 4 times hidden_size."""
    vocab_size: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """The vocabulary has this number of tokens (v); 0 means the vocabulary of the data."""
    max_seq_len: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """The model reads sequences of at most this number of tokens."""
    norm_position: Literal["auto", "pre", "post"] = "auto"
    """Normalization is applied at the input of each sub-layer (pre) or after the residual addition
    (post). auto means post for bert and transformer, as published; gpt2, t5 and llama support only
    pre."""
    sentence_pair: bool = True
    """For bert, true adds a head that predicts whether sentence B follows sentence A."""
    n_labels: int = Field(default=0, ge=0, le=WIDEST)
    """The model gets a classification head with this number of labels, which t5 has only with
    token_head=false; 0 means that there is no such head. transformer has none."""
    span_head: bool = False
    """true adds a head that tells where an answer begins and ends, which transformer cannot have;
    data.task=answer sets it."""
    token_head: bool = True
    """false leaves out the head that predicts tokens, for models that are fine-tuned;
    data.task=classify, regression, choice and answer set it."""
    relative_buckets: int = Field(default=32, ge=4, le=WIDEST)
    """For t5, the distances between tokens are grouped into this number of buckets."""
    relative_max_distance: int = Field(default=128, ge=2, le=MOST_TOKENS)
    """For t5, all distances from this one on share the last bucket."""
    rope_theta: float = Field(default=10000.0, gt=1.0)
    """For llama, the wavelengths of rotary positions grow with this base."""
    rope_scaling: RopeScaling | None = None
    """For llama, rotary positions are changed for sequences that are longer than those of the first
    training; leave it out for none."""
    qkv_bias: bool = False
    """For llama, true adds biases to queries, keys and values (Qwen2)."""
    qk_norm: bool = False
    """For llama, true normalizes each head's queries and keys (Qwen3)."""
    qk_norm_over: Literal["head", "all"] = "head"
    """With qk_norm, queries and keys are normalized head by head, or over all heads together
    (OLMoE)."""
    window: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """For llama, a token attends to this number of tokens at most, itself included (Mistral's
    sliding window); 0 means all tokens before it."""
    n_experts: int = Field(default=0, ge=0, le=WIDEST)
    """For llama, the feed-forward of a layer has this number of routed experts (E), of which each
    token passes `experts_per_token`; 0 means an ordinary feed-forward."""
    experts_per_token: int = Field(default=0, ge=0, le=WIDEST)
    """With experts, each token passes this number of them (k)."""
    expert_size: int = Field(default=0, ge=0, le=WIDEST)
    """With experts, each of them has this inner width; 0 means ffn_size."""
    shared_size: int = Field(default=0, ge=0, le=WIDEST)
    """With experts, all tokens also pass a feed-forward of this inner width, the shared experts
    (DeepSeek); 0 means none."""
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """With experts, this number of layers, the first ones, have an ordinary feed-forward."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """With experts, the scores of a token are the softmax of the router's logits, or the sigmoid of
    each of them (DeepSeek-V3)."""
    router_bias: bool = False
    """With experts, true chooses them by their scores plus a bias (DeepSeek-V3), which after every
    step rises by `balance_rate` for experts with fewer tokens than the average, and falls for those
    with more. It changes no weight of a result."""
    balance_rate: float = Field(default=1e-3, ge=0.0)
    """With router_bias, it changes by this much in each step; 0 never changes it."""
    normalized_gates: bool = True
    """With experts, the weights of the experts of a token are divided by their sum."""
    routed_scale: float = Field(default=1.0, gt=0.0)
    """With experts, these weights are multiplied by this number."""
    balance_loss: float = Field(default=0.0, ge=0.0)
    """With experts, this times E times the sum over experts of (their share of tokens x their mean
    probability) is minimized too (Fedus et al. 2021), for the tokens of the global batch in all
    layers. With several micro-batches or stages, a step then begins with a forward pass that counts
    tokens."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """With experts, this times the mean square of the logarithm of the router's sums of
    exponentials is minimized, too (Zoph et al. 2022)."""
    tied_head: bool = True
    """For llama, true uses the table of the embedding as the weight of the head, and false gives
    the head a weight of its own. Other families are always tied."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The training loss smooths labels by this amount (0.1 in Vaswani et al. 2017)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout zeroes elements of embeddings and sub-layer outputs with this probability."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout zeroes attention probabilities with this probability. A value above 0 uses the
    unfused attention path, except on GPUs with train.kernels=fused."""
    norm_eps: float = Field(default=1e-5, gt=0.0)
    """Normalization adds this constant to the variance (for t5 and llama, to the mean square)."""
    init_std: float = Field(default=0.02, gt=0.0)
    """For gpt2, bert and llama, initial weight matrices have this standard deviation. t5 and
    transformer derive it from the size of each matrix."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        """Replaces 0 and auto by what they mean, so that a resolved config states the values."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        if values.get("folder"):
            sizes = sizes_of_folder(str(values["folder"]))
            filled = values = {**sizes, **values, "folder": sizes["folder"]}
        elif values.get("factory"):
            filled = values = {"family": "network", **_told(values), **values}
        family, hidden = values.get("family", "gpt2"), values.get("hidden_size")
        if not values.get("ffn_size") and isinstance(hidden, int):
            filled["ffn_size"] = 4 * hidden
        if values.get("norm_position", "auto") == "auto":
            filled["norm_position"] = "post" if family in ("bert", "transformer") else "pre"
        if values.get("n_experts") and not values.get("expert_size"):
            filled["expert_size"] = filled.get("ffn_size", 0)
        if not values.get("n_decoder_layers") and family in ENCODER_DECODER:
            filled["n_decoder_layers"] = values.get("n_layers", 0)
        return filled

    def _problems(self) -> Iterator[str]:
        for key, families in _ONLY_IN.items():
            value = getattr(self, key)
            if self.family not in families and value != type(self).model_fields[key].default:
                yield (
                    f"{key}={value} belongs to family {any_of(families)}, not {self.family}: leave "
                    "it out"
                )
        if self.family == "network":
            yield from self._folder_problems()
        yield from self._expert_problems()
        if self.norm_position == "post" and self.family in ("gpt2", "t5", "llama"):
            yield (f"norm_position=post: {self.family} normalizes inputs; use pre")
        if self.family == "t5" and self.token_head and (self.n_labels or self.span_head):
            key = f"n_labels={self.n_labels}" if self.n_labels else "span_head=true"
            yield (f"{key}: t5 has this head only with token_head=false; set both")
        if self.family == "t5" and self.relative_max_distance <= self.relative_buckets // 2:
            yield (
                f"relative_max_distance={self.relative_max_distance}: the first half of "
                f"relative_buckets={self.relative_buckets} holds one distance each; use "
                f"relative_max_distance={self.relative_buckets // 2 + 1} or more"
            )

        if not self.head_dim and self.hidden_size % self.n_heads:
            yield (
                f"hidden_size={self.hidden_size} is not a multiple of n_heads={self.n_heads}: use "
                f"n_heads {any_of(divisors(self.hidden_size))}, or set head_dim"
            )
        elif self.n_heads * self.head_width > WIDEST:
            yield (
                f"n_heads={self.n_heads} of head_dim={self.head_width} are wider than {WIDEST} "
                f"together: use head_dim={WIDEST // self.n_heads} or less"
            )
        if self.n_kv_heads and self.n_heads % self.n_kv_heads:
            yield (
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}: use "
                f"n_kv_heads={any_of(divisors(self.n_heads))}"
            )
        elif self.family == "llama" and self.head_width % 2:
            yield (
                f"rotary positions rotate pairs of features, and a head has {self.head_width}: use "
                f"head_dim={self.head_width + 1}"
            )

    def _expert_problems(self) -> Iterator[str]:
        k, n = self.experts_per_token, self.n_experts
        for key in _OF_EXPERTS if not n else ():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                yield f"{key}={value} belongs to models with n_experts: leave it out"
        if n and not 1 <= k <= n:
            yield (
                f"experts_per_token={k}: a token passes at least 1 of n_experts={n}, and at most "
                f"all of them: use experts_per_token={min(max(k, 1), n)}"
            )
        if n and self.dense_layers >= self.n_layers:
            yield (
                f"dense_layers={self.dense_layers} leaves none of n_layers={self.n_layers} with "
                f"experts: use dense_layers={self.n_layers - 1} or less"
            )
        if self.balance_loss and self.router == "sigmoid" and self.router_bias:
            yield (
                f"balance_loss={self.balance_loss} and router_bias=true both balance experts: "
                "leave one of them out"
            )

    def _folder_problems(self) -> Iterator[str]:
        if bool(self.folder) == bool(self.factory):
            yield (
                "family=network: what is the network? Use folder=PATH, a Hugging Face folder, or "
                "factory=package.module:function"
            )
            return
        for key, value in sizes_of_folder(self.folder).items() if self.folder else ():
            if getattr(self, key) != value and key != "max_seq_len":
                yield f"{key}={getattr(self, key)}: {self.folder} has {key}={value}; leave it out"

    @property
    def head_width(self) -> int:
        """The width d of one head: head_dim, or its default hidden_size / n_heads."""
        return self.head_dim or self.hidden_size // self.n_heads

    @property
    def outline(self) -> ModelConfig:
        """A model of gridformer with the products of this one, by which layouts are estimated.

        A network is taken for a llama of its sizes. What is predicted, and not only ranked, comes
        from its own code.
        """
        changes: dict[str, Any] = {"family": "llama", "norm_position": "pre"}
        changes |= {"folder": "", "factory": "", "plan": Patterns()}
        return self.model_copy(update=changes) if self.family == "network" else self

    @property
    def kv_heads(self) -> int:
        """The number m of key/value heads: n_kv_heads, or its default n_heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate, which is a third matrix."""
        return self.family in ("llama", "network")

    @property
    def pooled_labels(self) -> bool:
        """Whether the classification head has a pooler, which hidden states of tokens pass first.

        Decoders have one beside the head that predicts tokens, and none without it.
        """
        return bool(self.n_labels) and (self.family in ("bert", "t5") or self.token_head)

    @property
    def only_token_head(self) -> bool:
        """Whether the head that predicts tokens is the only one."""
        return self.token_head and not self.n_labels and not self.span_head

    def ffn_widths(self, experts: int) -> int:
        """The inner widths of the feed-forwards of all layers, those of an encoder of two stacks.

        `experts` of a mixture of experts count, such as those that a token passes.
        """
        mixed = self.n_layers - self.dense_layers if self.n_experts else 0
        width = experts * self.expert_size + self.shared_size
        return (self.n_layers - mixed) * self.ffn_size + mixed * width

    @property
    def matrix_elements(self) -> int:
        """The elements of all matrices [n, m] of the model but not of positions and small heads.

        These are nearly all of its parameters.
        """
        n, attention = self.n_layers, 2 * (self.n_heads + self.kv_heads) * self.head_width
        widths = self.ffn_widths(self.n_experts)
        if self.two_stacks:  # whose decoder has cross-attention, too
            n, widths = (
                n + 2 * self.n_decoder_layers,
                widths + self.n_decoder_layers * self.ffn_size,
            )
        elements = self.hidden_size * (n * attention + (2 + self.gated) * widths)
        return elements + self.n_tables * self.vocab_size * self.hidden_size

    @property
    def n_tables(self) -> int:
        """The number of tables [v, h]: that of the embedding, and of the head if it has its own."""
        return 1 if self.tied_head else 2

    @property
    def two_stacks(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return self.family in ENCODER_DECODER

    @property
    def n_links(self) -> int:
        """The number of links between which a pipeline can be cut: layers, embeddings and head."""
        if self.two_stacks:
            return self.n_layers + self.n_decoder_layers + 3
        return self.n_layers + 2


# --------------------------------------------------------------------------- networks of others

# Keys of `model`, and the names that config.json has for them in one architecture or another.
_SIZES = {
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_NEEDED = ("n_layers", "hidden_size", "n_heads", "vocab_size")


def sizes_of_folder(folder: str) -> dict[str, Any]:
    """Returns the values of `model` for the network in a folder.

    Raises:
        ValueError: The folder has no config.json, or that does not say how large the network is.
    """
    path = Path(folder) / "config.json"
    try:
        values = json.loads(read_text(path, MIB))
    except (UnreadableError, ValueError) as error:
        raise ValueError(f"folder={folder} has no config.json that can be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"folder={folder}: its config.json is not a mapping")
    sizes = _sizes_in(values)
    if missing := [key for key in _NEEDED if key not in sizes]:
        said = ", ".join(_SIZES[key][0] for key in missing)
        raise ValueError(
            f"folder={folder}: its config.json has no {said}: gridformer prove and "
            "gridformer.parallelize take networks that are no language models"
        )
    return {"family": "network", "folder": str(Path(folder).resolve()), **sizes}


def _sizes_in(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `model` that a config of transformers tells."""
    sizes: dict[str, Any] = {}
    for key, names in _SIZES.items():
        numbers = [values[name] for name in names if isinstance(values.get(name), int)]
        if numbers and not isinstance(numbers[0], bool) and numbers[0] > 0:
            sizes[key] = numbers[0]
    if isinstance(chosen := values.get("num_experts_per_tok"), int):
        # Estimates count what a token takes: its experts, and those that all tokens share.
        each = values.get("moe_intermediate_size") or sizes.get("ffn_size", 0)
        shared = each * (values.get("n_shared_experts") or 0)
        shared = values.get("shared_expert_intermediate_size") or shared
        sizes["ffn_size"] = chosen * each + shared
    return {**sizes, "tied_head": values.get("tie_word_embeddings", True)}


def _told(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `model` that a function's network tells.

    It is not called where all that is needed is given, as in what is read of a run.
    """
    if "plan" in values and all(values.get(key) for key in _NEEDED):
        return {}
    from gridformer.config import factory

    name = str(values["factory"])
    try:
        made = factory.on_meta(name)
        plan = _patterns(values.get("plan")) or made.plan or {}
        plan = plan if isinstance(plan, Mapping) else {}
        config: Any = getattr(made.module, "config", None)
        of_transformers = hasattr(config, "to_dict")
        sizes = _sizes_in(config.to_dict()) if of_transformers else factory.sizes_of(name, plan)
    except UserError as error:
        raise ValueError(f"factory={error}") from None
    if missing := [key for key in _NEEDED if not (sizes | values).get(key)]:
        raise ValueError(f"factory={name}: the network does not tell {any_of(missing)}: set it")
    for key in {*_NEEDED[1:]} & sizes.keys() & values.keys():
        if values[key] != sizes[key]:
            raise ValueError(f"{key}={values[key]}: {name} has {key}={sizes[key]}; leave it out")
    return {**sizes, "plan": plan}
