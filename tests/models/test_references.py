"""Plain models compute what Hugging Face's and torch's compute from the same weights."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import ModelConfig, shipped_model
from gridformer.models import BERT, Model, build_model, count_parameters
from gridformer.models.blocks import IGNORE, KVCache, SinusoidalPositions, added_to_scores
from gridformer.models.blocks.scores import Window
from tests.support.marks import full_unless
from tests.support.reference import transformer
from tests.support.reference.shared import (
    DTYPES,
    LLAMAS,
    S,
    V,
    assert_close,
    config_of,
    from_hugging_face,
    lengths_mask,
    pair,
    plain,
    randomize,
    tokens_of,
)
from tests.support.reference.transformer import published, torchs


def assert_same_gradients(
    ours: Model, theirs: Any, zero: tuple[str, ...] = (), translate: Any = from_hugging_face
) -> None:
    """Compare all gradients but those of parameters that only rounding noise moves."""
    want = translate({name: p.grad for name, p in theirs.named_parameters()}, ours.config)
    assert {name for name, _ in ours.named_parameters()} == want.keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        if not name.endswith(zero or ("-",)):
            assert_close(parameter.grad, want[name])


def assert_same_training(ours: Any, theirs: Any) -> None:
    """Compare logits, and gradients of the sum of losses of all next words."""
    tokens = tokens_of(V, 3, 20)
    logits = theirs(tokens[:, :-1]).logits
    assert_close(ours(tokens[:, :-1]), logits)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    ours.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    assert_same_gradients(ours, theirs)


def piece_by_piece(ours: Any, tokens: Tensor, pieces: list[int]) -> tuple[Tensor, list[KVCache]]:
    """Return logits of tokens that are fed in pieces, and the caches."""
    caches = [KVCache() for _ in ours.layers]
    start, logits = 0, []
    for size in pieces:
        with torch.no_grad():
            logits.append(ours(tokens[:, start : start + size], caches, start))
        start += size
    return torch.cat(logits, 1), caches


# --------------------------------------------------------------------------- GPT-2


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_heads": 1}, {"n_heads": 48}, {"ffn_size": 80}, {"norm_eps": 0.1}, {"n_layers": 1}],
    ids=str,
)
def test_gpt2(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """The attention scale, the tanh form of GELU and the norm's epsilon are GPT-2's."""
    ours, theirs = pair("gpt2", dtype, **changes)
    for s in (1, 7, 32):
        tokens = tokens_of(V, 3, s)
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits)
    assert_same_training(ours, theirs)


# --------------------------------------------------------------------------- Llama and its kin

LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Sizes and keys that any of the architectures may have.
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "all heads": {"n_kv_heads": 0},
    "one key head": {"n_kv_heads": 1, "n_heads": 6},
    "wide heads": {"head_dim": 20},
    "narrow heads": {"head_dim": 2, "n_layers": 1},
    "tied": {"tied_head": True, "norm_eps": 0.1},
    "linear": {"rope_scaling": {"kind": "linear", "factor": 3.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 100.0},
    "yarn": {"rope_scaling": YARN, "rope_theta": 1000.0},
    # Every pair turns so often that the ramp ends beyond the last one.
    "yarn, short waves": {
        "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
        "rope_theta": 10.0,
    },
    "yarn, all keys": {
        "rope_scaling": {
            **YARN,
            **{"attention_factor": 1.5, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        }
    },
}
CASES = [
    (architecture, change, dtype)
    for architecture in LLAMAS
    for change in CHANGES
    for dtype in (torch.float32, torch.float64)
]
QUICK = {
    ("llama", "llama3", torch.float64),
    ("llama", "tied", torch.float32),
    ("llama", "linear", torch.float64),
    ("mistral", "none", torch.float64),
    ("qwen2", "one key head", torch.float64),
    ("qwen3", "yarn", torch.float64),
    ("qwen3", "yarn, short waves", torch.float64),
    ("qwen3", "wide heads", torch.float32),
}


@pytest.mark.parametrize(
    ("architecture", "change", "dtype"), full_unless(QUICK.__contains__, CASES, unpack=True)
)
def test_llama(architecture: str, change: str, dtype: torch.dtype) -> None:
    """Mistral's window is shorter than the sequence."""
    ours, theirs = pair(architecture, dtype, **CHANGES[change])
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("architecture", full_unless({"qwen2"}.__contains__, ["qwen2", "qwen3"]))
def test_a_window_of_any_architecture(architecture: str) -> None:
    """Windows that are longer than the sequence hide nothing."""
    tokens = tokens_of(V, 2, 12)
    for window in (1, 3, 11, 12, 40):
        ours, theirs = pair(architecture, torch.float64, window=window)
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits)


