"""The names that other libraries, and older versions, have for keys and values of a run file."""

from __future__ import annotations

from typing import Final

# Each key, or setting, of a run file with the words that users of PyTorch, Hugging Face, DeepSpeed,
# Lightning, Megatron-LM and nanoGPT write for it.
_WORDS: Final = {
    "model.family": "architecture model_type",
    "model.n_layers": "depth n_layer num_hidden_layers num_layers",
    "model.n_decoder_layers": "decoder_layers num_decoder_layers",
    "model.hidden_size": "d_model dim embed_dim emb_dim embedding_dim hidden hidden_dim n_embd",
    "model.n_heads": "heads n_head num_attention_heads num_heads",
    "model.n_kv_heads": "kv_heads n_kv_head num_key_value_heads num_kv_heads num_query_groups",
    "model.head_dim": "d_head d_kv head_size kv_channels",
    "model.ffn_size": "d_ff ffn_dim ffn_hidden_size intermediate_size mlp_dim n_inner",
    "model.vocab_size": "n_vocab padded_vocab_size vocab",
    "model.max_seq_len": "max_position_embeddings max_positions n_ctx n_positions",
    "model.rope_theta": "rope_base rotary_base",
    "model.window": "sliding_window window_size",
    "model.tied_head": "tie_embeddings tie_word_embeddings tied_embeddings",
    "model.dropout": "embd_pdrop hidden_dropout hidden_dropout_prob resid_pdrop",
    "model.attention_dropout": "attention_probs_dropout_prob attn_dropout attn_pdrop",
    "model.norm_eps": "layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon "
    "rms_norm_eps",
    "model.init_std": "init_method_std initializer_range",
    "model.n_labels": "n_classes num_classes num_labels",
    "data.path": "data_path dataset train_data",
    "data.seq_len": "block_size context_length max_length seq_length sequence_length",
    "data.tokenizer": "tokenizer_name tokenizer_path",
    "layout.cols": "model_parallel_size tensor_model_parallel_size tensor_parallel "
    "tensor_parallel_size tp tp_degree tp_size",
    "layout.pp": "num_stages pipeline_model_parallel_size pipeline_parallel "
    "pipeline_parallel_size pp_degree pp_size",
    "layout.dp": "data_parallel data_parallel_size dp_degree dp_size num_replicas replicas",
    "layout.dp_mode": "ddp zero zero_optimization zero_stage",
    "layout.dp_mode=fsdp": "fsdp fully_sharded",
    "layout.shard_over": "dp_shard data_parallel_shard_degree hsdp mics_shard_size "
    "zero_hpz_partition_size",
    "layout.gradient_sync": "requires_gradient_sync sync_each_batch",
    "layout.micro_batches": "accumulate_grad_batches accumulation_steps chunks grad_accum "
    "grad_accum_steps gradient_accumulation gradient_accumulation_steps microbatches n_micro_batch "
    "num_microbatches",
    "train.loss_chunk_tokens": "loss_tokens",
    "layout.stages_per_rank": "num_layers_per_virtual_pipeline_stage virtual_pipeline_size",
    "train.steps": "iterations iters max_iters max_steps num_steps num_train_steps total_steps "
    "train_iters train_steps",
    "train.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "train.global_batch": "batch batch_size global_batch_size micro_batch_size "
    "per_device_batch_size per_device_train_batch_size per_gpu_train_batch_size train_batch_size",
    "train.lr": "base_lr learning_rate max_lr peak_lr",
    "train.lr_schedule": "lr_decay_style lr_scheduler lr_scheduler_type scheduler",
    "train.min_lr_ratio": "eta_min lr_min min_learning_rate min_lr",
    "train.warmup_steps": "lr_warmup_iters num_warmup_steps warmup warmup_iters",
    "train.warmup_fraction": "lr_warmup_fraction warmup_ratio",
    "train.weight_decay": "decay wd",
    "train.beta1": "adam_beta_1 betas adam_betas",
    "train.adam_eps": "adam_epsilon eps epsilon",
    "train.clip_norm": "clip clip_grad clip_grad_norm grad_clip grad_norm_clip gradient_clip_val "
    "gradient_clipping max_grad_norm max_norm",
    "train.dtype": "amp autocast mixed_precision precision torch_dtype",
    "train.dtype=bfloat16": "bf16 bfloat16",
    "train.dtype=float16": "float16 fp16 half",
    "train.dtype=float32": "float32 fp32",
    "train.tf32": "allow_tf32 fp32_precision matmul_precision",
    "train.recompute": "activation_checkpointing checkpoint_activations gradient_checkpointing "
    "recompute_activations recompute_granularity",
    "train.compile": "torch_compile use_compile",
    "train.device": "accelerator gpu use_cpu use_cuda",
    "train.loggers": "logger logging report_to tensorboard wandb",
    "train.eval_every": "eval_freq eval_interval eval_steps val_check_interval",
    "train.eval_batches": "eval_iters max_eval_batches",
    "train.save_every": "checkpoint_interval save_freq save_interval save_steps",
    "train.keep_checkpoints": "keep_last save_top_k save_total_limit",
    "train.init_from": "finetune load pretrained pretrained_model_name_or_path",
    "train.seed": "manual_seed random_seed",
}
KEYS: Final = {word: key for key, words in _WORDS.items() for word in words.split()}

# Text that is added to the suggestion of a key whose values differ from those of the other word.
NOTES: Final = {
    "layout.cols": ", with layout.scheme=megatron",
    "layout.micro_batches": ", into which the batch of each replica is divided",
    "train.beta1": ", beside train.beta2",
    "train.global_batch": ", the samples of a step over all devices",
    "train.min_lr_ratio": ", the part of train.lr that is left at the end",
}

# The same for values that are chosen from a list.
VALUES: Final = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
    "ddp": "replicate",
    "none": "replicate",
    "zero": "zero1",
    "zero3": "fsdp",
    "tp": "megatron",
    "tensor": "megatron",
    "1d": "megatron",
    "2d": "optimus",
    "summa": "optimus",
    "pipedream": "1f1b",
    "zero_bubble": "zb_h1",
    "zbh1": "zb_h1",
    "zb_v": "zbv",
    "zero_bubble_v": "zbv",
    "gpt": "gpt2",
    "mistral": "llama",
    "qwen": "llama",
    "roberta": "bert",
    "clm": "causal",
    "lm": "causal",
    "mlm": "masked",
    "seq2seq": "pairs",
    "translation": "pairs",
    "classification": "classify",
    "multiple_choice": "choice",
    "qa": "answer",
    "question_answering": "answer",
    "sft": "chat",
    "weights_and_biases": "wandb",
}


def plain(word: str) -> str:
    """Returns a word as the tables write it."""
    return word.strip().lower().replace("-", "_")
