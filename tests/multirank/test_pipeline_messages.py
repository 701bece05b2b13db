"""What pipelines send and when: between stages, for shared parameters, and how long they wait."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import record_messages
from gridformer.config import Family, LayoutConfig, ModelConfig
from gridformer.models import Activations, Link, Model
from gridformer.models.blocks import KVCache, copy_of
from gridformer.models.blocks.late_gradient import SPLIT, LateGradient
from gridformer.parallel import build_parallel
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Event, Executor, idle_fraction
from gridformer.utils.batch import Batch, MicroBatch
from tests.support.marks import full_unless
from tests.support.multirank import pipelines
from tests.support.multirank.exactness import CPU, axes_of
from tests.support.multirank.layouts import Layout
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import SINGLE, read_of, settings_of

H = 16
TOKENS, SOURCES = pipelines.ROWS * pipelines.LENGTH * H, pipelines.ROWS * pipelines.SOURCE * H
MEGATRON: Layout = {"scheme": "megatron", "cols": 2}


def moved(layout: Layout, config: ModelConfig) -> dict[str, tuple[float, int]]:
    """Count a step's elements and messages between stages, and the gathers over col."""
    plan = LayoutConfig(**layout)
    stepper = pipelines.stepper_of(config, plan, axes_of(plan))
    (read,) = pipelines.reads_of(config, 1)
    with comm.record_messages() as recorder:
        stepper(0, read)
    found: dict[str, tuple[float, int]] = {}
    for op in ("send", "recv"):
        records = [r for r in recorder.records if r.op == op]
        assert all((r.axis, r.label) == ("pp", "pipeline") for r in records)
        found[op] = sum(r.moved for r in records), len(records)
    found["col"] = recorder.moved("pipeline", "col"), recorder.count("pipeline", "col").total()
    return found


@pytest.mark.parametrize(
    ("layout", "share", "gathered"),
    [
        ({}, 1, False),
        (MEGATRON, 2, True),
        ({**MEGATRON, "scatter_gather": False}, 1, False),
        ({**MEGATRON, "sequence_parallel": True}, 2, False),
        ({"scheme": "optimus", "rows": 1, "cols": 2}, 2, False),
        ({"scheme": "subgraph", "branches": 2}, 2, False),
    ],
    ids=["single", "megatron", "whole", "sequence", "optimus", "subgraph"],
)
def test_a_tensor_crosses_once(
    pool: WorkerPool, layout: Layout, share: int, gathered: bool
) -> None:
    """A device sends its part of the tensor; plain Megatron gathers the parts again.

    Without `scatter_gather` each device of plain Megatron sends all of it.
    """
    m = 3
    layout = {**layout, "pp": 2, "micro_batches": m}
    n = LayoutConfig(**layout).n_processes
    for found in pool.run(n, moved, layout, pipelines.family("gpt2")):
        assert found["send"] == found["recv"] == (TOKENS / share, m)
        assert found["col"] == ((TOKENS / 2, m) if gathered else (0, 0))


def test_the_first_sub_grid_alone_sends(pool: WorkerPool) -> None:
    layout = {"scheme": "subgraph", "branches": 2, "common": "first", "pp": 2, "micro_batches": 2}
    for rank, found in enumerate(pool.run(4, moved, layout, pipelines.family("gpt2"))):
        assert found["send"] == ((TOKENS, 2) if rank % 2 == 0 else (0, 0))


def begins(layout: Layout, config: ModelConfig) -> list[str]:
    """Return the first link of each stage."""
    plan = LayoutConfig(**layout)
    model = pipelines.stepper_of(config, plan, axes_of(plan)).model
    names = [link.name for link in model.links()]
    return [names[stage.start] for stage in model.stages]


@pytest.mark.parametrize("pp", full_unless(lambda pp: pp == 5, [5, 7]))
def test_encoder_results_travel_through_decoder_stages(pool: WorkerPool, pp: int) -> None:
    """The encoder's result passes through the decoder's stages, but not to a head alone."""
    layout, config = (
        {"pp": pp, "micro_batches": 2},
        pipelines.family("t5", n_layers=1, n_decoder_layers=3),
    )
    config = config.model_copy(update={"vocab_size": 400})  # so that the head is a stage
    first = pool.run(pp, begins, layout, config)[0]
    assert first[-2:] == ["decoder.layers.2", "head"]
    assert "decoder.embedding" in first or pp < 7
    borders = [
        TOKENS
        if name == "head"
        else TOKENS + SOURCES
        if name.startswith("decoder.layers")
        else SOURCES
        for name in first[1:]
    ]
    # Each edge is crossed both ways: a rank sends forward over one, and back over the other.
    sent = [result["send"][0] for result in pool.run(pp, moved, layout, config)]
    assert sent == [a + b for a, b in zip([*borders, 0], [0, *borders])]


# --------------------------------------------------- shared parameters