def test_chunks_of_the_loss_give_the_same_gradients() -> None:
    """The gradient of an untied head is counted once."""
    tokens = tokens_of(V, 2, 12)
    whole, chunked = (pair("llama", torch.float64)[0] for _ in range(2))
    chunked.loss_chunk_tokens = 6
    for model in (whole, chunked):
        model.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    assert_same_gradients(chunked, whole, translate=lambda grads, config: grads)


# Billions of parameters, as the cards of the published models say.
PUBLISHED = {
    "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.71,
    "llama-3.2-1b": 1.23, "llama-3.2-3b": 3.21,
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.1-405b": 406,
    "mistral-7b": 7.24, "qwen3-0.6b": 0.6, "qwen3-8b": 8.2, "qwen3-32b": 32.8,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", full_unless({"smollm2-135m", "qwen3-0.6b"}.__contains__, PUBLISHED)
)
def test_shipped_models_have_their_published_size(name: str) -> None:
    config = ModelConfig.model_validate(shipped_model(name))
    n_parameters = count_parameters(config)
    assert n_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    assert n_parameters == pytest.approx(config.matrix_elements, rel=1e-3)


@pytest.mark.parametrize("name", full_unless({"gpt2", "mistral"}.__contains__, ["gpt2", *LLAMAS]))
def test_cached_forward(name: str) -> None:
    """Tokens fed one by one, or after a prompt, give the logits of all of them at once.

    A window's cache keeps no more than what the next token sees, besides a prompt.
    """
    ours, _ = pair(name, torch.float64, **({} if name == "gpt2" else {"rope_scaling": YARN}))
    tokens = tokens_of(V, 2, 16)
    with torch.no_grad():
        want = ours(tokens)
    for pieces in ([1] * 16, [7, 1, 1, 1, 1, 1, 1, 1, 1, 1], [16], [1, 15], [3, 4, 1, 8]):
        logits, caches = piece_by_piece(ours, tokens, pieces)
        assert_close(logits, want)
        kept = caches[0].k
        assert kept is not None
        window = ours.config.window
        seen = min(16, window - 1 + pieces[-1]) if window else 16
        assert kept.shape == (2, ours.config.kv_heads, seen, ours.config.head_width)


def test_a_cache_can_be_taken_back() -> None:
    """As where tokens are read again to have an even number: 3 are read, of which 1 is new."""
    ours, _ = pair("mistral", torch.float64)
    tokens = tokens_of(V, 2, 16)
    caches = [KVCache() for _ in ours.layers]
    with torch.no_grad():
        want = ours(tokens)
        ours(tokens[:, :8], caches)
        for start in range(6, 14):
            for cache in caches:
                cache.keep(start)
            assert_close(ours(tokens[:, start : start + 3], caches, start), want[:, start:][:, :3])


def test_padding_beyond_a_window_gives_numbers() -> None:
    """A padded query whose window is all padding attends to itself, and to no other token."""
    valid = torch.tensor([[True, False, False, False]])
    window = Window(2, 4, valid.device)
    mask = added_to_scores(4, torch.float64, valid[:, None, None, :], causal=True, window=window)
    assert isinstance(mask, Tensor)
    seen = (mask == 0.0)[0, 0].tolist()
    assert seen[0] == [True, False, False, False]
    assert seen[1] == [True, True, False, False]
    assert seen[3] == [False, False, False, True]


