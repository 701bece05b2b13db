"""Small models of Hugging Face with random weights, and ours with the same weights."""

import os

# must be set before transformers is imported; nothing is downloaded
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

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
_EXPERTS = {**_LLAMA, "n_experts": 5, "experts_per_token": 3}
# Mixtures of experts: what CONFIGS is for the other kinds.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "window": 5},
    "qwen3_moe": {**_EXPERTS, "expert_size": 24, "qk_norm": True},
    "olmoe": {**_EXPERTS, "qk_norm": True, "qk_norm_over": "all", "normalized_gates": False},
    "dots1": {
        **{**_EXPERTS, "qk_norm": True, "expert_size": 24, "shared_size": 48, "dense_layers": 1},
        **{"router": "sigmoid", "router_bias": True, "routed_scale": 2.5},
    },
}
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
_OF_MIXTURES = {
    "mixtral": {"num_local_experts": "n_experts"},
    "qwen3_moe": {"num_experts": "n_experts", "moe_intermediate_size": "expert_size"},
    "olmoe": {"num_experts": "n_experts"},
    "dots1": {
        **{"n_routed_experts": "n_experts", "moe_intermediate_size": "expert_size"},
        **{"first_k_dense_replace": "dense_layers", "routed_scaling_factor": "routed_scale"},
    },
}
_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_function": "gelu_new", "attn_implementation": "eager"},
    "bert": {"hidden_act": "gelu", "pad_token_id": None, "attn_implementation": "eager"},
    "t5": {
        **{"feed_forward_proj": "relu", "tie_word_embeddings": True, "dropout_rate": 0.0},
        **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    },
}
_SINGLE = torch.float32  # also where `_wider` gives another meaning to this name
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
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of a router
                buffer.copy_(spread * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval()


def config_of(kind: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 48, "n_heads": 4, "vocab_size": V}
    return ModelConfig(**{**sizes, **{**CONFIGS, **MIXTURES}[kind], **changes})


def class_of(kind: str, head: str) -> Any:
    """Return a class of transformers, such as BertForPreTraining."""
    prefix = kind.upper() if kind in ("gpt2", "t5") else kind.title().replace("_", "")
    return getattr(transformers, f"{prefix}{head}")


def hugging_face(kind: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Return their model.

    In float64 Llama's norms and rotations, which it computes in float32 for any type, are replaced
    by the same in float64, and so are the routers of mixtures. Angles stay rounded to float32, as
    ours do.
    """
    names = _NAMES.get(kind, _OF_LLAMAS)
    values = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    values |= _FIXED[kind] if kind in _FIXED else _of_llama(kind, config)
    theirs = class_of(kind, _HEADS.get(kind, "ForCausalLM"))(class_of(kind, "Config")(**values))
    model = randomize(theirs, dtype)
    widens = kind in (*LLAMAS, *MIXTURES) and dtype == torch.float64
    return widened(model) if widens else model


def _of_mixture(kind: str, config: ModelConfig) -> dict[str, Any]:
    values = {theirs: getattr(config, ours) for theirs, ours in _OF_MIXTURES[kind].items()}
    values |= {
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalized_gates,
        "output_router_logits": config.balance_loss > 0.0,
        "router_aux_loss_coef": config.balance_loss,
        "experts_implementation": "eager",
    }
    if kind == "dots1":
        values |= {"n_shared_experts": config.shared_size // config.expert_size}
        values |= {"n_group": 1, "topk_group": 1}
    return values


def _of_llama(kind: str, config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= scaling.model_dump(exclude_defaults=True, exclude={"kind"})
        rope["rope_type"] = scaling.kind
        if scaling.kind == "llama3":  # theirs have no defaults
            rope |= {key: getattr(scaling, key) for key in ("low_freq_factor", "high_freq_factor")}
    # the eager attention computes softmax in float32 for any type
    values: dict[str, Any] = {"rope_parameters": rope, "attn_implementation": "sdpa"}
    if kind in MIXTURES:
        values |= _of_mixture(kind, config)
    if kind in ("mistral", "mixtral"):
        values["sliding_window"] = config.window or None
    elif config.window:  # of Qwen2 and Qwen3, in layers from max_window_layers on
        values |= {"sliding_window": config.window, "max_window_layers": 0}
        values["use_sliding_window"] = True
    return values


def widened(model: Any) -> Any:
    """Let norms, rotations and routers of a model of theirs compute in float64, and return it."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.forward = _norm_of(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _rotation_of(module)
    if getattr(model.config, "num_experts_per_tok", None):
        model.forward = _wider(model.forward)
    return model


def _wider(forward: Any) -> Any:
    """Compute in float64 what they compute in float32: routers, and the loss of their balance."""

    def in_float64(*args: Any, **kwargs: Any) -> Any:
        wide = {"float32": torch.float64, "float": torch.float64}
        with patch.dict(vars(torch), wide), patch.object(Tensor, "float", Tensor.double):
            return forward(*args, **kwargs)

    return in_float64


def _norm_of(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        out: Tensor = module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))
        return out

    return forward


def _rotation_of(module: Any) -> Any:
    # Conversion to float64 has converted the frequencies, but their values are those of float32.
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None].to(_SINGLE) * module.inv_freq.to(_SINGLE)).double()
        angles, factor = torch.cat((angles, angles), -1), module.attention_scaling
        return angles.cos() * factor, angles.sin() * factor

    return forward


def pair(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """Return a small model of ours and one of Hugging Face with the same random weights."""
    config = config_of(kind, **changes)
    theirs = hugging_face(kind, config, dtype)
    state = to_ours(entries_of(config, kind), in_files(theirs, theirs.state_dict()))
    return plain(config, dtype, state), theirs


def in_files(model: Any, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors of a model of theirs as files have them: each expert by itself."""
    if not getattr(model.config, "num_experts_per_tok", None):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    found: Mapping[str, Tensor] = revert_weight_conversion(model, {**tensors})
    return found


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


def entries_of(config: ModelConfig, name: str = "") -> list[TableEntry]:
    """Return how parameters are stored, which is the same for all kinds of a family but mixtures.

    Mixtures need the `name` of their kind.
    """
    kinds = (kind for kind in KINDS.values() if kind.family == config.family)
    return KINDS.get(name, next(kinds)).entries(config)


def to_ours(entries: list[TableEntry], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters, given all tensors of a model of Hugging Face by name."""
    return {one.ours: one.form.ours([theirs[name] for name in one.theirs]) for one in entries}
