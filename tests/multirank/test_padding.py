"""Sizes that do not divide over the grid: the vocabulary, and heads of keys and values."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.models.blocks import IGNORE, copy_of
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work, blocks_of
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.tensor.linear import kv_heads_of
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.multirank import exactness
from tests.support.multirank.layouts import Layout, name_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import B, S, agrees, passes, predicted, volume_of

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
        {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "pipelined", "stationary": "input"},
        7,
    ),
]
IDS = [f"{name_of(layout)}-v{v}" for layout, v in CASES]
SOME = [CASES[i] for i in (2, 5, 6, 8, 10, 12)]
SOME_CASES = full_unless(SOME.__contains__, CASES, unpack=True)
N_STEPS = 4
# Large steps and strong weight decay, so that padding would move if it could.
FAST = TrainConfig(global_batch=12, lr=0.05, weight_decay=0.5, clip_norm=0.0, dtype="float64")


def overhang(parameter: Tensor) -> Tensor:
    """Return 1 where a local block is padding."""
    shard = shard_of(parameter)
    mask = torch.ones_like(parameter, dtype=torch.bool)
    shard.valid(mask).zero_()
    return mask


def config_of(vocab_size: int) -> ModelConfig:
    return exactness.tiny(
        n_layers=1, vocab_size=vocab_size, max_seq_len=13 if vocab_size == 97 else 24
    )


def train_and_look(layout: LayoutConfig, vocab_size: int) -> int:
    """Train, check that padding is zero in values, gradients and moments, and return its size."""
    config = config_of(vocab_size)
    axes = exactness.axes_of(layout)
    model = build_parallel(config, layout, axes, 1, exactness.CPU, FAST.dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper = Stepper(model, FAST, axes)
    for step in range(N_STEPS):
        batch = exactness.batch_of(step, config, FAST.global_batch)
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


@pytest.mark.parametrize(("layout", "vocab_size"), SOME_CASES, ids=IDS)
def test_padding_stays_zero(pool: WorkerPool, layout: dict[str, Any], vocab_size: int) -> None:
    plan, config = LayoutConfig(**layout), config_of(vocab_size)
    found = pool.run(plan.n_processes, train_and_look, plan, vocab_size)
    table = -vocab_size % math.lcm(plan.rows, plan.cols) * config.hidden_size
    assert table > 0
    assert sum(found) == table, "nothing but the table is padded"


# --------------------------------------------------- the loss


def loss_and_gradient(cols: int, vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    """Padded logits are huge or NaN; loss and gradient must not depend on them."""
    axes = exactness.axes_of(LayoutConfig(scheme="megatron", cols=cols))
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


# --------------------------------------------------- of the cast copy


def loss_with_columns(
    layout: dict[str, Any], tokens: int, multiple: int
) -> tuple[int, list[Tensor]]:
    """Return a rank's columns of logits, its token loss and all gradients in bfloat16.

    Args:
        tokens: Tokens of a chunk of the loss.
        multiple: To which the rows of the table's copy are rounded up; 0 leaves it as it is.
    """
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), exactness.tiny(family="bert", n_layers=1)
    axes, widths = exactness.axes_of(plan), []
    model = build_parallel(config, plan, axes, 1, exactness.CPU, "bfloat16").train()
    model.loss_chunk_tokens = tokens
    copy = copy_of(model.tokens.weight)
    assert copy is not None
    copy.multiple = multiple or copy.multiple
    model.loss.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[-1]))
    size = 12 // axes.row.size
    rows = slice(axes.row.index * size, (axes.row.index + 1) * size)
    batch = {key: value[rows] for key, value in exactness.batches_of(0, config, 12).items()}
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


# --------------------------------------------------- heads of keys and values


LLAMA: dict[str, Any] = {
    "family": "llama", "n_layers": 1, "max_seq_len": 8, "ffn_size": 96, "qkv_bias": True,
    "qk_norm": True, "tied_head": False,
}  # fmt: skip
MEGATRON = {"scheme": "megatron", "cols": 4}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
BRANCHES = {"scheme": "subgraph", "branches": 4}
PAIR = {"scheme": "subgraph", "branches": 2, "common": "first"}
# The layout, the heads of keys and values, and other changes of the training.
CASES_HEADS: list[tuple[Layout, int, dict[str, Any]]] = [
    ({**MEGATRON, "sequence_parallel": True}, 6, {}),
    ({**OPTIMUS, "schedule": "broadcast", "stationary": "input"}, 1, {}),
    ({**BRANCHES, "attention": "outside"}, 6, {}),
    (MEGATRON, 1, {"update": "in_backward", "clip_by": "layer"}),
    (MEGATRON, 2, {"recompute": "full", "loss_chunk_tokens": 16}),
    (MEGATRON, 4, {}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2}, 1, {"recompute": "selective"}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "all"}, 4, {}),
    ({**OPTIMUS, "schedule": "pipelined"}, 3, {"recompute": "full"}),
    ({**OPTIMUS, "keep_gathered": "all"}, 1, {"update": "in_backward", "clip_by": "layer"}),
    ({"scheme": "optimus", "rows": 1, "cols": 4}, 6, {"loss_chunk_tokens": 16}),
    (BRANCHES, 2, {"recompute": "full"}),
    ({**BRANCHES, "feed_forward": "common"}, 6, {}),
    ({**BRANCHES, "attention": "outside", "feed_forward": "common"}, 2, {}),
    (PAIR, 1, {"recompute": "full"}),
    ({**PAIR, "attention": "outside"}, 3, {}),
    ({**PAIR, "order": "contiguous", "feed_forward": "common"}, 1, {}),
    ({**PAIR, "dp": 2, "dp_mode": "fsdp"}, 1, {}),
    ({"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "zero1"}, 1, {}),
    ({**OPTIMUS, "rows": 1, "dp": 2, "dp_mode": "fsdp"}, 1, {"update": "in_backward"}),
    ({**OPTIMUS, "rows": 1, "dp": 2, "dp_mode": "zero1"}, 3, {}),
    ({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}, 1, {}),
]
QUICK = [CASES_HEADS[0], CASES_HEADS[2], CASES_HEADS[3]]


@pytest.mark.parametrize(
    ("layout", "heads", "train"),
    full_unless(QUICK.__contains__, CASES_HEADS, unpack=True),
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_equals_one_device(
    pool: WorkerPool, layout: Layout, heads: int, train: dict[str, Any]
) -> None:
    if train.get("update") == "in_backward":
        train = {"clip_by": "layer", **train}
    settings = {**exactness.TRAIN, "global_batch": 16, "dtype": "float64", **train}
    exactness.assert_equal_one_device(pool, layout, {**LLAMA, "n_kv_heads": heads}, settings)


def test_every_query_reads_its_head_of_keys() -> None:
    """A column's heads of keys are found by their index in the model."""
    for heads, kv_heads, columns in ((12, 6, 4), (12, 3, 2), (8, 2, 4), (12, 4, 4), (24, 8, 12)):
        blocks = blocks_of(kv_heads, columns)
        held, mine = kv_heads // blocks, heads // columns
        for column in range(columns):
            read = kv_heads_of(heads, kv_heads, column, columns)
            if read is None:
                assert mine % held == 0
                read = tuple(i // (mine // held) for i in range(mine))
            first = column * blocks // columns * held
            wanted = [(column * mine + i) * kv_heads // heads for i in range(mine)]
            assert [first + i for i in read] == wanted


# --------------------------------------------------- owners


def what_a_rank_owns(layout: Layout, model: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Return the elements that this rank owns, by name, and those of all that it holds."""
    config = exactness.tiny(**model)
    cut, axes, plan = exactness.built(layout, config)
    stepper = Stepper(cut, TrainConfig(global_batch=B), axes, plan)
    stepper(0, lambda rows: {k: x[rows] for k, x in exactness.batches_of(0, config, B).items()})
    return {name: p.numel() for name, p in owned(cut)}, sum(p.numel() for p in cut.parameters())


def test_each_element_has_one_owner(pool: WorkerPool) -> None:
    """Together the ranks own the model once, and hold no more copies of heads than needed."""
    torch.set_num_threads(1)
    model = {**LLAMA, "n_kv_heads": 2, "vocab_size": 96}
    found = pool.run(4, what_a_rank_owns, MEGATRON, model)
    h, d, f, v = 48, 4, 96, 96
    matrices = 2 * v * h + h * 12 * d + 2 * h * 2 * d + h * 12 * d + 3 * h * f
    vectors = 12 * d + 2 * 2 * d + 3 * h + 2 * d
    assert sum(n for mine, _ in found for n in mine.values()) == matrices + vectors
    keys = "layers.0.attention.qkv.k.weight"
    assert [keys in mine for mine, _ in found] == [True, False, True, False]
    heads = 2 * h * 2 * d + 2 * 2 * d  # k and v, which two columns each hold
    whole = 3 * h + 2 * d
    assert {held for _, held in found} == {(matrices + vectors + heads + 3 * whole) // 4}


# --------------------------------------------------- messages


def one_layer(layout: Layout, model: dict[str, Any]) -> Any:
    """Return the volumes of the products of one layer, forward and backward."""
    plan = LayoutConfig(**layout)
    two, one = (passes(plan, exactness.tiny(**{**model, "n_layers": n})) for n in (2, 1))
    pairs = zip(two, one)
    return [volume_of(a, "product").minus(volume_of(b, "product")) for a, b in pairs]


TRAFFIC: list[tuple[Layout, int]] = [
    ({**MEGATRON, "keep_gathered": "none"}, 2),
    ({**MEGATRON, "sequence_parallel": True, "keep_gathered": "none"}, 6),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "none"}, 1),
    ({**OPTIMUS, "schedule": "gather", "keep_gathered": "none"}, 3),
    ({**OPTIMUS, "schedule": "pipelined"}, 4),
]


@pytest.mark.parametrize(
    ("layout", "heads"),
    full_unless(lambda case: case == TRAFFIC[3], TRAFFIC, unpack=True),
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_a_joined_product_sends_what_one_product_sends(
    pool: WorkerPool, layout: Layout, heads: int
) -> None:
    """Its input enters the section once, and all its weights are one message."""
    plan = LayoutConfig(**layout)
    model = {**LLAMA, "n_kv_heads": heads, "max_seq_len": S, "qk_norm": False}
    said = predicted(decide(exactness.tiny(**model), plan, Work(tokens=B * S)))
    for found in pool.run(plan.n_processes, one_layer, layout, model):
        for counted, wanted in zip(found, said):
            agrees(counted, wanted)