def test_a_part_of_the_queries_sees_what_the_whole_sees() -> None:
    """Rows over the sequence give the first queries few keys, which a window may not divide.

    Padded queries see the same as on one device, since a loss of balance counts them, too.
    """
    valid = torch.tensor([[True, False, False, False, False, False]])[:, None, None, :]

    def seen(queries: int) -> Tensor:
        window = Window(3, queries, valid.device)
        mask = added_to_scores(
            queries, torch.float64, valid[..., :queries], causal=True, window=window
        )
        assert isinstance(mask, Tensor)
        return mask[0, 0]

    for queries in (1, 2, 3, 5):
        assert torch.equal(seen(queries), seen(6)[:queries, :queries])


# --------------------------------------------------------------------------- BERT


@DTYPES
@pytest.mark.parametrize(
    "changes", [{}, {"n_heads": 1}, {"ffn_size": 80}, {"n_layers": 1}, {"norm_eps": 0.1}], ids=str
)
def test_logits_of_bert(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Compare logits of words and of the sentence pair, with padding and any lengths of B."""
    ours, theirs = pair("bert", dtype, **changes)
    tokens = tokens_of(V, 3, S)
    segments = (~lengths_mask([9, 24, 1], S)).long()
    valid = lengths_mask([24, 17, 5], S)
    batch = {"tokens": tokens, "segments": segments, "valid": valid}
    with torch.no_grad():
        got = ours.logits({**batch, "pair": torch.zeros(3, dtype=torch.int64)})
        want = theirs(tokens, attention_mask=valid.long(), token_type_ids=segments)
        assert_close(got["tokens"][valid], want.prediction_logits[valid])
        assert_close(got["pair"], want.seq_relationship_logits.flip(-1))
        assert_close(ours(tokens), theirs(tokens).prediction_logits)


@DTYPES
def test_losses_and_gradients_of_bert(dtype: torch.dtype) -> None:
    """Hugging Face's loss is the sum of the two means; its next-sentence label 0 is our 1."""
    ours, theirs = pair("bert", dtype)
    tokens, segments = tokens_of(V, 4, S), (~lengths_mask([9, 24, 1, 12], S)).long()
    targets = torch.where(torch.rand(4, S) < 0.15, tokens_of(V, 4, S, seed=2), IGNORE)
    follows = torch.tensor([1, 0, 0, 1])
    out = theirs(tokens, token_type_ids=segments)
    words = F.cross_entropy(out.prediction_logits.flatten(0, 1), targets.flatten())
    want = words + F.cross_entropy(out.seq_relationship_logits, 1 - follows)
    want.backward()
    batch = {"tokens": tokens, "segments": segments, "targets": targets, "pair": follows}
    losses, counts = ours.losses(batch), ours.counts(batch)
    n_words = int((targets != IGNORE).sum())
    assert {name: int(n) for name, n in counts.items()} == {"tokens": n_words, "pair": 4}
    got = losses["tokens"] / counts["tokens"] + losses["pair"] / counts["pair"]
    got.backward()
    assert_close(got.detach(), want.detach())
    assert_same_gradients(ours, theirs, ("qkv.bias",))  # keys' are noise


def test_pre_norm_puts_a_norm_before_each_sub_layer_and_one_at_the_end() -> None:
    """Megatron has x + f(norm(x)), no norm of the embedding, and one before the head."""
    config = config_of("bert", norm_position="pre")
    random = randomize(build_model(config).double(), torch.float64).named_parameters()
    ours = plain(config, torch.float64, {name: p.detach() for name, p in random})
    assert isinstance(ours, BERT)
    tokens = tokens_of(V, 2, S)
    x = ours.tokens(tokens) + ours.positions(S) + ours.segments(torch.zeros_like(tokens))
    layer: Any
    for layer in ours.layers.values():
        x = x + layer.attention(layer.norm1(x))
        x = x + layer.mlp(layer.norm2(x))
    words = ours.head_norm(F.gelu(ours.transform(ours.norm(x))))
    assert_close(ours(tokens), words @ ours.tokens.weight.t() + ours.head.bias)


# --------------------------------------------------------------------------- T5


# Theirs computes sums of squares and softmax in float32 for any type, so float32 is compared.
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"n_heads": 1}, {"head_dim": 16}, {"ffn_size": 80}, {"norm_eps": 0.1}),
        {"relative_buckets": 8, "relative_max_distance": 20},
    ],
    ids=str,
)
def test_logits_of_t5(changes: dict[str, Any]) -> None:
    """Distances up to 63 reach the widest buckets; sources have padding."""
    ours, theirs = pair("t5", torch.float32, **changes)
    source, tokens = tokens_of(V, 3, 64), tokens_of(V, 3, 40, seed=2)
    valid = lengths_mask([64, 17, 1], 64)
    with torch.no_grad():
        want = theirs(source, attention_mask=valid.long(), decoder_input_ids=tokens).logits
        assert_close(ours(source, tokens, valid), want)
        assert_close(ours(source, tokens), theirs(source, decoder_input_ids=tokens).logits)


