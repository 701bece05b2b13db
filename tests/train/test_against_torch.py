"""Whole training steps against Hugging Face's models trained by plain torch, with dropout.

Other tests compare layouts with one device, which cannot reveal what is wrong on all of them. Here
the reference is other people's code: their model, torch's AdamW, `clip_grad_norm_` and a torch
schedule. Their dropout modules apply masks made from the documented formula (`Masked`), so a mask
at another place, of another step, or without scaling is noticed. The comparison uses float64 where
their model allows it, because rounding is then far below the differences of interest.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils import rng
from gridformer.utils.batch import IGNORE, Batch, next_words
from tests.support.reference import transformer
from tests.support.reference.shared import (
    S,
    V,
    config_of,
    from_hugging_face,
    hugging_face,
    lengths_mask,
    pair,
    plain,
    tokens_of,
)

SEED, DROPOUT, ATTENTION_DROPOUT = 5, 0.2, 0.3
RATES = {"dropout": DROPOUT, "attention_dropout": ATTENTION_DROPOUT}


class Masked(nn.Module):
    """Their dropout: keeps an element if hash(seed, step, site, global index) is large enough.

    Kept elements are divided by the probability of being kept.
    """

    def __init__(self, site: str, p: float, now: SimpleNamespace) -> None:
        super().__init__()
        self.site, self.p, self.now = site, p, now

    def forward(self, x: Tensor) -> Tensor:
        """Mask [b, s, h], or probabilities [b, n, s, S]."""
        if not self.training:
            return x
        b, *between, columns = x.shape
        samples = torch.arange(self.now.first_sample, self.now.first_sample + b)
        indices = [samples, *(torch.arange(n) for n in between)]
        shaped = [
            index.view(-1, *[1] * (len(indices) - 1 - place)) for place, index in enumerate(indices)
        ]
        key = rng.key(SEED, self.now.step, self.site)
        words = rng.bits(key, rng.hash_indices(*shaped), torch.arange(columns))
        return torch.where(words / 2.0**32 < self.p, 0.0, x / (1 - self.p))


@contextmanager
def their_probabilities_are_masked(sites: dict[nn.Module, Masked]) -> Iterator[None]:
    """Make their attention's dropout function use the mask of the calling module."""
    calling: list[nn.Module] = []
    handles = []
    for module in sites:
        handles.append(module.register_forward_pre_hook(lambda module, _: calling.append(module)))
        handles.append(module.register_forward_hook(lambda *_: calling.pop() and None))
    original = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not calling or x.dim() != 4:
            return original(x, p, training, inplace)
        return sites[calling[-1]].train(training)(x)

    with patch.object(F, "dropout", dropout):
        yield
    for handle in handles:
        handle.remove()


# --------------------------------------------------- GPT-2, many steps

TRAIN: dict[str, Any] = {
    "global_batch": 4, "steps": 6, "lr": 3e-2, "min_lr_ratio": 0.2, "warmup_steps": 2,
    "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.7, "adam_eps": 1e-3, "clip_norm": 0.5,
    "seed": SEED,
}  # fmt: skip


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return TRAIN's schedule, built by torch: warm-up from half of the rate, then a cosine."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    warm = LinearLR(optimizer, 0.5, 1.0, total_iters=1)
    least = TRAIN["lr"] * TRAIN["min_lr_ratio"]
    falls = CosineAnnealingLR(optimizer, TRAIN["steps"] - 1 - TRAIN["warmup_steps"], least)
    return SequentialLR(optimizer, [warm, falls], [TRAIN["warmup_steps"]])


def torchs_optimizer(theirs: nn.Module) -> torch.optim.AdamW:
    """Vectors, which are biases and norms, do not decay."""
    named = list(theirs.named_parameters())
    vectors = [p for name, p in named if name.endswith(".bias") or "ln_" in name]
    matrices = [p for name, p in named if not (name.endswith(".bias") or "ln_" in name)]
    assert all(p.dim() == 2 for p in matrices)
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": TRAIN["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=TRAIN["lr"],
        betas=(TRAIN["beta1"], TRAIN["beta2"]),
        eps=TRAIN["adam_eps"],
    )


