"""The plain GPT-2 computes what Hugging Face's GPT2LMHeadModel computes from the same weights."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported; nothing is downloaded

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import GPT2
from gridformer.models.blocks import IGNORE, KVCache
from gridformer.parallel import build_parallel

transformers: Any = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def hugging_face(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Random weights of a spread that makes every part matter; biases and norms included."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.hidden_size,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_inner=config.ffn_size,
            layer_norm_epsilon=config.norm_eps,
            activation_function="gelu_new",
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(mean + 0.2 * noise)
    return model.to(dtype).eval()


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Names of Hugging Face's to ours; the columns of qkv go from [3, n, d] to [n, 3, d]."""
    h, n = config.hidden_size, config.n_heads
    ours = {
        "tokens.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    parts = {
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(config.n_layers):
        for our_part, their_part in parts.items():
            for leaf in ("weight", "bias"):
                value = state[f"transformer.h.{i}.{their_part}.{leaf}"]
                if our_part == "attention.qkv":
                    by_head = value.unflatten(-1, (3, n, h // n)).transpose(-3, -2)
                    value = by_head.flatten(-3)
                ours[f"layers.{i}.{our_part}.{leaf}"] = value
    return ours


def pair(dtype: torch.dtype, **changes: Any) -> tuple[GPT2, Any]:
    values = {
        "n_layers": 3,
        "hidden_size": 48,
        "n_heads": 4,
        "vocab_size": 211,
        "max_seq_len": 32,
    }
    config = ModelConfig(**{**values, **changes})
    name = str(dtype).removeprefix("torch.")
    ours = build_parallel(config, LayoutConfig(), Axes(), 0, torch.device("cpu"), name).eval()
    assert isinstance(ours, GPT2)
    theirs = hugging_face(config, dtype)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config), strict=True)
    return ours, theirs


def tokens_of(model: GPT2, b: int, s: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (b, s), generator=generator)


def assert_close(got: Tensor, want: Tensor) -> None:
    """To 1e-5 of the largest element (float64: 1e-10)."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    difference = float((got - want).detach().abs().max() / want.detach().abs().max())
    assert difference < TOLERANCE[got.dtype], difference


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_heads": 1}, {"n_heads": 48}, {"ffn_size": 80}, {"norm_eps": 0.1}, {"n_layers": 1}],
    ids=str,
)
def test_logits(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Attention's scale, the tanh form of GELU and the norm's epsilon are GPT-2's."""
    ours, theirs = pair(dtype, **changes)
    for s in (1, 7, 32):
        tokens = tokens_of(ours, 3, s)
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits)


@DTYPES
def test_loss(dtype: torch.dtype) -> None:
    """The sum over the targets that count; theirs is the mean, of targets that it shifts itself."""
    ours, theirs = pair(dtype)
    tokens = tokens_of(ours, 3, 20)
    labels = tokens.clone()
    labels[1, 5:9] = IGNORE
    targets = labels[:, 1:]
    with torch.no_grad():
        want = theirs(tokens, labels=labels).loss  # in float32, whatever the model's type
        got = ours.loss_sum(tokens[:, :-1], targets) / (targets != IGNORE).sum()
    assert got.dtype == dtype
    assert_close(got.float(), want)


@DTYPES
def test_gradients(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    tokens = tokens_of(ours, 3, 20)
    logits = theirs(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    ours.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    want = from_hugging_face(grads, ours.config)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, want[name])


@DTYPES
def test_parameters_are_counted_alike(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


# --------------------------------------------------------------------------- generation


@DTYPES
@pytest.mark.parametrize(
    "pieces",
    [
        [1] * 12,
        [5, 1, 1, 1, 1, 1, 1, 1],
        [12],
        [1, 11],
        [4, 3, 1, 4],
    ],
    ids=str,
)
def test_cached_forward_is_the_whole_forward(dtype: torch.dtype, pieces: list[int]) -> None:
    """Tokens fed one by one, or a prompt first, give the logits of all of them at once."""
    ours, _ = pair(dtype)
    tokens = tokens_of(ours, 2, 12)
    caches = [KVCache() for _ in ours.layers]
    start, logits = 0, []
    with torch.no_grad():
        for size in pieces:
            logits.append(ours(tokens[:, start : start + size], caches, start))
            start += size
        assert_close(torch.cat(logits, 1), ours(tokens))


def test_greedy_tokens() -> None:
    """The most likely words, one after another with our cache, are those of model.generate: in
    float64, so that no word hangs on how a processor rounds."""
    ours, theirs = pair(torch.float64)
    prompt = tokens_of(ours, 2, 5)
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
