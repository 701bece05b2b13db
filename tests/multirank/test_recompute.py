"""Counts what recomputation multiplies again, what it keeps, and what it sends."""

import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.models import Model, build_model
from gridformer.models.blocks import Linear, RecomputeMode, StyledLayer
from gridformer.parallel.data.fsdp import FSDPUnit, Gathering
from gridformer.parallel.pipeline.stages import StageIO
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank.exactness import CPU, batches_of, built, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.pool import WorkerPool

B = 12
SINGLE: Layout = {}
MEGATRON: Layout = {"scheme": "megatron", "cols": 4}
SEQUENCE: Layout = {**MEGATRON, "sequence_parallel": True}
OPTIMUS: dict[str, Layout] = {
    schedule: {
        "scheme": "optimus",
        "rows": 2,
        "cols": 2,
        "schedule": schedule,
        "keep_gathered": "none",
    }
    for schedule in ("gather", "broadcast", "pipelined")
}
SUPER: Layout = {"scheme": "subgraph", "branches": 4}
FIRST: Layout = {**SUPER, "common": "first"}
SCHEMES: dict[str, Layout] = {
    "single": SINGLE,
    "megatron": MEGATRON,
    "sequence": SEQUENCE,
    "both ways": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    **OPTIMUS,
    "D&SP": SUPER,
    "cSub": FIRST,
}


def config_of(family: str, **changes: Any) -> ModelConfig:
    return tiny(**{"max_seq_len": 12, "dropout": 0.1, **MODELS[family], **changes})


def start(
    layout: Layout, config: ModelConfig, recompute: RecomputeMode, dtype: Any = "float32"
) -> tuple[Model, Batch, LayoutConfig]:
    """Return this rank's part of a model, and of a batch of B sequences."""
    model, axes, plan = built(layout, config, dtype)
    model.recomputes(recompute)
    each = B // axes.batch.size
    rows = slice(axes.batch.index * each, (axes.batch.index + 1) * each)
    model.dropout_rng.at(rows)
    batch = {key: value[rows] for key, value in batches_of(0, config, B).items()}
    return model.train(), batch, plan


def loss_of(model: Model, batch: Batch) -> Tensor:
    losses = [*model.losses(batch).values()]
    return sum(losses[1:], losses[0])


# --------------------------------------------------- products