def masked_gpt2(theirs: Any, now: SimpleNamespace) -> None:
    theirs.transformer.drop = Masked("embedding", DROPOUT, now)
    for i, block in enumerate(theirs.transformer.h):
        block.attn.resid_dropout = Masked(f"layers.{i}.dropout1", DROPOUT, now)
        block.mlp.dropout = Masked(f"layers.{i}.dropout2", DROPOUT, now)


def probabilities_of_gpt2(theirs: Any, now: SimpleNamespace) -> dict[nn.Module, Masked]:
    blocks = enumerate(theirs.transformer.h)
    return {
        block.attn: Masked(f"layers.{i}.attention", ATTENTION_DROPOUT, now) for i, block in blocks
    }


@pytest.mark.parametrize("dropout", [False, True], ids=["plain", "dropout"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gpt2_trains_as_torch_trains_it(micro_batches: int, dropout: bool) -> None:
    """Compare losses, norms, learning rates and, after a whole schedule, every parameter."""
    rates = RATES if dropout else {}
    same, theirs = pair("gpt2", torch.float64, n_layers=2, max_seq_len=12, **rates)
    ours = build_parallel(same.config, LayoutConfig(), Axes(), SEED, torch.device("cpu"), "float64")
    ours.load_state_dict(same.state_dict())
    stepper = Stepper(ours, TrainConfig(**TRAIN), Axes(), LayoutConfig(micro_batches=micro_batches))
    optimizer = torchs_optimizer(theirs)
    rate = schedule(optimizer)
    now = SimpleNamespace(step=0, first_sample=0)
    probabilities: dict[nn.Module, Masked] = {}
    if dropout:
        masked_gpt2(theirs, now)
        probabilities = probabilities_of_gpt2(theirs, now)
    clipped = 0
    for step in range(TRAIN["steps"]):
        windows = tokens_of(211, 4, 13, seed=100 + step)
        batch = next_words(windows)
        batch["targets"] = batch["targets"].clone()
        batch["targets"][step % 4, 2 + step :] = IGNORE  # another number in each row
        now.step = step
        optimizer.zero_grad()
        with their_probabilities_are_masked(probabilities):
            logits = theirs.train(dropout)(batch["tokens"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), TRAIN["clip_norm"])
        clipped += float(norm) > TRAIN["clip_norm"]
        want = float(loss.detach()), float(norm), optimizer.param_groups[0]["lr"]
        optimizer.step()
        rate.step()
        got = stepper(step, lambda rows, batch=batch: {k: v[rows] for k, v in batch.items()})  # type: ignore[misc]
        assert (got.loss, got.grad_norm, got.lr) == pytest.approx(want, rel=1e-9)
        assert got.tokens == 4 * 12
    assert clipped, "the test must clip"
    expected = from_hugging_face(theirs.state_dict(), ours.config)
    for name, parameter in ours.named_parameters():
        if name.endswith("qkv.bias"):  # the keys' gradient is rounding noise around zero
            continue
        difference = float((parameter - expected[name]).detach().abs().max())
        assert difference < 1e-9 * float(expected[name].abs().max()), name


# ------------------------------------------------------- the other families: losses and gradients


def gradients_of(ours: Model, batch: Batch, step: int, first_sample: int) -> dict[str, Tensor]:
    """Return gradients of summed losses in training, for samples from `first_sample` on."""
    ours.train()
    ours.dropout_rng.seed, ours.dropout_rng.step = SEED, step
    ours.dropout_rng.first_sample = first_sample
    losses = ours.losses(batch)
    torch.stack([*losses.values()]).sum().backward()
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    return {**found, **{f"loss of {name}": loss.detach() for name, loss in losses.items()}}


def assert_alike(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    """Compare gradients, except those of the keys' bias, which are only rounding noise."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        scale = float(want[name].abs().max())
        if not name.endswith("qkv.bias"):
            assert float((value - want[name]).abs().max()) < limit * scale, name


def test_berts_masks_are_where_the_formula_says() -> None:
    config = config_of("bert", n_layers=2, **RATES)
    theirs = hugging_face("bert", config, torch.float64)
    state = from_hugging_face(theirs.state_dict(), config)
    ours = plain(config, torch.float64, state)
    now = SimpleNamespace(step=3, first_sample=2)
    theirs.bert.embeddings.dropout = Masked("embedding", DROPOUT, now)
    probabilities: dict[nn.Module, Masked] = {}
    for i, layer in enumerate(theirs.bert.encoder.layer):
        layer.attention.output.dropout = Masked(f"layers.{i}.dropout1", DROPOUT, now)
        layer.output.dropout = Masked(f"layers.{i}.dropout2", DROPOUT, now)
        site = f"layers.{i}.attention"
        probabilities[layer.attention.self] = Masked(site, ATTENTION_DROPOUT, now)
    v, s = V, S
    valid = lengths_mask([24, 17, 5], s)
    targets = tokens_of(v, 3, s, seed=3).masked_fill(~valid, IGNORE)
    batch = {
        "tokens": tokens_of(v, 3, s),
        "segments": (~lengths_mask([9, 17, 1], s)).long(),
        "valid": valid,
        "targets": targets,
        "pair": torch.tensor([1, 0, 1]),
    }
    with their_probabilities_are_masked(probabilities):
        out = theirs.train()(
            batch["tokens"], attention_mask=valid.long(), token_type_ids=batch["segments"]
        )
    losses = {
        "tokens": F.cross_entropy(
            out.prediction_logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ),
        "pair": F.cross_entropy(out.seq_relationship_logits, 1 - batch["pair"], reduction="sum"),
    }
    torch.stack([*losses.values()]).sum().backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    want = from_hugging_face(grads, config)
    want |= {f"loss of {name}": loss.detach() for name, loss in losses.items()}
    assert_alike(gradients_of(ours, batch, 3, 2), want, 1e-9)


def test_t5s_masks_are_where_the_formula_says() -> None:
    """T5 also drops within the feed-forward and at a stack's end, which is switched off here.

    It computes softmax and sums of squares in float32 whatever its type.
    """
    config = config_of("t5", **RATES)
    theirs = hugging_face("t5", config, torch.float32)
    theirs.set_attn_implementation("eager")
    state = from_hugging_face(theirs.state_dict(), config)
    ours = plain(config, torch.float32, state)
    now = SimpleNamespace(step=3, first_sample=2)
    probabilities: dict[nn.Module, Masked] = {}
    for stack, name in ((theirs.encoder, "encoder"), (theirs.decoder, "decoder")):
        stack.dropout = FirstOf(Masked(f"{name}.embedding", DROPOUT, now))
        for i, block in enumerate(stack.block):
            site, between, last = f"{name}.layers.{i}", block.layer[1:-1], block.layer[-1]
            block.layer[0].dropout = Masked(f"{site}.dropout1", DROPOUT, now)
            attention = block.layer[0].SelfAttention
            probabilities[attention] = Masked(f"{site}.attention", ATTENTION_DROPOUT, now)
            for cross in between:
                cross.dropout = Masked(f"{site}.cross_dropout", DROPOUT, now)
                probabilities[cross.EncDecAttention] = Masked(
                    f"{site}.cross_attention", ATTENTION_DROPOUT, now
                )
            last.dropout = Masked(f"{site}.dropout2", DROPOUT, now)
            last.DenseReluDense.dropout = nn.Identity()
    v = V
    valid = lengths_mask([20, 7, 1], 20)
    targets = tokens_of(v, 3, 9, seed=3)
    targets[1, 6:] = IGNORE
    source, tokens = tokens_of(v, 3, 20), tokens_of(v, 3, 9, seed=2)
    batch = {"source": source, "source_valid": valid, "tokens": tokens, "targets": targets}
    with their_probabilities_are_masked(probabilities):
        logits = (
            theirs.train()(source, attention_mask=valid.long(), decoder_input_ids=tokens)
        ).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    want = from_hugging_face(grads, config)
    want["loss of tokens"] = loss.detach()
    assert_alike(gradients_of(ours, batch, 3, 2), want, 1e-4)


class FirstOf(nn.Module):
    """Masks only the first use of a module.

    Their stacks use one module before the first layer and after the last.
    """

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout, self.calls = dropout, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.dropout(x) if self.calls == 1 else x
        return out


@pytest.mark.parametrize("position", ["post", "pre"])
def test_the_transformers_masks_are_where_the_formula_says(position: str) -> None:
    """Compare with torch.nn.Transformer, without dropout of attention probabilities."""
    ours = transformer.model_of(norm_position=position, dropout=DROPOUT)
    theirs = transformer.torchs(ours).train()
    now = SimpleNamespace(step=3, first_sample=2)

    def masked(site: str) -> Masked:
        return Masked(site, DROPOUT, now)

    for name, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        for i, layer in enumerate(stack.layers):
            sites = ["dropout1", "dropout2"]
            if name == "decoder":
                sites = ["dropout1", "cross_dropout", "dropout2"]
            for number, site in enumerate(sites, start=1):
                setattr(layer, f"dropout{number}", masked(f"{name}.layers.{i}.{site}"))
    v, h = transformer.V, ours.config.hidden_size
    source, tokens, targets = tokens_of(v, 3, 20), tokens_of(v, 3, 11, 2), tokens_of(v, 3, 11, 3)
    valid = lengths_mask([20, 7, 1], 20)
    batch = {"source": source, "source_valid": valid, "tokens": tokens, "targets": targets}
    table = ours.tokens.weight.detach().clone().requires_grad_()

    def embed(t: Tensor, site: str) -> Tensor:
        positions = transformer.published(t.shape[1], h)
        return masked(site)(table[t] * math.sqrt(h) + positions)

    hidden = theirs(
        embed(source, "encoder.embedding"),
        embed(tokens, "decoder.embedding"),
        tgt_mask=torch.ones(11, 11, dtype=torch.bool).triu(1),
        src_key_padding_mask=~valid,
        memory_key_padding_mask=~valid,
    )
    loss = F.cross_entropy((hidden @ table.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    assert table.grad is not None
    want = {"tokens.weight": table.grad, "loss of tokens": loss.detach()}
    got = gradients_of(ours, batch, 3, 2)
    assert_alike({name: got[name] for name in want}, want, 1e-9)


# --------------------------------------------------- losses


def test_several_losses_are_added_each_as_a_mean() -> None:
    """The reference is autograd on the sum of BERT's two means, over two uneven micro-batches.

    The number of hidden words differs between them. The step reports the same sum and its parts.
    """
    config = config_of("bert", n_layers=1)
    theirs = hugging_face("bert", config, torch.float64)
    state = from_hugging_face(theirs.state_dict(), config)
    v, s = V, S
    targets = tokens_of(v, 4, s, seed=3).masked_fill(~lengths_mask([3, 1, 12, 20], s), IGNORE)
    batch = {"tokens": tokens_of(v, 4, s), "targets": targets, "pair": torch.tensor([1, 0, 0, 1])}
    out = theirs(batch["tokens"])
    words = F.cross_entropy(out.prediction_logits.flatten(0, 1), targets.flatten())
    pair = F.cross_entropy(out.seq_relationship_logits, 1 - batch["pair"])
    (words + pair).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), math.inf)
    words, pair = words.detach(), pair.detach()
    ours = plain(config, torch.float64, state)
    train = TrainConfig(global_batch=4, clip_norm=0.0)
    stepper = Stepper(ours, train, Axes(), LayoutConfig(micro_batches=2))
    got = stepper(0, lambda rows: {key: value[rows] for key, value in batch.items()})
    assert got.losses == pytest.approx({"tokens": float(words), "pair": float(pair)}, rel=1e-9)
    assert got.loss == pytest.approx(float(words + pair), rel=1e-9)
    assert got.grad_norm == pytest.approx(float(norm), rel=1e-9)


def test_an_evaluation_is_a_mean_over_all_targets_without_dropout() -> None:
    """Compare with Hugging Face's model in eval, on batches with different numbers of targets."""
    ours, theirs = pair("gpt2", torch.float64, n_layers=1, max_seq_len=12, **RATES)
    batches = []
    for number, counted in enumerate(([12, 12], [1, 2], [5, 0])):
        batch = next_words(tokens_of(211, 2, 13, seed=number))
        ignored = ~lengths_mask(counted, 12)
        batches.append({**batch, "targets": batch["targets"].masked_fill(ignored, IGNORE)})
    with torch.no_grad():
        logits = torch.cat([theirs.eval()(batch["tokens"]).logits for batch in batches])
    targets = torch.cat([batch["targets"] for batch in batches])
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    stepper = Stepper(ours.train(), TrainConfig(global_batch=2), Axes())

    def read_of(batch: Batch) -> ReadRows:
        return lambda rows: {key: value[rows] for key, value in batch.items()}

    found = stepper.evaluate([read_of(batch) for batch in batches])
    assert found.loss == pytest.approx(float(want), rel=1e-9)
    assert found.losses == pytest.approx({"tokens": float(want)}, rel=1e-9)
