"""Small models of Hugging Face with random weights, and ours with the same weights."""

import os

# must be set before transformers is imported; nothing is downloaded
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.convert.table import TableEntry
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel

transformers: Any = pytest.importorskip("transformers")

V, S = 211, 24  # words; the length of BERT's sequences
_LLAMA = {"family": "llama", "n_layers": 2, "n_kv_heads": 2, "ffn_size": 80, "max_seq_len": 64}
_LLAMA |= {"norm_eps": 1e-6, "tied_head": False}
# Our config of each kind, besides the sizes that all have.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "n_layers": 3, "max_seq_len": 32},
    "bert": {"family": "bert", "n_layers": 3, "max_seq_len": S, "norm_eps": 1e-12},
    "t5": {
        **{"family": "t5", "n_layers": 2, "n_decoder_layers": 3},
        **{"max_seq_len": 64, "norm_eps": 1e-6},
    },
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "window": 5},
    "qwen2": {**_LLAMA, "qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_norm": True},
}
LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
_HEADS = {"gpt2": "LMHeadModel", "bert": "ForPreTraining", "t5": "ForConditionalGeneration"}
# Their name of each setting, and ours.
_USUAL = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_NAMES = {
    "gpt2": {**{"vocab_size": "vocab_size", "n_positions": "max_seq_len", "n_embd": "hidden_size"},
        **{"n_layer": "n_layers", "n_head": "n_heads", "n_inner": "ffn_size"},
        "layer_norm_epsilon": "norm_eps"},
    "bert": {**_USUAL, "layer_norm_eps": "norm_eps"},
    "t5": {**{"vocab_size": "vocab_size", "d_model": "hidden_size", "d_kv": "head_width"},
        **{"d_ff": "ffn_size", "num_layers": "n_layers", "num_heads": "n_heads"},
        "num_decoder_layers": "n_decoder_layers",
        "relative_attention_num_buckets": "relative_buckets",
        "relative_attention_max_distance": "relative_max_distance",
        "layer_norm_epsilon": "norm_eps"},
}  # fmt: skip
_OF_LLAMAS = {
    **_USUAL,
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_width",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_head",
}
_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_function": "gelu_new", "attn_implementation": "eager"},
    "bert": {"hidden_act": "gelu", "pad_token_id": None, "attn_implementation": "eager"},
    "t5": {
        **{"feed_forward_proj": "relu", "tie_word_embeddings": True, "dropout_rate": 0.0},
        **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    },
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def randomize(model: Any, dtype: torch.dtype, spread: float = 0.2) -> Any:
    """Draw weights, biases and norms with a spread that makes every part matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(mean + spread * noise)
    return model.to(dtype).eval()


def config_of(kind: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 48, "n_heads": 4, "vocab_size": V}
    return ModelConfig(**{**sizes, **CONFIGS[kind], **changes})


def class_of(kind: str, head: str) -> Any:
    """Return a class of transformers, such as BertForPreTraining."""
    prefix = kind.upper() if kind in ("gpt2", "t5") else kind.capitalize()
    return getattr(transformers, f"{prefix}{head}")


def hugging_face(kind: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Return their model.

    In float64 Llama's norms and rotations, which it computes in float32 for any type, are replaced
    by the same in float64. Angles stay rounded to float32, as ours do.
    """
    names = _NAMES.get(kind, _OF_LLAMAS)
    values = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    values |= _FIXED[kind] if kind in _FIXED else _of_llama(kind, config)
    theirs = class_of(kind, _HEADS.get(kind, "ForCausalLM"))(class_of(kind, "Config")(**values))
    model = randomize(theirs, dtype)
    return widened(model) if kind in LLAMAS and dtype == torch.float64 else model


def _of_llama(kind: str, config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= scaling.model_dump(exclude_defaults=True, exclude={"kind"})
        rope["rope_type"] = scaling.kind
        if scaling.kind == "llama3":  # theirs have no defaults
            rope |= {key: getattr(scaling, key) for key in ("low_freq_factor", "high_freq_factor")}
    # the eager attention computes softmax in float32 for any type
    values: dict[str, Any] = {"rope_parameters": rope, "attn_implementation": "sdpa"}
    if kind == "mistral":
        values["sliding_window"] = config.window or None
    elif config.window:  # of Qwen2 and Qwen3, in layers from max_window_layers on
        values |= {"sliding_window": config.window, "max_window_layers": 0}
        values["use_sliding_window"] = True
    return values


def widened(model: Any) -> Any:
    """Let norms and rotations of a model of theirs compute in float64, and return it."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.forward = _norm_of(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _rotation_of(module)
    return model


def _norm_of(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        out: Tensor = module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))
        return out

    return forward


def _rotation_of(module: Any) -> Any:
    # Conversion to float64 has converted the frequencies, but their values are those of float32.
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None].float() * module.inv_freq.float()).double()
        angles, factor = torch.cat((angles, angles), -1), module.attention_scaling
        return angles.cos() * factor, angles.sin() * factor

    return forward


def pair(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """Return a small model of ours and one of Hugging Face with the same random weights."""
    config = config_of(kind, **changes)
    theirs = hugging_face(kind, config, dtype)
    return plain(config, dtype, from_hugging_face(theirs.state_dict(), config)), theirs


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    return to_ours(entries_of(config), state)


def plain(config: ModelConfig, dtype: torch.dtype, state: dict[str, Tensor]) -> Model:
    """Return our model of a config with these weights."""
    name = str(dtype).removeprefix("torch.")
    ours = build_parallel(config, LayoutConfig(), Axes(), 0, torch.device("cpu"), name).eval()
    ours.load_state_dict(state, strict=True)
    return ours


def tokens_of(v: int, b: int, s: int, seed: int = 1) -> Tensor:
    return torch.randint(0, v, (b, s), generator=torch.Generator().manual_seed(seed))


def lengths_mask(lengths: list[int], s: int) -> Tensor:
    """Return True for the first tokens of each row."""
    return torch.arange(s) < torch.tensor(lengths)[:, None]


def assert_close(got: Tensor, want: Tensor) -> None:
    """Compare to 1e-5 of the largest element (1e-10 in float64)."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    difference = float((got - want).detach().abs().max() / want.detach().abs().max())
    assert difference < TOLERANCE[got.dtype], difference


def entries_of(config: ModelConfig) -> list[TableEntry]:
    """Return how parameters are stored, which is the same for all kinds of a family."""
    return next(kind for kind in KINDS.values() if kind.family == config.family).entries(config)


def to_ours(entries: list[TableEntry], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters, given all tensors of a model of Hugging Face by name."""
    return {one.ours: one.form.ours([theirs[name] for name in one.theirs]) for one in entries}
