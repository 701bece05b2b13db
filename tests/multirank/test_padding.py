"""If a vocabulary does not divide over the grid, its padding never counts and never moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import IGNORE, copy_of
from gridformer.parallel import build_parallel
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, batch_of, batches_of, tiny
from tests.support.multirank.layouts import name_of
from tests.support.multirank.pool import WorkerPool

# 5 words on 1x4 and 7 on 2x3 leave the last rank with nothing but padding.
CASES: list[tuple[dict[str, Any], int]] = [
    ({"scheme": "optimus", "rows": 2, "cols": 3}, 89),
    ({"scheme": "optimus", "rows": 2, "cols": 3}, 97),
    ({"scheme": "optimus", "rows": 2, "cols": 3}, 7),
    ({"scheme": "optimus", "rows": 1, "cols": 4}, 89),
    ({"scheme": "optimus", "rows": 1, "cols": 4}, 97),
    ({"scheme": "optimus", "rows": 1, "cols": 4}, 5),
    ({"scheme": "optimus", "rows": 4, "cols": 1}, 97),
    ({"scheme": "megatron", "cols": 4}, 89),
    ({"scheme": "megatron", "cols": 4}, 97),
    ({"scheme": "megatron", "cols": 4, "sequence_parallel": True}, 5),
    # The paper's placement of the table, and other schedules.
    ({"scheme": "optimus", "rows": 2, "cols": 3, "stationary": "input"}, 97),
    ({"scheme": "optimus", "rows": 4, "cols": 1, "stationary": "input"}, 5),
    ({"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "broadcast"}, 89),
    (
        {
            "scheme": "optimus",
            "rows": 2,
            "cols": 3,
            "schedule": "pipelined",
            "stationary": "input",
        },
        7,
    ),
]
IDS = [f"{name_of(layout)}-v{v}" for layout, v in CASES]
SOME = [CASES[i] for i in (2, 5, 6, 8, 10, 12)]
SOME_CASES = full_unless(SOME.__contains__, CASES, unpack=True)
N_STEPS = 4
# Large steps and strong weight decay, so that padding would move if it could.
TRAIN = TrainConfig(global_batch=12, lr=0.05, weight_decay=0.5, clip_norm=0.0, dtype="float64")


def overhang(parameter: Tensor) -> Tensor:
    """Return 1 where a local block is padding."""
    shard = shard_of(parameter)
    mask = torch.ones_like(parameter, dtype=torch.bool)
    shard.valid(mask).zero_()
    return mask


def config_of(vocab_size: int) -> ModelConfig:
    return tiny(n_layers=1, vocab_size=vocab_size, max_seq_len=13 if vocab_size == 97 else 24)


def train_and_look(layout: LayoutConfig, vocab_size: int) -> int:
    """Train, check that padding is zero in values, gradients and moments, and return its size."""
    config = config_of(vocab_size)
    axes = axes_of(layout)
    model = build_parallel(config, layout, axes, 1, CPU, TRAIN.dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper = Stepper(model, TRAIN, axes)
    for step in range(N_STEPS):
        batch = batch_of(step, config, TRAIN.global_batch)
        stepper(step, lambda rows, batch=batch: next_words(batch[rows]))  # type: ignore[misc]
    n_padding = 0
    for name, parameter in model.named_parameters():
        padding = overhang(parameter)
        tensors = {"value": parameter, "gradient": parameter.grad}
        tensors.update(stepper.updates.state.get(parameter, {}))
        for what, tensor in tensors.items():
            if tensor is not None and tensor.shape == parameter.shape:
                assert not tensor[padding].any(), f"{what} of {name} has padding that moved"
        n_padding += int(padding.sum())
        if shard_of(parameter).valid(parameter).numel() and name == "tokens.weight":
            assert not torch.equal(parameter, before[name]), "nothing was trained"
    return n_padding


@pytest.mark.parametrize(
    ("layout", "vocab_size"),
    SOME_CASES,
    ids=IDS,
)
def test_padding_stays_zero(pool: WorkerPool, layout: dict[str, Any], vocab_size: int) -> None:
    plan, config = LayoutConfig(**layout), config_of(vocab_size)
    found = pool.run(plan.n_processes, train_and_look, plan, vocab_size)
    table = -vocab_size % math.lcm(plan.rows, plan.cols) * config.hidden_size
    assert table > 0
    assert sum(found) == table, "nothing but the table is padded"


# --------------------------------------------------------------------------- the loss


def unlikely_words(model: Model, axes: Axes) -> None:
    """Make every true logit about -1000, so that a padded one (zero) would be the largest."""
    with torch.no_grad():
        table = model.get_parameter("tokens.weight")
        shard_of(table).valid(table).fill_(1.0)
        model.get_parameter("norm.weight").fill_(0.1)
        model.get_parameter("norm.bias").fill_(-1000.0 / model.config.hidden_size)


def compare_losses(layout: LayoutConfig, vocab_size: int) -> tuple[float, float]:
    """Return the loss of such a model on this layout and on one device."""
    config = config_of(vocab_size)
    axes = axes_of(layout)
    batch = batch_of(0, config, 12)
    losses = []
    for plan, the_axes in ((layout, axes), (LayoutConfig(), Axes())):
        model = build_parallel(config, plan, the_axes, 1, CPU, "float64")
        unlikely_words(model, the_axes)
        part = batch.chunk(the_axes.row.size)[the_axes.row.index]
        loss = model.loss_sum(part[:, :-1], part[:, 1:]).detach()
        losses.append(float(comm.all_reduce(loss.clone(), the_axes.row)))
    return losses[0], losses[1]


@pytest.mark.parametrize(
    ("layout", "vocab_size"),
    SOME_CASES,
    ids=IDS,
)
def test_padded_words_never_win(pool: WorkerPool, layout: dict[str, Any], vocab_size: int) -> None:
    plan = LayoutConfig(**layout)
    n_targets = 12 * config_of(vocab_size).max_seq_len
    for got, want in pool.run(plan.n_processes, compare_losses, plan, vocab_size):
        assert want / n_targets < 20, "with the padded words in, it would be about 1000"
        assert abs(got / want - 1) < 1e-9


def loss_and_gradient(cols: int, vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    """Padded logits are huge or NaN; loss and gradient must not depend on them."""
    axes = axes_of(LayoutConfig(scheme="megatron", cols=cols))
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 4, vocab_size, generator=generator)).to(dtype).double()
    targets = torch.randint(0, vocab_size, (2, 4), generator=generator)
    targets[0, :2] = IGNORE
    targets[1] = vocab_size - 1
    whole = logits.clone().requires_grad_()
    want = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    (7 * want).backward()
    assert whole.grad is not None
    for filler in (1e4, torch.inf, torch.nan):
        everything = torch.full((2, 4, padded), filler, dtype=dtype)
        everything[..., :vocab_size] = logits
        mine = everything.chunk(cols, -1)[axes.col.index].clone().requires_grad_()
        got = VocabParallelCrossEntropy(axes.col, vocab_size)(mine, targets)
        (7 * got).backward()
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        grad = comm.all_gather(mine.grad.float(), axes.col, -1)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            grad[..., :vocab_size].double(), whole.grad, rtol=tolerance, atol=tolerance
        )
        assert not grad[..., vocab_size:].any()
        assert not grad[0, :2].any(), "a target that is ignored has a gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cols", "vocab_size", "padded"), [(2, 89, 90), (4, 97, 100), (4, 5, 8)])
def test_loss_does_not_see_padding(
    pool: WorkerPool, cols: int, vocab_size: int, padded: int, dtype: torch.dtype
) -> None:
    pool.run(cols, loss_and_gradient, cols, vocab_size, padded, dtype)


# --------------------------------------------------------------------------- of the cast copy


def loss_with_columns(
    layout: dict[str, Any], tokens: int, multiple: int
) -> tuple[int, list[Tensor]]:
    """Return a rank's columns of logits, its token loss and all gradients in bfloat16.

    Args:
        tokens: Tokens of a chunk of the loss.
        multiple: To which the rows of the table's copy are rounded up; 0 leaves it as it is.
    """
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), tiny(family="bert", n_layers=1)
    axes, widths = axes_of(plan), []
    model = build_parallel(config, plan, axes, 1, CPU, "bfloat16").train()
    model.loss_chunk_tokens = tokens
    copy = copy_of(model.tokens.weight)
    assert copy is not None
    copy.multiple = multiple or copy.multiple
    model.loss.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[-1]))
    size = 12 // axes.row.size
    rows = slice(axes.row.index * size, (axes.row.index + 1) * size)
    batch = {key: value[rows] for key, value in batches_of(0, config, 12).items()}
    with gathered_weights_scope(model):
        loss = model.losses(batch)["tokens"]
        loss.backward()
    grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
    return widths[0], [loss.detach(), *grads]


WITH_COPIES: dict[str, dict[str, Any]] = {
    "megatron": {"scheme": "megatron", "cols": 2},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 1, "schedule": "gather"},
    "grid": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "gather"},
}
COPY_CASES = [(name, tokens) for name in WITH_COPIES for tokens in (0, 16)]


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case in (("megatron", 0), ("optimus", 16)), COPY_CASES)
)
def test_additional_columns_of_a_cast_copy_do_not_count(
    pool: WorkerPool, case: tuple[str, int]
) -> None:
    """The head of BERT has a bias, too, and on a grid it normalizes its input."""
    layout, tokens = WITH_COPIES[case[0]], case[1]
    n = LayoutConfig(**layout).n_processes
    plain, padded = (pool.run(n, loss_with_columns, layout, tokens, m) for m in (1, 0))
    for (before, want), (after, got) in zip(plain, padded):
        assert after == -(-before // 64) * 64 > before
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0.0)
        scale = max(float(grad.abs().max()) for grad in want[1:])
        for a, b in zip(got[1:], want[1:], strict=True):
            assert a.shape == b.shape
            assert float((a - b).abs().max()) <= 1e-2 * scale