def test_loss_and_gradients_of_t5() -> None:
    ours, theirs = pair("t5", torch.float32)
    source, tokens = tokens_of(V, 3, 20), tokens_of(V, 3, 9, seed=2)
    targets = tokens_of(V, 3, 9, seed=3)
    targets[1, 6:] = IGNORE
    logits = theirs(source, decoder_input_ids=tokens).logits
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    want.backward()
    got = ours.losses({"source": source, "tokens": tokens, "targets": targets})["tokens"]
    got.backward()
    assert_close(got.detach(), want.detach())
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6], [12]], ids=str)
def test_cached_decoding_of_t5(pieces: list[int]) -> None:
    ours, _ = pair("t5", torch.float32)
    source, tokens = tokens_of(V, 2, 20), tokens_of(V, 2, 12, seed=2)
    valid = lengths_mask([20, 7], 20)
    caches = [KVCache() for _ in ours.decoder.layers]
    start, logits = 0, []
    with torch.no_grad():
        memory = ours.encode({"source": source, "source_valid": valid})
        for size in pieces:
            piece = tokens[:, start : start + size]
            logits.append(ours.decode(piece, memory, valid, caches, start))
            start += size
        assert_close(torch.cat(logits, 1), ours(source, tokens, valid))


# --------------------------------------------------------------------------- the Transformer


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("position", ["post", "pre"])
def test_logits_of_the_transformer(position: str, eps: float) -> None:
    """Compare with torch.nn.Transformer."""
    ours = transformer.model_of(norm_position=position, norm_eps=eps)
    theirs = torchs(ours)
    source, tokens = tokens_of(transformer.V, 3, 20), tokens_of(transformer.V, 3, 11, seed=2)
    valid = lengths_mask([20, 7, 1], 20)
    table = ours.tokens.weight

    def embed(t: Tensor) -> Tensor:
        return table[t] * math.sqrt(48) + published(t.shape[1], 48)

    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    with torch.no_grad():
        hidden = theirs(
            embed(source),
            embed(tokens),
            tgt_mask=future,
            src_key_padding_mask=~valid,
            memory_key_padding_mask=~valid,
        )
        assert_close(ours(source, tokens, valid), hidden @ table.t())


@pytest.mark.parametrize("start", [0, 5])
def test_sinusoids(start: int) -> None:
    got = SinusoidalPositions(8)(6, start, torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(got, published(start + 6, 8)[start:], atol=1e-12)
    want, part = SinusoidalPositions(12)(6, 2, torch.zeros(1)), SinusoidalPositions(12)
    part.part, part.columns = (1, 2), (2, 3)
    assert torch.equal(part(6, 2, torch.zeros(1)), want[3:, 8:])


def test_labels_are_smoothed_in_training_alone() -> None:
    ours = transformer.model_of(label_smoothing=0.1)
    source, tokens, targets = (tokens_of(transformer.V, 2, n, seed=n) for n in (9, 7, 7))
    batch = {"source": source, "tokens": tokens, "targets": targets}
    logits = ours(source, tokens).flatten(0, 1)
    for smoothing in (0.1, 0.0):
        ours.train(smoothing > 0)
        want = F.cross_entropy(
            logits, targets.flatten(), reduction="sum", label_smoothing=smoothing
        )
        assert_close(ours.losses(batch)["tokens"].detach(), want.detach())
