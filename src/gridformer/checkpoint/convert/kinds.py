"""All kinds of models that are converted, by the `model_type` of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gridformer.checkpoint.convert.table import ConfigKeys, Key, Kind, Row, rows
from gridformer.config import ModelConfig, any_of

_GPT2_ROWS = rows(
    """
    tokens                   transformer.wte               same
    positions                transformer.wpe               same
    layers.#.norm1.*         transformer.h.#.ln_1.*        same
    layers.#.attention.qkv.* transformer.h.#.attn.c_attn.* side_by_side
    layers.#.attention.out.* transformer.h.#.attn.c_proj.* same
    layers.#.norm2.*         transformer.h.#.ln_2.*        same
    layers.#.mlp.up.*        transformer.h.#.mlp.c_fc.*    same
    layers.#.mlp.down.*      transformer.h.#.mlp.c_proj.*  same
    norm.*                   transformer.ln_f.*            same
    classifier.labels        score                         linear if labels
    span.ends.*              qa_outputs.*                  linear if span_head
    """
)
# Its matrices are [in, out] like ours, and q, k and v lie side by side.
GPT2 = Kind(
    "gpt2",
    "gpt2",
    "GPT2",
    lambda model: "LMHeadModel",
    rows=_GPT2_ROWS,
    keys=[
        Key("n_layer", "n_layers"),
        Key("n_embd", "hidden_size"),
        Key("n_head", "n_heads"),
        Key("n_inner", "ffn_size", default=lambda read: 4 * read["hidden_size"]),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "max_seq_len"),
        Key("activation_function", written="gelu_new"),
        Key("resid_pdrop", "dropout", 0.1),
        Key("embd_pdrop", written=lambda model: model.dropout),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("initializer_range", "init_std", 0.02),
    ],
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    prefix="transformer.",
    heads="fill",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    repeats={"lm_head.weight": "transformer.wte.weight"},
)


_BERT_ROWS = rows(
    """
    tokens                   bert.embeddings.word_embeddings                         same
    positions                bert.embeddings.position_embeddings                     same
    segments                 bert.embeddings.token_type_embeddings                   same
    embedding_norm.*         bert.embeddings.LayerNorm.*                             same
    layers.#.attention.qkv.* bert.encoder.layer.#.attention.self.[query|key|value].* qkv
    layers.#.attention.out.* bert.encoder.layer.#.attention.output.dense.*           linear
    layers.#.norm1.*         bert.encoder.layer.#.attention.output.LayerNorm.*       same
    layers.#.mlp.up.*        bert.encoder.layer.#.intermediate.dense.*               linear
    layers.#.mlp.down.*      bert.encoder.layer.#.output.dense.*                     linear
    layers.#.norm2.*         bert.encoder.layer.#.output.LayerNorm.*                 same
    transform.*              cls.predictions.transform.dense.* linear if token_head
    head_norm.*              cls.predictions.transform.LayerNorm.* same if token_head
    head.bias                cls.predictions.bias same if token_head
    classifier.pooler.*      bert.pooler.dense.* linear if labels
    classifier.labels.*      classifier.* linear if labels
    span.ends.*              qa_outputs.* linear if span_head
    pair.pooler.*            bert.pooler.dense.* linear if sentence_pair
    pair.labels.*            cls.seq_relationship.* reversed if sentence_pair
    """
)
# Their label 0 of a pair means that sentence B follows A; here it is 1.
_NEXT_SENTENCE = "cls.seq_relationship.weight"
BERT = Kind(
    "bert",
    "bert",
    "Bert",
    lambda model: "ForPreTraining" if model.sentence_pair else "ForMaskedLM",
    rows=_BERT_ROWS,
    keys=[
        Key("num_hidden_layers", "n_layers"),
        Key("hidden_size", "hidden_size"),
        Key("num_attention_heads", "n_heads"),
        Key("intermediate_size", "ffn_size"),
        Key("vocab_size", "vocab_size"),
        Key("max_position_embeddings", "max_seq_len"),
        Key("type_vocab_size", written=2),
        Key("hidden_act", written="gelu"),
        Key("hidden_dropout_prob", "dropout", 0.1),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("initializer_range", "init_std", 0.02),
    ],
    fixed={
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
        "type_vocab_size": (2,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    prefix="bert.",
    # A head of fine-tuning, which has priority, sets token_head.
    read=lambda keys, read, names: {
        "sentence_pair": _NEXT_SENTENCE in names
        and not {"classifier.weight", "qa_outputs.weight"} & names
    },
    always={"norm_position": "post"},
    heads="fill",
    skipped=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
    repeats={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    old_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


_T5_ROWS = rows(
    """
    tokens                               shared                                        same
    encoder.bias.weight encoder.block.0.layer.0.SelfAttention.relative_attention_bias same
    encoder.layers.#.norm1               encoder.block.#.layer.0.layer_norm            same
    encoder.layers.#.attention.qkv       encoder.block.#.layer.0.SelfAttention.[q|k|v] qkv
    encoder.layers.#.attention.out       encoder.block.#.layer.0.SelfAttention.o       linear
    encoder.layers.#.norm2               encoder.block.#.layer.1.layer_norm            same
    encoder.layers.#.mlp.up              encoder.block.#.layer.1.DenseReluDense.wi     linear
    encoder.layers.#.mlp.down            encoder.block.#.layer.1.DenseReluDense.wo     linear
    encoder.norm                         encoder.final_layer_norm                      same
    decoder.bias.weight decoder.block.0.layer.0.SelfAttention.relative_attention_bias same
    decoder.layers.#.norm1               decoder.block.#.layer.0.layer_norm            same
    decoder.layers.#.attention.qkv       decoder.block.#.layer.0.SelfAttention.[q|k|v] qkv
    decoder.layers.#.attention.out       decoder.block.#.layer.0.SelfAttention.o       linear
    decoder.layers.#.cross_norm          decoder.block.#.layer.1.layer_norm            same
    decoder.layers.#.cross_attention.q   decoder.block.#.layer.1.EncDecAttention.q     linear
    decoder.layers.#.cross_attention.kv  decoder.block.#.layer.1.EncDecAttention.[k|v] kv
    decoder.layers.#.cross_attention.out decoder.block.#.layer.1.EncDecAttention.o     linear
    decoder.layers.#.norm2               decoder.block.#.layer.2.layer_norm            same
    decoder.layers.#.mlp.up              decoder.block.#.layer.2.DenseReluDense.wi     linear
    decoder.layers.#.mlp.down            decoder.block.#.layer.2.DenseReluDense.wo     linear
    decoder.norm                         decoder.final_layer_norm                      same
    classifier.pooler.*                  classification_head.dense.* linear if labels
    classifier.labels.*                  classification_head.out_proj.* linear if labels
    span.ends.*                          qa_outputs.* linear if span_head
    """
)
# Version 1.0: ReLU, and a head that shares the embedding's table.
T5 = Kind(
    "t5",
    "t5",
    "T5",
    lambda model: "ForConditionalGeneration",
    rows=_T5_ROWS,
    keys=[
        Key("is_encoder_decoder", written=True),
        Key("num_layers", "n_layers"),
        Key("num_decoder_layers", "n_decoder_layers", default=lambda read: read["n_layers"]),
        Key("d_model", "hidden_size"),
        Key("num_heads", "n_heads"),
        Key("d_kv", "head_dim", written=lambda model: model.head_width),
        Key("d_ff", "ffn_size"),
        Key("vocab_size", "vocab_size"),
        # Relative positions have no longest sequence; T5 was trained on this one.
        Key("n_positions", "max_seq_len", 512),
        Key("relative_attention_num_buckets", "relative_buckets", 32),
        Key("relative_attention_max_distance", "relative_max_distance", 128),
        Key("dropout_rate", "dropout", 0.1),
        Key("layer_norm_epsilon", "norm_eps", 1e-6),
        Key("feed_forward_proj", written="relu"),
    ],
    fixed={
        "feed_forward_proj": ("relu",),
        "is_gated_act": (False, None),
        "tie_word_embeddings": (True,),
        "scale_decoder_outputs": (True, None),
    },
    hints=dict.fromkeys(("feed_forward_proj", "tie_word_embeddings"), " (as in T5 v1.1)"),
    prefix="",
    renamed=lambda model, name: (
        f"transformer.{name}"
        if model.n_labels and not name.startswith("classification_head.")
        else name
    ),
    old_names={"transformer.": ""},
    repeats=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        "shared.weight",
    ),
    skipped=(
        # The first T5 checkpoints hold it, and no version of the model reads it.
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)


# Llama, Mistral, Qwen2 and Qwen3 have one table, and differ in their configs.
_LLAMA_ROWS = rows(
    """
    tokens                        model.embed_tokens                      same
    layers.#.attention.qkv.q      model.layers.#.self_attn.q_proj         linear
    layers.#.attention.qkv.k      model.layers.#.self_attn.k_proj         linear
    layers.#.attention.qkv.v      model.layers.#.self_attn.v_proj         linear
    layers.#.attention.out        model.layers.#.self_attn.o_proj         linear
    layers.#.mlp.up.gate          model.layers.#.mlp.gate_proj            linear
    layers.#.mlp.up.up            model.layers.#.mlp.up_proj              linear
    layers.#.mlp.down             model.layers.#.mlp.down_proj            linear
    layers.#.mlp.router           model.layers.#.mlp.gate                 linear if n_experts
    layers.#.mlp.router.bias    model.layers.#.mlp.gate.e_score_correction_bias same if router_bias
    layers.#.mlp.experts.gate     model.layers.#.mlp.experts.@.gate_proj  experts if n_experts
    layers.#.mlp.experts.up       model.layers.#.mlp.experts.@.up_proj    experts if n_experts
    layers.#.mlp.experts.down     model.layers.#.mlp.experts.@.down_proj  experts if n_experts
    layers.#.mlp.shared.up.gate   model.layers.#.mlp.shared_experts.gate_proj linear if shared_size
    layers.#.mlp.shared.up.up     model.layers.#.mlp.shared_experts.up_proj linear if shared_size
    layers.#.mlp.shared.down      model.layers.#.mlp.shared_experts.down_proj linear if shared_size
    layers.#.norm1                model.layers.#.input_layernorm          same
    layers.#.norm2                model.layers.#.post_attention_layernorm same
    layers.#.attention.q_norm     model.layers.#.self_attn.q_norm         same if qk_norm
    layers.#.attention.k_norm     model.layers.#.self_attn.k_norm         same if qk_norm
    layers.#.attention.qkv.q.bias model.layers.#.self_attn.q_proj.bias    same if qkv_bias
    layers.#.attention.qkv.k.bias model.layers.#.self_attn.k_proj.bias    same if qkv_bias
    layers.#.attention.qkv.v.bias model.layers.#.self_attn.v_proj.bias    same if qkv_bias
    norm                          model.norm                              same
    head                          lm_head                                 same if untied
    classifier.labels             score                                   linear if labels
    span.ends.*                   qa_outputs.*                            linear if span_head
    """
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LENGTH = "original_max_position_embeddings"
# For each kind of rotary scaling, the keys that it needs and those that it may have.
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_LENGTH,)),
    "yarn": (("factor",), (_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate")),
}


@dataclass(frozen=True)
class _Traits:
    """What one kind has that the others do not, and the defaults of its class in transformers."""

    qkv_bias: bool = False
    qk_norm: bool = False
    # A sliding window is in no layer, in all of them, or in `some`: those that `layer_types` or
    # `max_window_layers` names.
    window: str = "none"
    kv_heads: int | None = None  # None means the number of query heads
    head_dim: int | None = None  # None means hidden_size / num_attention_heads
    answering: str = "transformer."  # before tensors' names in the class for answers to questions
    # Keys of config.json about experts, which the kind then has. Then keys with fixed values, and
    # what our ModelConfig always has.
    experts: Sequence[Key] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # parts of tensors' names in mixtures
    qk_norm_over: str = "head"


def _llama(name: str, traits: _Traits) -> Kind:
    """Rotary positions pair features as Hugging Face does, so every matrix is only transposed."""
    window = Key("sliding_window", written=lambda model: model.window or None)
    windows = {
        "none": [],
        "all": [window],
        "some": [
            Key("use_sliding_window", written=lambda model: bool(model.window)),
            window,
            Key("max_window_layers", written=lambda m: 0 if m.window else m.n_layers),
        ],
    }
    return Kind(
        name,
        "llama",
        name.title().replace("_", ""),
        lambda model: "ForCausalLM",
        rows=[_renamed(row, traits.names) for row in _LLAMA_ROWS],
        keys=[
            Key("num_hidden_layers", "n_layers"),
            Key("hidden_size", "hidden_size"),
            Key("num_attention_heads", "n_heads"),
            Key("num_key_value_heads", written=lambda model: model.kv_heads),
            Key("head_dim", written=lambda model: model.head_width),
            Key("intermediate_size", "ffn_size"),
            Key("vocab_size", "vocab_size"),
            Key("max_position_embeddings", "max_seq_len"),
            Key("tie_word_embeddings", "tied_head", False),
            Key("rope_theta", written=lambda model: model.rope_theta),
            Key("rope_scaling", written=_write_scaling),
            Key("hidden_act", written="silu"),
            Key("attention_dropout", "attention_dropout", 0.0),
            Key("rms_norm_eps", "norm_eps", 1e-6),
            Key("initializer_range", "init_std", 0.02),
            *windows[traits.window],
            *traits.experts,
        ],
        # attention_bias would be in the output projection as well.
        fixed={
            **{"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
            **traits.fixed,
        },
        prefix="model.",
        read=partial(_read_llama, traits),
        always={
            "qkv_bias": traits.qkv_bias,
            "qk_norm": traits.qk_norm,
            "qk_norm_over": traits.qk_norm_over,
            **({"window": 0} if traits.window == "none" else {}),
            **traits.always,
        },
        has_experts=bool(traits.experts),
        heads="divide" if name == "llama" else "any",
        renamed=lambda model, tensor: (
            tensor.replace("model.", traits.answering) if model.span_head else tensor
        ),
        old_names={"transformer.": "model."},
        skipped=(
            r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
            r"model\.rotary_emb\.inv_freq",
        ),
        repeats={"lm_head.weight": "model.embed_tokens.weight"},  # if the head is tied
        otherwise="write tie_word_embeddings: false into config.json if it has a head of its own",
    )


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    for ours, theirs in names.items():
        row = row._replace(theirs=row.theirs.replace(ours, theirs))
    return row


def _read_llama(
    traits: _Traits, keys: ConfigKeys, read: Mapping[str, Any], names: frozenset[str]
) -> dict[str, Any]:
    h, n = read["hidden_size"], read["n_heads"]
    kv_heads = keys.get("num_key_value_heads", traits.kv_heads) or n
    d = keys.get("head_dim", traits.head_dim) or 0
    return {
        "n_kv_heads": 0 if kv_heads == n else kv_heads,
        "head_dim": 0 if d and d * n == h else d,
        "qkv_bias": traits.qkv_bias,
        "qk_norm": traits.qk_norm,
        "qk_norm_over": traits.qk_norm_over,
        "shared_size": (keys.get("n_shared_experts", 0) or 0) * read.get("expert_size", 0),
        "window": _read_window(traits, keys, read["n_layers"]),
        **_read_rope(keys),
        **traits.always,
        # Their loss has the term only if the model returns the router's logits.
        "balance_loss": (
            read.get("balance_loss", 0.0) if keys.get("output_router_logits", False) else 0.0
        ),
    }


def _read_window(traits: _Traits, keys: ConfigKeys, layers: Any) -> int:
    """Returns the window that all layers have, 0 for none."""
    window, some = keys.get("sliding_window", 4096) or 0, traits.window == "some"
    if traits.window == "none" or (some and not keys.get("use_sliding_window", False)):
        window, usual = 0, [_FULL]
    elif some:
        first = min(keys.get("max_window_layers", 28) or 0, layers)
        usual = [_FULL] * (first > 0) + [_SLIDING] * (layers > first)
    else:
        usual = [_SLIDING if window else _FULL]
    types = sorted({str(one) for one in keys.get("layer_types", None) or usual})
    if types not in ([_FULL], [_SLIDING]):
        keys.problems.append(
            f"layers of several kinds ({', '.join(types)}): gridformer has only the same "
            "attention in all layers"
        )
    elif traits.window == "all" and types != usual:
        keys.problems.append(
            f"layer_types of {types[0]} contradict sliding_window={window or 'null'}, which is "
            "all that transformers reads in this model: remove one of them"
        )
    return 0 if types == [_FULL] else window


def _read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """Reads `rope_parameters`, or in older files rope_theta and rope_scaling."""
    rope = keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {}
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        keys.problems.append(f"rope_parameters={rope}: gridformer has the same in all layers")
        rope = {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    theta = rope.get("rope_theta", keys.get("rope_theta", 10000.0))
    read: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        keys.problems.append(f"partial_rotary_factor={factor}: gridformer has only 1.0")
    if kind == "default":
        return read
    if kind not in _SCALINGS:
        known = any_of(("default", *_SCALINGS))
        keys.problems.append(f"rope_type={kind}: gridformer has only {known}")
        return read
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        keys.problems.append(f"mscale={rope['mscale']}: gridformer has only attention_factor")
    needed, others = _SCALINGS[kind]
    keys.problems += [f"rope_type={kind} without {key}" for key in needed if rope.get(key) is None]
    scaling = {key: rope[key] for key in (*needed, *others) if rope.get(key) is not None}
    if _LENGTH in others:
        if (whole := keys.get(_LENGTH, None)) is not None:  # which has priority in transformers
            scaling[_LENGTH] = whole
        scaling.setdefault(_LENGTH, keys.size("max_position_embeddings"))
    return read | {"rope_scaling": {"kind": kind, **scaling}}


def _write_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Returns `rope_scaling`, which old and new versions of transformers read."""
    if (scaling := model.rope_scaling) is None:
        return None
    keys = [key for keys in _SCALINGS[scaling.kind] for key in keys]
    values = {key: value for key in keys if (value := getattr(scaling, key)) is not None}
    return {"rope_type": scaling.kind, **values}