class Multiplications(TorchDispatchMode):
    """Counts the multiplications in matrix products, except those inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.n += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def multiplied(
    layout: Layout, config: ModelConfig, recompute: RecomputeMode, dtype: str
) -> tuple[int, int, int]:
    """Return one rank's counts in forward and backward, and attention's calls in backward."""
    model, batch, _ = start(layout, config, recompute, dtype)
    with gathered_weights_scope(model):
        with Multiplications() as forward:
            loss = loss_of(model, batch)
        fused = F.scaled_dot_product_attention
        with (
            patch.object(F, "scaled_dot_product_attention", wraps=fused) as again,
            Multiplications() as backward,
        ):
            loss.backward()
    return forward.n, backward.n, again.call_count


def layers_of(config: ModelConfig) -> list[StyledLayer]:
    with torch.device("meta"):
        return [
            module for module in build_model(config).modules() if isinstance(module, StyledLayer)
        ]


def products_of(config: ModelConfig) -> tuple[int, int]:
    """Return all ranks' counts in forward: all products of blocks, and each block's last."""
    layers, s = layers_of(config), config.max_seq_len
    tokens = {"tokens": B * s, "source": 2 * B * s}  # as `batches_of` makes them

    def of(linear: Linear) -> int:
        return linear.weight.numel() * tokens[linear.role.reads]

    inside = [of(m) for layer in layers for m in layer.modules() if isinstance(m, Linear)]
    return sum(inside), sum(of(layer.mlp.down) for layer in layers)


PRODUCTS = [
    (scheme, family, dtype)
    for family in MODELS
    for scheme in SCHEMES
    for dtype in ("float32", "bfloat16")
]


def quick(case: tuple[str, str, str]) -> bool:
    """Pre-norm where products are of another kind; post-norm and casting on a grid."""
    scheme, family, dtype = case
    if dtype == "bfloat16" or family == "Transformer":
        return scheme == "gather" and (family, dtype) in (
            ("GPT-2", "bfloat16"),
            ("Transformer", "float32"),
        )
    return family == "GPT-2" and scheme in ("single", "sequence", "cSub")


@pytest.mark.parametrize(
    ("scheme", "family", "dtype"), full_unless(quick, PRODUCTS, unpack=True), ids=lambda name: name
)
def test_all_products_but_the_last_are_recomputed(
    pool: WorkerPool, scheme: str, family: str, dtype: str
) -> None:
    """The last product runs again only if a norm reads it (post-norm).

    Selective recomputation repeats only what is inside attention, and `except_attention` all but
    that.
    """
    config, layout = config_of(family), SCHEMES[scheme]
    n = LayoutConfig(**layout).n_processes
    inside, last = products_of(config)
    again = inside - (0 if config.norm_position == "post" else last)
    plain, full, selective, kept = (
        pool.run(n, multiplied, layout, config, mode, dtype)
        for mode in ("none", "full", "selective", "except_attention")
    )
    attentions_of = sum(1 + layer.crossed for layer in layers_of(config))
    for (forward, backward, _), mine, others in zip(plain, full, kept):
        assert mine == (forward, backward + again // n, attentions_of)
        assert others == (*mine[:2], 0)
    for (forward, backward, attentions), mine in zip(plain, selective):
        assert mine[:2] == (forward, backward)
        assert attentions == 0
        assert mine[2] == attentions_of


# --------------------------------------------------- memory


def kept(layout: Layout, config: ModelConfig, recompute: RecomputeMode) -> int:
    """Return the bytes that one rank holds after a forward pass and did not hold before."""
    model, batch, _ = start(layout, config, recompute)
    with gathered_weights_scope(model), MemoryLog() as tracker:
        clock = model.dropout_rng
        counters = [clock.counter(site, block, CPU) for site, block in clock.sites.items()]
        tracker.mark([*model.parameters(), *batch.values(), *counters], "before")
        loss = loss_of(model, batch)
        # gloo's threads free a message a moment after it is waited for.
        found, before = held(tracker), -1
        while found != before:
            time.sleep(0.02)
            found, before = held(tracker), found
        assert loss.requires_grad
    return found


def held(tracker: MemoryLog) -> int:
    """Return the bytes that are in memory now and were not marked as there before."""
    return tracker.live() - tracker.live_by_kind().get("before", 0)


def one_layer(layout: Layout, config: ModelConfig, recompute: RecomputeMode) -> float:
    """Return the part of `kept` that each layer adds."""
    fewer = config.model_copy(update={"n_layers": 1, "n_decoder_layers": 1})
    more = config.model_copy(update={"n_layers": 3, "n_decoder_layers": 1})
    return (kept(layout, more, recompute) - kept(layout, fewer, recompute)) / 2


KEPT = [(scheme, family) for family in MODELS for scheme in SCHEMES]
QUICK_KEPT = [("gather", "T5"), *((name, "GPT-2") for name in ("single", "sequence", "cSub"))]


@pytest.mark.parametrize(
    ("scheme", "family"),
    full_unless(lambda case: case in QUICK_KEPT, KEPT, unpack=True),
    ids=lambda name: name,
)
def test_a_block_keeps_its_share_of_its_input_alone(
    pool: WorkerPool, scheme: str, family: str
) -> None:
    """A block keeps exactly N b s h / p elements on every rank, under every scheme.

    It keeps no statistics, dropout masks or scores. What layers share (masks of scores, an
    encoder's result) is kept once.
    """
    config, layout = config_of(family), SCHEMES[scheme]
    n = LayoutConfig(**layout).n_processes
    s = config.max_seq_len * (2 if config.two_stacks else 1)  # an encoder's layers count too
    share = 4 * B * s * config.hidden_size / n
    assert pool.run(n, one_layer, layout, config, "full") == [share] * n
    if family == "GPT-2":  # also the result of attention, and a number for each head and token
        share += 4 * B * s * config.n_heads * (config.head_width + 1) / n
        assert pool.run(n, one_layer, layout, config, "except_attention") == [share] * n


@pytest.mark.parametrize("scheme", full_unless(lambda name: name == "gather", SCHEMES))
def test_selective_keeps_no_probabilities(pool: WorkerPool, scheme: str) -> None:
    """Attention with dropout of probabilities keeps no more than fused attention without dropout.

    Without selective recomputation each layer would keep several times b n s s numbers more.
    """
    layout = SCHEMES[scheme]
    n = LayoutConfig(**layout).n_processes
    plain, dropped = (config_of("GPT-2", attention_dropout=p) for p in (0.0, 0.1))
    scores = 4 * B * config_of("GPT-2").n_heads * plain.max_seq_len**2 / n
    fused = pool.run(n, one_layer, layout, plain, "none")
    unfused = pool.run(n, one_layer, layout, dropped, "none")
    selective = pool.run(n, one_layer, layout, dropped, "selective")
    for without, with_scores, mine in zip(fused, unfused, selective):
        assert with_scores > without + 2 * scores
        assert mine <= without


def entered(layout: Layout) -> tuple[int, int]:
    """Return the live bytes that this rank's stage received when its first backward pass begins.

    The second result is all that it had received until then.
    """
    config = config_of("GPT-2")
    model, axes, plan = built(layout, config)
    stepper = Stepper(model, TrainConfig(global_batch=B, recompute="full"), axes, plan)
    batch = batches_of(0, config, B)
    seen: list[tuple[int, int]] = []
    entering, backward = StageIO.entering, torch.autograd.backward

    def marked(self: StageIO, *args: Any) -> dict[str, Tensor]:
        found = entering(self, *args)
        tracker.mark(found.values(), "entering")
        return found

    def watched(*args: Any) -> None:
        ever = sum(e.n_bytes for e in tracker.entries if e.kind == "entering")
        seen.append((tracker.live_by_kind().get("entering", 0), ever))
        backward(*args)

    with (
        MemoryLog() as tracker,
        patch.object(StageIO, "entering", marked),
        patch.object(torch.autograd, "backward", watched),
    ):
        stepper(0, lambda rows: {key: value[rows] for key, value in batch.items()})
    return seen[0]


def test_a_pipeline_keeps_no_more_than_it_needs(pool: WorkerPool) -> None:
    """What a stage keeps of its input depends on what its devices receive.

    If all devices receive the same, the received tensor is freed after the forward pass and only
    shares of it stay; if each receives a part, the first layer keeps the parts.
    """
    pipeline = {"pp": 2, "micro_batches": 3, "pipeline": "gpipe", "cols": 2}
    whole = 4 * B * 12 * 48
    found = pool.run(4, entered, {**pipeline, "scheme": "megatron"})
    assert [came for _, came in found[2:]] == [whole] * 2
    assert [alive for alive, _ in found[2:]] == [0] * 2
    found = pool.run(4, entered, {**pipeline, "scheme": "megatron", "sequence_parallel": True})
    assert found[2:] == [(whole // 2, whole // 2)] * 2


# --------------------------------------------------- messages


def sent(layout: Layout, config: ModelConfig, recompute: RecomputeMode) -> Counter[str]:
    """Count the elements of a forward and a backward pass.

    `col` counts activations, `row` weights, and `kept` blocks' inputs.
    """
    model, batch, _ = start(layout, config, recompute)
    with gathered_weights_scope(model), record_messages() as recorder:
        loss_of(model, batch).backward()
    found: Counter[str] = Counter()
    for r in recorder.records:
        found[r.label if r.label == "kept" else r.axis] += int(r.moved)
    return found


@pytest.mark.parametrize("family", ["GPT-2", "BERT"])
def test_recomputation_sends_again(pool: WorkerPool, family: str) -> None:
    """Backward repeats a block's forward messages, but not those of an unneeded last product.

    The sharded inputs of blocks are gathered once. On a grid, weights that backward does not read
    are not gathered.
    """
    config = config_of(family, norm_position="post" if family == "BERT" else "pre")
    h, bsh = config.hidden_size, B * config.max_seq_len * config.hidden_size
    post, n_layers = config.norm_position == "post", config.n_layers

    def more(layout: Layout) -> Counter[str]:
        plain, full = (pool.run(4, sent, layout, config, mode) for mode in ("none", "full"))
        (found,) = {tuple(sorted((b - a).items())) for a, b in zip(plain, full)}
        return Counter(dict(found))

    reduces = 2 if post else 1
    assert more(MEGATRON) == {
        "col": n_layers * reduces * 2 * bsh * 3 // 4,
        "kept": n_layers * bsh * 3 // 4,
    }
    weights = (12 if post else 8) * h * h
    assert more(OPTIMUS["gather"])["row"] == n_layers * weights // 4


# --------------------------------------------------- sharded parameters
# (fsdp)


def gathered(
    layout: Layout, family: str, recompute: RecomputeMode
) -> tuple[float, float, list[tuple[int, bool]]]:
    """Record the gathers of parameters in one step.

    Returns the elements that travel to this rank, those by the formula in
    gridformer.parallel.data.fsdp, and the gathered layers, with whether they were in flight before.
    """
    config = config_of(family)
    model, axes, plan = built(layout, config)
    stepper = Stepper(model, TrainConfig(global_batch=16, recompute=recompute), axes, plan)
    gathering = model.gathering
    assert isinstance(gathering, Gathering)
    batch = batches_of(0, config, 16)
    found: list[tuple[int, bool]] = []
    unshard = FSDPUnit.unshard

    def watched(unit: FSDPUnit) -> None:
        if not unit.whole and unit in gathering.layers:
            found.append((gathering.layers.index(unit), unit._coming is not None))
        unshard(unit)

    with record_messages() as recorder, patch.object(FSDPUnit, "unshard", watched):
        stepper(0, lambda rows: {key: value[rows] for key, value in batch.items()})

    def comes(unit: FSDPUnit) -> int:
        """Return the elements that come from other replicas."""
        buckets = [message.bucket for message in unit._messages]
        return sum((bucket.axis.size - 1) * bucket.share for bucket in buckets)

    layers = sum(map(comes, gathering.layers))
    said = 2 * plan.micro_batches * layers + comes(gathering.rest)
    return recorder.moved("parameters"), said, found


FSDP: dict[str, Layout] = {
    "replicas": {},
    "megatron": {"scheme": "megatron", "cols": 2},
    "grid": {"scheme": "optimus", "rows": 2, "cols": 1},
    "grid, weights kept": {"scheme": "optimus", "rows": 2, "keep_gathered": "weights"},
    "pipeline": {"pp": 2, "pipeline": "1f1b"},
    "D&SP": {"scheme": "subgraph", "branches": 2},
    "cSub": {"scheme": "subgraph", "branches": 2, "common": "first"},
}


def quick_fsdp(case: tuple[str, str]) -> bool:
    return case in (("replicas", "GPT-2"), ("grid", "Transformer"), ("pipeline", "GPT-2"))


@pytest.mark.parametrize(
    ("name", "family"),
    full_unless(quick_fsdp, [(n, f) for f in ("GPT-2", "Transformer") for n in FSDP], unpack=True),
)
def test_parameters_are_gathered_twice_and_prefetched(
    pool: WorkerPool, name: str, family: str
) -> None:
    """A layer's parameters are gathered once for forward and once for backward with recomputation.

    All but the first gather of a pass are in flight before they are needed.
    """
    layout = {**FSDP[name], "dp": 2, "dp_mode": "fsdp", "micro_batches": 2}
    n = LayoutConfig(**layout).n_processes
    plain = pool.run(n, gathered, layout, family, "none")
    again = pool.run(n, gathered, layout, family, "full")
    for (_, _, before), (moved, said, found) in zip(plain, again):
        assert moved == said
        assert found == before
        late = [layer for layer, ahead in found if not ahead]
        # Forward of each micro-batch; in a pipeline backward, too: otherwise the loss hides it.
        passes = 2 * (2 if "pp" in layout else 1)
        assert len(late) <= passes
