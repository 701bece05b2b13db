"""config.json of Llama's kinds and ours say the same, in both directions."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.convert.table import ConfigKeys, label_keys
from gridformer.config import ModelConfig
from gridformer.config.model import RopeScaling
from tests.support.reference.shared import transformers

# Without mixtures of experts, which tests/checkpoint/convert/test_round_trip.py converts.
LLAMAS = [name for name, kind in KINDS.items() if kind.family == "llama" and not kind.has_experts]
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80,
    "vocab_size": 211, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"num_layers": 3, "d_model": 16, "num_heads": 2, "d_kv": 8, "d_ff": 32, "vocab_size": 9}


@st.composite
def scalings(draw: st.DrawFn) -> RopeScaling:
    kind = draw(st.sampled_from(["linear", "llama3", "yarn"]))
    values: dict[str, Any] = {"kind": kind, "factor": draw(st.floats(1, 64))}
    if kind != "linear":
        values["original_max_position_embeddings"] = draw(st.integers(1, 8192))
    if kind == "llama3":
        values["low_freq_factor"] = draw(st.floats(0.1, 2))
        values["high_freq_factor"] = draw(st.floats(2.5, 8))
    if kind == "yarn":
        values["attention_factor"] = draw(st.none() | st.floats(0.5, 2))
        values["beta_fast"] = draw(st.floats(2, 64))
        values["truncate"] = draw(st.booleans())
    return RopeScaling(**values)


@st.composite
def models(draw: st.DrawFn) -> tuple[str, ModelConfig]:
    """A kind, and a model that it has."""
    name = draw(st.sampled_from(LLAMAS))
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    n, width = kv_heads * groups, 2 * draw(st.integers(1, 8))
    hidden = n * draw(st.sampled_from([width, width + 2]))
    # 0 where it stands for the same number, as imports write it.
    return name, ModelConfig(
        family="llama",
        n_layers=draw(st.integers(1, 3)),
        hidden_size=hidden,
        n_heads=n,
        n_kv_heads=0 if groups == 1 else kv_heads,
        head_dim=0 if n * width == hidden else width,
        ffn_size=draw(st.integers(1, 99)),
        vocab_size=draw(st.integers(1, 999)),
        max_seq_len=draw(st.integers(1, 99)),
        rope_theta=draw(st.floats(2, 1e7)),
        rope_scaling=draw(st.none() | scalings()),
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
        window=0 if name == "llama" else draw(st.integers(0, 9)),
        tied_head=draw(st.booleans()),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        init_std=draw(st.floats(1e-4, 1)),
        attention_dropout=draw(st.floats(0, 0.9)),
    )


@given(models())
def test_what_is_written_reads_the_same(drawn: tuple[str, ModelConfig]) -> None:
    name, model = drawn
    kind = KINDS[name]
    written = kind.write_config(model)
    assert isinstance(written, dict)
    keys = ConfigKeys(written)
    read = ModelConfig(family="llama", **kind.read_config(keys, frozenset()))
    assert keys.problems == []
    assert read == model


def read(name: str, **changes: Any) -> tuple[ModelConfig, list[str]]:
    keys = ConfigKeys({**SIZES, **changes})
    values = KINDS[name].read_config(keys, frozenset())
    return ModelConfig(family="llama", **values), keys.problems


def test_absent_keys_have_the_defaults_of_their_class() -> None:
    llama, _ = read("llama")
    assert (llama.kv_heads, llama.head_width, llama.tied_head) == (4, 12, False)
    assert (llama.window, llama.rope_theta, llama.norm_eps) == (0, 10000.0, 1e-6)
    qwen3, _ = read("qwen3", num_key_value_heads=2)
    assert (qwen3.kv_heads, qwen3.head_width, qwen3.window) == (2, 128, 0)
    assert read("mistral", num_key_value_heads=2)[0].window == 4096


@pytest.mark.parametrize("given", [{}, {"num_decoder_layers": None}, {"num_decoder_layers": 2}])
def test_a_t5_has_as_many_layers_in_its_decoder_if_nothing_says_it(given: dict[str, Any]) -> None:
    keys = ConfigKeys({**T5, **given})
    n_layers = KINDS["t5"].read_config(keys, frozenset())["n_decoder_layers"]
    assert (n_layers, keys.problems) == (given.get("num_decoder_layers") or 3, [])
    assert n_layers == transformers.T5Config(**T5, **given).num_decoder_layers


def test_old_and_new_files_of_rotary_positions() -> None:
    """Older ones have rope_theta and rope_scaling with a `type`."""
    new = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read("llama", rope_parameters=new) == read("llama", **old)
    model, problems = read("llama", **old)
    assert (model.rope_theta, problems) == (5e5, [])
    assert model.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize("there", [{}, {"original_max_position_embeddings": 32}])
def test_the_length_before_scaling_beside_the_rotary_positions(
    kind: str, there: dict[str, int]
) -> None:
    """It has priority in transformers, which changes its config when it makes the model."""
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **there}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given = {**SIZES, "rope_parameters": scaling, "original_max_position_embeddings": 16}
    model, problems = read("llama", **json.loads(json.dumps(given)))
    assert (model.rope_scaling and model.rope_scaling.original_max_position_embeddings) == 16
    assert problems == []
    theirs = transformers.LlamaConfig(**given)
    transformers.LlamaModel(theirs)
    assert theirs.rope_parameters["original_max_position_embeddings"] == 16


@pytest.mark.parametrize("window", [7, None])
def test_types_of_layers_that_contradict_the_window_of_a_mistral(window: int | None) -> None:
    """transformers reads only the window there."""
    right, wrong = ("sliding_attention", "full_attention")[:: 1 if window else -1]
    given: dict[str, Any] = {"sliding_window": window, "num_key_value_heads": 2}
    model, problems = read("mistral", **given, layer_types=[right] * 3)
    assert (model.window, problems) == (window or 0, [])
    (problem,) = read("mistral", **given, layer_types=[wrong] * 3)[1]
    told = f"layer_types of {wrong} contradict sliding_window={window or 'null'}, which is all"
    assert problem.startswith(told)
    (problem,) = read("mistral", **given, layer_types=[right, wrong, right])[1]
    assert problem.startswith("layers of several kinds")


GPT2 = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": 211, "n_positions": 32}
LINEAR, HALF = {"layer_types": ["linear_attention"] * 3}, {"partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 2.0, "mscale": 1, "mscale_all_dim": 1}
SLIDING = {"use_sliding_window": True}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"activation_function": "relu"}, "relu: gridformer has only gelu_new or"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings=false: gridformer has only true"),
    ("gpt2", {"num_experts": 8}, "num_experts=8: gridformer has only 0 or 1"),
    ("gpt2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: gridformer has"),
    ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("gpt2", {"n_layer": "many"}, "n_layer=many is not a number"),
    ("gpt2", {"n_embd": {}}, "n_embd={} is not a number"),
    ("t5", {"feed_forward_proj": "gated-gelu"}, "feed_forward_proj=gated-gelu (as in T5 v1.1)"),
    ("llama", {"attention_bias": True}, "attention_bias=true: gridformer has only false"),
    ("llama", {"mlp_bias": True}, "mlp_bias=true: gridformer has only false"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu: gridformer has only silu"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "dynamic: gridformer has only default,"),
    ("llama", {"rope_scaling": YARN}, "mscale=1: gridformer has only attention_factor"),
    ("llama", {"rope_parameters": HALF}, "partial_rotary_factor=0.5: gridformer has only 1.0"),
    ("llama", {"rope_parameters": {"full": {}}}, "={'full': {}}: gridformer has the same in all"),
    ("qwen2", {**SLIDING, "max_window_layers": 2}, "kinds (full_attention, sliding_attention): "),
    ("mistral", LINEAR, "kinds (linear_attention): gridformer has only the same attention in all"),
    ("qwen2", {"num_attention_heads": {}}, "num_attention_heads={} is not a number"),
    ("qwen2", {"head_dim": [[]]}, "head_dim=[[]] is not a number"),
    ("qwen2", {**SLIDING, "max_window_layers": "x"}, "max_window_layers=x is not a number"),
    ("qwen2", {"layer_types": 1e308}, "layer_types=1e+308 is not a list"),
    ("qwen2", {"layer_types": [{}], **SLIDING}, "layers of several kinds ({})"),
    ("qwen2", {"rope_parameters": {"rope_type": []}}, "rope_type=[]: gridformer has only default"),
    ("qwen2", {"architectures": 5, "id2label": 5}, "id2label=5 is not a mapping"),
]


@pytest.mark.parametrize(("name", "changes", "want"), REFUSED, ids=str)
def test_what_cannot_be_represented_is_named(name: str, changes: dict[str, Any], want: str) -> None:
    sizes = {"gpt2": GPT2, "t5": T5}.get(name, {**SIZES, "num_key_value_heads": 4})
    keys = ConfigKeys({**sizes, **changes})
    KINDS[name].read_config(keys, frozenset({"score.weight"}))
    (problem,) = keys.problems
    assert want in problem


def test_labels_without_a_name_have_that_of_their_number() -> None:
    assert label_keys(3, ["a"])["id2label"] == {"0": "a", "1": "LABEL_1", "2": "LABEL_2"}


def test_a_model_that_no_kind_has_says_why() -> None:
    model, _ = read("llama")
    both = model.model_copy(update={"qkv_bias": True, "qk_norm": True, "window": 3})
    told = [KINDS[name].write_config(both) for name in LLAMAS]
    assert all(isinstance(one, list) and one for one in told)
    assert "window=3: a llama has window=0" in told[0]