def _experts(n: str, *, size: str, loss: float = 0.001) -> list[Key]:
    """Returns the keys that all mixtures have; `n` and `size` are names of two of them."""
    return [
        Key(n, "n_experts"),
        Key("num_experts_per_tok", "experts_per_token"),
        *([Key(size, "expert_size")] if size else []),
        Key("output_router_logits", written=lambda model: model.balance_loss > 0.0),
        Key(
            "router_aux_loss_coef",
            "balance_loss",
            loss,
            written=lambda model: model.balance_loss or loss,
        ),
    ]


_SOFTMAX: dict[str, Any] = {"router": "softmax", "router_bias": False, "routed_scale": 1.0}
_ALL_ROUTED: dict[str, Any] = {**_SOFTMAX, "shared_size": 0, "dense_layers": 0}
_NORM = Key("norm_topk_prob", "normalized_gates", False)
_MIXTRAL = {"mlp.gate": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts"}
_MIXTRAL |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_LLAMAS = (
    _llama("llama", _Traits()),
    _llama("mistral", _Traits(window="all", kv_heads=8, answering="model.")),
    _llama("qwen2", _Traits(qkv_bias=True, window="some", kv_heads=32)),
    _llama("qwen3", _Traits(qk_norm=True, window="some", kv_heads=32, head_dim=128)),
    _llama(
        "mixtral",
        _Traits(
            window="all",
            kv_heads=8,
            experts=_experts("num_local_experts", size=""),
            always={**_ALL_ROUTED, "normalized_gates": True},
            names=_MIXTRAL,
        ),
    ),
    _llama(
        "qwen3_moe",
        _Traits(
            qk_norm=True,
            window="some",
            kv_heads=4,
            experts=[*_experts("num_experts", size="moe_intermediate_size"), _NORM],
            always=_ALL_ROUTED,
            fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        ),
    ),
    _llama(
        "olmoe",
        _Traits(
            qk_norm=True,
            qk_norm_over="all",
            experts=[*_experts("num_experts", size="", loss=0.01), _NORM],
            always=_ALL_ROUTED,
            fixed={"clip_qkv": (None,)},
        ),
    ),
    # DeepSeek-V3's mixture with ordinary attention.
    _llama(
        "dots1",
        _Traits(
            qk_norm=True,
            window="some",
            kv_heads=32,
            experts=[
                Key("n_routed_experts", "n_experts"),
                Key("num_experts_per_tok", "experts_per_token"),
                Key("moe_intermediate_size", "expert_size"),
                Key(
                    "n_shared_experts",
                    written=lambda model: model.shared_size // model.expert_size or None,
                ),
                Key("first_k_dense_replace", "dense_layers", 0),
                Key("routed_scaling_factor", "routed_scale", 1.0),
                _NORM,
                Key("n_group", written=1),
                Key("topk_group", written=1),
            ],
            always={"router": "sigmoid", "router_bias": True, "balance_loss": 0.0},
            fixed={"n_group": (1, None), "topk_group": (1, None)},
        ),
    ),
)
KINDS: dict[str, Kind] = {kind.model_type: kind for kind in (GPT2, BERT, T5, *_LLAMAS)}


def kinds_of(config: ModelConfig) -> list[Kind]:
    """Returns the kinds of a family."""
    return [kind for kind in KINDS.values() if kind.family == config.family]
