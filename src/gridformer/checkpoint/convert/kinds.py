"""All kinds of models that are converted, by the `model_type` of Hugging Face's config.json."""

from __future__ import annotations

from functools import partial

from gridformer.checkpoint.convert.llama import LLAMA_KINDS
from gridformer.checkpoint.convert.table import (
    QKV,
    REVERSED,
    SAME,
    TRANSPOSED,
    Key,
    Kind,
    Row,
    TableEntry,
    head_rows,
    interleaved,
    side_by_side,
)
from gridformer.config import ModelConfig


def _head_dim(model: ModelConfig) -> list[str]:
    if model.head_width * model.n_heads == model.hidden_size:
        return []
    width = model.hidden_size // model.n_heads
    return [f"head_dim={model.head_dim}: in transformers it is hidden_size / n_heads, {width}"]


# Its matrices are [in, out] like ours, and q, k and v lie side by side.
GPT2 = Kind(
    "gpt2",
    "gpt2",
    "GPT2",
    lambda model: "LMHeadModel",
    rows=[
        Row("tokens.weight", "transformer.wte.weight", SAME),
        Row("positions.weight", "transformer.wpe.weight", SAME),
        Row("layers.{n_layers}.norm1.*", "transformer.h.{n_layers}.ln_1.*", SAME),
        Row(
            "layers.{n_layers}.attention.qkv.*",
            "transformer.h.{n_layers}.attn.c_attn.*",
            partial(side_by_side, 3),
        ),
        Row("layers.{n_layers}.attention.out.*", "transformer.h.{n_layers}.attn.c_proj.*", SAME),
        Row("layers.{n_layers}.norm2.*", "transformer.h.{n_layers}.ln_2.*", SAME),
        Row("layers.{n_layers}.mlp.up.*", "transformer.h.{n_layers}.mlp.c_fc.*", SAME),
        Row("layers.{n_layers}.mlp.down.*", "transformer.h.{n_layers}.mlp.c_proj.*", SAME),
        Row("norm.*", "transformer.ln_f.*", SAME),
        *head_rows({"classifier.labels": "score"}, "weight"),
    ],
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
    unlike=_head_dim,
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    repeats={"lm_head.weight": "transformer.wte.weight"},
)


def _unlike_bert(model: ModelConfig) -> list[str]:
    position = model.norm_position
    post = [f"norm_position={position}: transformers' BERT has only post"] * (position != "post")
    return post + _head_dim(model)


_NEXT_SENTENCE = "cls.seq_relationship.weight"
BERT = Kind(
    "bert",
    "bert",
    "Bert",
    lambda model: "ForPreTraining" if model.sentence_pair else "ForMaskedLM",
    rows=[
        Row("tokens.weight", "bert.embeddings.word_embeddings.weight", SAME),
        Row("positions.weight", "bert.embeddings.position_embeddings.weight", SAME),
        Row("segments.weight", "bert.embeddings.token_type_embeddings.weight", SAME),
        Row("embedding_norm.*", "bert.embeddings.LayerNorm.*"),
        Row(
            "layers.{n_layers}.attention.qkv.*",
            "bert.encoder.layer.{n_layers}.attention.self.[query key value].*",
            QKV,
        ),
        *(
            Row(f"layers.{{n_layers}}.{ours}.*", f"bert.encoder.layer.{{n_layers}}.{theirs}.*")
            for ours, theirs in (
                ("attention.out", "attention.output.dense"),
                ("norm1", "attention.output.LayerNorm"),
                ("mlp.up", "intermediate.dense"),
                ("mlp.down", "output.dense"),
                ("norm2", "output.LayerNorm"),
            )
        ),
        *(
            Row(ours, f"cls.predictions.{theirs}", when=lambda model: model.token_head)
            for ours, theirs in (
                ("transform.*", "transform.dense.*"),
                ("head_norm.*", "transform.LayerNorm.*"),
                ("head.bias", "bias"),
            )
        ),
        *head_rows({"classifier.pooler": "bert.pooler.dense", "classifier.labels": "classifier"}),
        Row("pair.pooler.*", "bert.pooler.dense.*", when=lambda model: model.sentence_pair),
        # Their label 0 means that sentence B follows A; here it is 1.
        Row("pair.labels.*", "cls.seq_relationship.*", REVERSED, lambda model: model.sentence_pair),
    ],
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
    unlike=_unlike_bert,
    skipped=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
    repeats={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    old_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


def _t5_stack(stack: str, n: str, mlp: int) -> list[Row]:
    """Returns the rows of a stack of layers, whose MLP is that sublayer of a block."""
    ours, theirs = f"{stack}.layers.{{{n}}}", f"{stack}.block.{{{n}}}.layer"
    relative = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        Row(f"{stack}.bias.weight", relative, SAME),
        *(
            Row(f"{ours}.{a}.weight", f"{theirs}.{b}.weight", form)
            for a, b, form in (
                ("norm1", "0.layer_norm", SAME),
                ("attention.qkv", "0.SelfAttention.[q k v]", QKV),
                ("attention.out", "0.SelfAttention.o", TRANSPOSED),
                ("cross_norm", "1.layer_norm", SAME),
                ("cross_attention.q", "1.EncDecAttention.q", TRANSPOSED),
                ("cross_attention.kv", "1.EncDecAttention.[k v]", partial(interleaved, 2)),
                ("cross_attention.out", "1.EncDecAttention.o", TRANSPOSED),
                ("norm2", f"{mlp}.layer_norm", SAME),
                ("mlp.up", f"{mlp}.DenseReluDense.wi", TRANSPOSED),
                ("mlp.down", f"{mlp}.DenseReluDense.wo", TRANSPOSED),
            )
            if stack == "decoder" or not a.startswith("cross")
        ),
        Row(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight", SAME),
    ]


# Version 1.0: ReLU, and a head that shares the embedding's table.
T5 = Kind(
    "t5",
    "t5",
    "T5",
    lambda model: "ForConditionalGeneration",
    rows=[
        Row("tokens.weight", "shared.weight", SAME),
        *_t5_stack("encoder", "n_layers", 1),
        *_t5_stack("decoder", "n_decoder_layers", 2),
        *head_rows(
            {
                "classifier.pooler": "classification_head.dense",
                "classifier.labels": "classification_head.out_proj",
            }
        ),
    ],
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


KINDS: dict[str, Kind] = {kind.model_type: kind for kind in (GPT2, BERT, T5, *LLAMA_KINDS)}


def kinds_of(config: ModelConfig) -> list[Kind]:
    """Returns the kinds of a family."""
    return [kind for kind in KINDS.values() if kind.family == config.family]


def entries_of(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a model. It is the same for all kinds of its family."""
    return kinds_of(config)[0].entries(config)
