"""All kinds of models that are converted, by the `model_type` of Hugging Face's config.json."""

from __future__ import annotations

from gridformer.checkpoint.convert.llama import LLAMA_KINDS
from gridformer.checkpoint.convert.table import Key, Kind, TableEntry, rows
from gridformer.config import ModelConfig


def _head_dim(model: ModelConfig) -> list[str]:
    if model.head_width * model.n_heads == model.hidden_size:
        return []
    width = model.hidden_size // model.n_heads
    return [f"head_dim={model.head_dim}: in transformers it is hidden_size / n_heads, {width}"]


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
    unlike=_head_dim,
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    repeats={"lm_head.weight": "transformer.wte.weight"},
)


def _unlike_bert(model: ModelConfig) -> list[str]:
    position = model.norm_position
    post = [f"norm_position={position}: transformers' BERT has only post"] * (position != "post")
    return post + _head_dim(model)


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
    unlike=_unlike_bert,
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


KINDS: dict[str, Kind] = {kind.model_type: kind for kind in (GPT2, BERT, T5, *LLAMA_KINDS)}


def kinds_of(config: ModelConfig) -> list[Kind]:
    """Returns the kinds of a family."""
    return [kind for kind in KINDS.values() if kind.family == config.family]


def entries_of(config: ModelConfig) -> list[TableEntry]:
    """Returns the table of a model. It is the same for all kinds of its family."""
    return kinds_of(config)[0].entries(config)