def with_one_copy_changed(layout: Layout, model: Family, name: str, rank: int) -> str:
    """Return what the sanity check says on this rank."""
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    stepper = pipelines.stepper_of(pipelines.family(model), plan, axes)
    assert_copies_equal(stepper.model, axes)
    if axes.world.index == rank:
        with torch.no_grad():
            stepper.model.get_parameter(name)[-1] += 1e-6
    try:
        assert_copies_equal(stepper.model, axes)
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("layout", "model", "name", "axis", "equal"),
    [
        ({"pp": 4, "micro_batches": 4}, "t5", "tokens.weight", "pp", 1),
        # Each device of a grid has a copy of the last norm, or each of a row one of a bias.
        ({"scheme": "megatron_2d", "rows": 2, "cols": 2}, *("gpt2", "norm.weight", "grid", 0)),
        (
            {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
            *("gpt2", "layers.0.mlp.down.bias", "col", 0),
        ),
    ],
)
def test_unequal_copies_are_found(
    pool: WorkerPool, layout: Layout, model: Family, name: str, axis: str, equal: int
) -> None:
    said = pool.run(4, with_one_copy_changed, layout, model, name, 3)
    assert said.count("equal") == equal
    assert {*said} - {"equal"} == {f"copies over axis {axis} differ: {name}"}


def sums_in_backward(layout: Layout) -> tuple[list[str], int]:
    """Return the order of this rank's backward passes and sums over replicas in a step.

    The second result counts gradients that change after their sum has begun.
    """
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    stepper = pipelines.stepper_of(pipelines.family("gpt2", n_labels=0), plan, axes)
    executor = stepper.executor
    assert isinstance(executor, Executor)
    seen: list[str] = []
    late = 0
    started: dict[int, list[Tensor]] = {}
    for bucket in stepper.sums._buckets:

        def start(_: bool, bucket: Any = bucket, begin: Callable[[], None] = bucket.start) -> None:
            seen.append("sum")
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
            started[id(bucket)] = [grad.clone() for grad in grads]
            begin()

        def finish(bucket: Any = bucket, end: Callable[[], None] = bucket.finish) -> None:
            nonlocal late
            end()
            mine = torch.cat([grad.flatten() for grad in started[id(bucket)]])
            sums = torch.cat([p.grad.flatten() for p in bucket.parameters if p.grad is not None])
            late += not torch.allclose(comm.all_reduce(mine, bucket.axis), sums, rtol=1e-9)

        bucket.start, bucket.finish = start, finish  # type: ignore[assignment,method-assign]
    executor.on_action = lambda event: seen.append(event.kind)
    (read,) = pipelines.reads_of(pipelines.family("gpt2", n_labels=0), 1)
    read_tokens = lambda rows: {k: v for k, v in read(rows).items() if k in ("tokens", "targets")}  # noqa: E731
    stepper(0, read_tokens)
    return [kind for kind in seen if kind in ("sum", "backward", "weight")], late


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *(
            ({}, "backward"),
            ({"stages_per_rank": 2}, "backward"),
            ({"pipeline": "zb_h1"}, "weight"),
        ),
        ({"pipeline": "zbv", "stages_per_rank": 2}, "weight"),
    ],
)
def test_sums_start_in_the_last_pass_and_not_before(
    pool: WorkerPool, layout: Layout, kind: str
) -> None:
    """A stage's gradients are complete when its own last backward or weight pass is done."""
    layout = {"pp": 2, "dp": 2, "micro_batches": 2, **layout}
    for seen, late in pool.run(4, sums_in_backward, layout):
        assert late == 0, "a gradient changed after its sum had begun"
        assert seen.count(kind) == 2 * layout.get("stages_per_rank", 1)
        last = len(seen) - 1 - seen[::-1].index(kind)
        assert "sum" in seen[:last], "nothing overlaps"
        assert seen.index("sum") > seen.index(kind), "before any gradient was complete"


# --------------------------------------------------- time


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, late: LateGradient | None) -> Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.late = seconds, late
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradient = partial(time.sleep, ctx.seconds)
        if ctx.late is None or not ctx.late.leave(gradient):
            gradient()
        time.sleep(ctx.seconds)
        return grads[0] * 1.0, None, None


class Sleeper(Model):
    """A model of as many links as stages, which sleep in forward, and twice as long in backward.

    Half of the latter is for the gradient of a weight.
    """

    def __init__(self, config: ModelConfig, seconds: float) -> None:
        super().__init__(config)
        self.seconds = seconds
        self.start = torch.nn.Parameter(torch.zeros(config.hidden_size))

    def links(self) -> list[Link]:
        return [Link(str(i), ()) for i in range(len(self.stages))]

    def run(
        self,
        batch: Batch,
        entering: Activations | None = None,
        links: Collection[str] | None = None,
        caches: Sequence[KVCache] | None = None,
        start: int = 0,
    ) -> Activations:
        hidden, _ = Activations.taken(entering)
        if hidden is None:
            hidden = self.start.expand(*batch["tokens"].shape, -1)
        late = LateGradient.of(self.start) if SPLIT.wanted else None
        return Activations(_Nap.apply(hidden, self.seconds, late))


