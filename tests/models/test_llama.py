"""The plain Llama computes what Hugging Face's Llama, Mistral, Qwen2 and Qwen3 compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import ModelConfig, shipped_model
from gridformer.models import count_parameters
from gridformer.models.blocks import KVCache, added_to_scores
from gridformer.models.blocks.scores import Window
from tests.support.marks import full_unless
from tests.support.reference.llama import ARCHITECTURES, V, from_hugging_face, pair
from tests.support.reference.shared import assert_close, tokens_of

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
        },
    },
}
CASES = [
    (architecture, change, dtype)
    for architecture in ARCHITECTURES
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
    ("architecture", "change", "dtype"),
    full_unless(QUICK.__contains__, CASES, unpack=True),
)
def test_logits_and_gradients(architecture: str, change: str, dtype: torch.dtype) -> None:
    """Mistral's window is shorter than the sequence."""
    ours, theirs = pair(architecture, dtype, **CHANGES[change])
    tokens = tokens_of(V, 3, 20)
    logits = theirs(tokens[:, :-1]).logits
    assert_close(ours(tokens[:, :-1]), logits)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    ours.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    want = from_hugging_face(grads, ours.config)
    assert {name for name, _ in ours.named_parameters()} == want.keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, want[name])


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
    found = []
    for chunk in (0, 6):
        ours, _ = pair("llama", torch.float64)
        ours.loss_chunk_tokens = chunk
        ours.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append({name: p.grad for name, p in ours.named_parameters()})
    for (name, whole), chunked in zip(found[0].items(), found[1].values()):
        assert whole is not None, name
        assert chunked is not None, name
        assert_close(chunked, whole)


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
    found = count_parameters(config)
    assert found / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    tables = config.n_tables * config.vocab_size * config.hidden_size
    assert found == pytest.approx(config.n_layers * config.layer_elements + tables, rel=1e-3)


# --------------------------------------------------------------------------- generation


@pytest.mark.parametrize("architecture", full_unless({"mistral"}.__contains__, ARCHITECTURES))
def test_cached_forward_equals_full_forward(architecture: str) -> None:
    """Tokens fed one by one, or after a prompt, give the logits of all of them at once.

    A window's cache keeps no more than what the next token sees, besides a prompt.
    """
    ours, _ = pair(architecture, torch.float64, rope_scaling=YARN)
    tokens = tokens_of(V, 2, 16)
    with torch.no_grad():
        want = ours(tokens)
    for pieces in ([1] * 16, [7, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 15], [3, 4, 1, 8]):
        caches = [KVCache() for _ in ours.layers]
        start, logits = 0, []
        for size in pieces:
            with torch.no_grad():
                logits.append(ours(tokens[:, start : start + size], caches, start))
            start += size
        assert_close(torch.cat(logits, 1), want)
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


@pytest.mark.parametrize("architecture", full_unless({"qwen3"}.__contains__, ARCHITECTURES))
def test_greedy_tokens(architecture: str) -> None:
    """Greedy decoding with our cache gives the words of model.generate."""
    ours, theirs = pair(architecture, torch.float64)
    prompt = tokens_of(V, 2, 5)
    with torch.no_grad():
        want = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        got, new, start = prompt, prompt, 0
        caches = [KVCache() for _ in ours.layers]
        while got.shape[1] < 25:
            logits = ours(new, caches, start)
            start = got.shape[1]
            new = logits[:, -1:].argmax(-1)
            got = torch.cat((got, new), 1)
    assert torch.equal(got, want)


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