def events_of(layout: Layout, nap: float) -> list[Event]:
    """Return what this rank did in a step whose forward passes sleep `nap` seconds."""
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    config = ModelConfig(n_layers=1, hidden_size=4, n_heads=1, vocab_size=2)
    model = Sleeper(config, nap)
    model.stages = tuple(range(i, i + 1) for i in range(plan.n_stages))
    executor = Executor(model, plan, axes, GradientSums.of(model, axes))
    tokens = {"tokens": torch.zeros(1, 1, dtype=torch.long)}
    work = [MicroBatch(slice(i, i + 1), tokens) for i in range(plan.micro_batches)]
    events: list[Event] = []
    executor.on_action = events.append
    comm.barrier((axes.world,))
    executor.train(work, lambda hidden, batch: hidden.sum())
    return events


@pytest.mark.parametrize(
    ("order", "k"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2)]
)
def test_idle_time_of_equal_stages(pool: WorkerPool, order: str, k: int) -> None:
    """Idle time is (pp-1)/m of the ideal time, 1/k of that with k stages, a third if split.

    A busy machine only adds to it, and adds less the longer the naps are; one of several steps must
    be close.
    """
    m = 4
    layout = {"pp": 2, "micro_batches": m, "pipeline": order, "stages_per_rank": k}
    want = 1 / (k * m) / (3 if order in ("zb_h1", "zbv") else 1)
    for turn in range(10):
        ranks = pool.run(2, events_of, layout, 0.03 * 1.6**turn)
        found = idle_fraction(ranks)
        if found < 1.3 * want:
            break
    assert found == pytest.approx(want, rel=0.3)
    # The first rank sends on all that it makes, and back what enters its second stage, if any;
    # with zbv that is the last stage.
    messages = m * (2 if order == "zbv" else 2 * k - 1)
    kinds = Counter(event.kind for event in ranks[0])
    assert kinds == {
        **{"forward": k * m, "backward": k * m, "send": messages, "recv": messages},
        **dict.fromkeys(("backward posted", "forward sent"), m if order == "zbv" else k * m),
        **({"forward posted": m, "backward sent": m} if k > 1 else {}),
        **({"weight": k * m} if order in ("zb_h1", "zbv") else {}),
    }


# --------------------------------------------------- before the first input


def held(layout: Layout) -> list[int]:
    plan, config = LayoutConfig(**layout), pipelines.family("gpt2", n_layers=8)
    model = build_parallel(config, plan, axes_of(plan), 1, CPU, pipelines.SETTINGS.dtype)
    layers = [name for name, _ in model.named_parameters() if name.startswith("layers")]
    return sorted({int(name.split(".")[1]) for name in layers})


def test_interleaved_stages_are_not_adjacent(pool: WorkerPool) -> None:
    first, second = pool.run(2, held, {"pp": 2, "stages_per_rank": 2, "micro_batches": 2})
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6, 7])


def gathers_before_the_first_input(layout: Layout) -> list[int]:
    """Return how many gathers of a later stage have started when its first input is there."""
    built, axes, stepper = settings_of(layout, 4)
    gathers: list[int] = []
    with record_messages() as recorder:

        def note(event: Event) -> None:
            if event.kind == "recv":
                gathers.append(recorder.count("parameters").total())

        stepper.executor.on_action = note
        stepper(0, read_of(built, 0))
    return gathers[:1] if axes.pp.index else []


@pytest.mark.parametrize(("reshard", "layers"), [("step", 2), ("layer", 1)])
def test_stages_gather_while_they_wait_for_their_first_input(
    pool: WorkerPool, reshard: str, layers: int
) -> None:
    """They have nothing else to do then; afterwards each gather would delay all later stages."""
    layout = {**SINGLE, "dp_mode": "fsdp", "reshard": reshard, "pp": 2, "micro_batches": 2}
    found = pool.run(4, gathers_before_the_first_input, layout)
    assert sorted(found) == [[], [], [1 + layers], [1 + layers]]  # 1 for all outside layers


def casts_before_the_first_input(layout: Layout) -> tuple[int, int]:
    """Return how many weights of a later stage are cast when its first input is there, and all."""
    built, axes, stepper = settings_of(layout, 4, "bfloat16", vocab_size=97)
    copies = [copy for p in built.parameters() if (copy := copy_of(p)) is not None]
    made: list[int] = []

    def note(event: Event) -> None:
        if event.kind == "recv":
            made.append(sum(copy.value is not None for copy in copies))

    stepper.executor.on_action = note
    stepper(0, read_of(built, 0))
    return (made[0], len(copies)) if axes.pp.index else (0, 0)


CASES: list[Layout] = [
    {"scheme": "single", "pp": 2, "micro_batches": 2},
    {"scheme": "subgraph", "branches": 2, "pp": 2, "micro_batches": 2},
]


@pytest.mark.parametrize("layout", full_unless(lambda one: one is CASES[0], CASES))
def test_stages_cast_weights_while_they_wait_for_their_first_input(
    pool: WorkerPool, layout: Layout
) -> None:
    found = pool.run(2 * layout.get("branches", 1), casts_before_the_first_input, layout)
    later = [one for one in found if one != (0, 0)]
    assert len(later) == len(found) // 2
    for made, copies in later:
        assert made == copies > 8
