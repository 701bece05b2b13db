"""What a step repeats is run once in an estimate; the result is that of the complete step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gridformer.memory import estimate
from gridformer.memory.breakdown import MemoryBreakdown
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.fewer_chunks import fewer_chunks
from gridformer.memory.once import within_passes
from gridformer.memory.ranks import largest_ranks
from gridformer.memory.tracker import MemoryTracker
from gridformer.models.blocks import dropout
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.partition import link_names, stages_of
from gridformer.trace import fast_fake
from gridformer.trace.repeated_products import NotRepeatableError
from tests.support.marks import full_unless
from tests.support.multirank.matrix import CELLS, QUICK, Cell
from tests.support.multirank.memory import a_run

MEGATRON = {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 6}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2, "micro_batches": 6}
BATCH = {"global_batch": 48}
FULL = {"recompute": "full"}
BY_LAYER = {"update": "in_backward", "clip_by": "layer"}
# Layouts and training settings; the first of them run in `make test`.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pipelined products": ({**OPTIMUS, "schedule": "pipelined"}, FULL),
    "sums over replicas": ({**MEGATRON, "dp": 2}, {"dtype": "bfloat16"}),
    "gathered products": ({**OPTIMUS, "schedule": "gather", "dp": 2}, FULL),
    "gpipe": ({**MEGATRON, "pipeline": "gpipe"}, {}),
    "interleaved": ({**MEGATRON, "stages_per_rank": 2}, {}),
    "interleaved, bfloat16": ({**MEGATRON, "stages_per_rank": 2}, {"dtype": "bfloat16"}),
    "interleaved, prefetched": (
        {**OPTIMUS, "schedule": "gather", "stages_per_rank": 2},
        {},
    ),
    "selective": (MEGATRON, {"recompute": "selective"}),
    "all logits": (MEGATRON, {"loss_chunk_tokens": 0, "dtype": "float16"}),
    "in backward": ({**MEGATRON, "dp": 2}, {**BY_LAYER, **FULL}),
    "offload": (MEGATRON, {"offload": "optimizer", "device": "cuda"}),
    "zero1": ({**MEGATRON, "dp": 2, "dp_mode": "zero1"}, {}),
    "fsdp": ({**MEGATRON, "dp": 2, "dp_mode": "fsdp"}, FULL),
    "fsdp, interleaved": (
        {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "stages_per_rank": 2},
        {},
    ),
    "zero1 on a grid, interleaved": (
        {**OPTIMUS, "schedule": "gather", "dp": 2, "dp_mode": "zero1", "stages_per_rank": 2},
        {"dtype": "bfloat16", **FULL},
    ),
    "fsdp, interleaved, sequence parallel": (
        {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "stages_per_rank": 2, "sequence_parallel": True},
        {"recompute": "selective"},
    ),
    "sequence parallel": ({**MEGATRON, "sequence_parallel": True}, FULL),
    "no pipeline": ({"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast"}, {}),
}
IN_MAKE_TEST = ("pipelined products", "sums over replicas")


class _TorchsFakes(FakeTensorMode):
    """Torch's own fake tensors, which remember nothing of ours."""

    remembered = None


def complete(run: Any, rank: int) -> MemoryBreakdown:
    """Estimate a rank from the complete step, on torch's own fake tensors.

    Chunks of losses are left out here, too; another test compares what they hold.
    """
    # What they load of it in the middle of an operation would keep tensors of it alive.
    import torch._dynamo  # noqa: F401

    with pytest.MonkeyPatch.context() as patch, fewer_chunks():
        patch.setattr(fast_fake, "fast_fakes", _TorchsFakes)
        return estimate_rank(run, rank, once=False)


def same_as_complete(run: Any) -> None:
    for rank in largest_ranks(run):
        assert estimate_rank(run, rank) == complete(run, rank)


def test_a_few_chunks_of_losses_and_masks_hold_what_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dropout, "_CHUNK_ELEMENTS", {False: 200})
    run = a_run({}, {"dropout": 0.1, "n_layers": 1}, {"global_batch": 4, "loss_chunk_tokens": 4})
    entries: list[Any] = []
    real = MemoryTracker.begin

    def begin(*args: Any, **kwargs: Any) -> Any:
        entries.append(real(*args, **kwargs))
        return entries[-1]

    monkeypatch.setattr(MemoryTracker, "begin", begin)
    few, n_few = estimate_rank(run, 0), len(entries)
    whole = estimate_rank(run, 0, once=False)
    assert n_few < (len(entries) - n_few) / 2, "most chunks are left out"
    assert (few.peak, few.moment, few.by_kind) == (whole.peak, whole.moment, whole.by_kind)


@pytest.mark.parametrize("method", full_unless(lambda name: name in IN_MAKE_TEST, METHODS))
def test_methods_have_the_log_of_the_complete_step(method: str) -> None:
    layout, train = METHODS[method]
    n_layers = 4 if "stages_per_rank" in layout else 2
    same_as_complete(a_run(layout, {"n_layers": n_layers}, {**BATCH, **train}))


def test_only_the_order_in_which_placeholders_are_freed_may_differ() -> None:
    """FSDP in bfloat16 frees some of one element at the same time, whichever is the first."""
    layout = {**MEGATRON, "dp": 2, "dp_mode": "fsdp", "stages_per_rank": 2}
    run = a_run(layout, {"n_layers": 4}, {**BATCH, "dtype": "bfloat16"})
    for rank in largest_ranks(run):
        once, whole = estimate_rank(run, rank), complete(run, rank)
        assert (once.peak, once.moment, once.by_kind) == (whole.peak, whole.moment, whole.by_kind)
        assert once.timeline.times == whole.timeline.times
        for kind, values in whole.timeline.bytes_of.items():
            assert once.timeline.bytes_of[kind] == pytest.approx(values, abs=8)


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        (MEGATRON, {}),
        ({**MEGATRON, "dp": 2}, {"dtype": "float32"}),
        pytest.param({**MEGATRON, "stages_per_rank": 2}, {}, marks=pytest.mark.full),
        pytest.param({**MEGATRON, "dp": 2}, FULL, marks=pytest.mark.full),
        pytest.param({**OPTIMUS, "schedule": "gather"}, {}, marks=pytest.mark.full),
        pytest.param({**MEGATRON, "pipeline": "gpipe"}, {}, marks=pytest.mark.full),
        pytest.param({"scheme": "single", "pp": 2, "micro_batches": 6}, {}, marks=pytest.mark.full),
    ],
)
def test_joined_weights_have_the_log_of_the_complete_step(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    """Placeholders of joined weights live as long as their graph, a little longer than its pass."""
    passes_are_played(monkeypatch, layout, {"family": "llama"}, train)


@pytest.mark.parametrize(
    "layout",
    [
        {**MEGATRON, "pp": 4},
        pytest.param({**MEGATRON, "stages_per_rank": 2}, marks=pytest.mark.full),
        pytest.param({**OPTIMUS, "schedule": "gather", "pp": 4}, marks=pytest.mark.full),
        # Branches keep other tensors, so that the output is freed as soon as it has been sent.
        {"scheme": "subgraph", "branches": 2, "pp": 2, "stages_per_rank": 2, "micro_batches": 6},
    ],
)
def test_an_encoders_output_passes_through_stages_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]
) -> None:
    passes_are_played(monkeypatch, layout, {"family": "t5", "n_decoder_layers": 4}, {})


def passes_are_played(
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    model: dict[str, Any],
    train: dict[str, Any],
) -> None:
    """Check that passes are played for ranks of a run, with the log of the complete step."""
    ways: list[Any] = []
    real = estimate._log

    def noted(run: Any, rank: int, decisions: Any, once: Any, *others: Any) -> Any:
        ways.append(once)
        return real(run, rank, decisions, once, *others)

    run = a_run(layout, {"n_layers": 4, **model}, {**BATCH, "dtype": "bfloat16", **train})
    for rank in largest_ranks(run):
        whole = complete(run, rank)
        with monkeypatch.context() as patch:
            patch.setattr(estimate, "_log", noted)
            found = estimate_rank(run, rank)
        assert found == whole
    assert not {None, within_passes} & {*ways}, "some passes were played"


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (MEGATRON, {}),
        ({**MEGATRON, "dp": 2, "dp_mode": "fsdp"}, {}),
        pytest.param(
            MEGATRON, {"family": "transformer", "n_decoder_layers": 2}, marks=pytest.mark.full
        ),
        pytest.param({**OPTIMUS, "dp": 2, "dp_mode": "zero1"}, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_hidden_states_pass_through_a_stage_that_has_only_the_head(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    model = {"n_layers": 2, "vocab_size": 8192, **model}
    run = a_run(layout, model, BATCH)
    *_, last = stages_of(run.model, 2, decide_run(run).choices.work)
    assert [link_names(run.model)[i] for i in last] == ["head"]
    passes_are_played(monkeypatch, layout, model, {"dtype": "float32"})


def test_kept_weights_are_gathered_by_the_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the second one is the model of the others, and no other way is tried."""
    run = a_run(
        {**OPTIMUS, "schedule": "gather", "keep_gathered": "weights"}, {"n_layers": 4}, BATCH
    )
    kept = (choice.keep_weight for choice in decide_run(run).choices.products.values())
    assert any(kept)
    ways: list[Any] = []
    real = estimate._log

    def noted(run: Any, rank: int, decisions: Any, once: Any, *others: Any) -> Any:
        ways.append(once)
        return real(run, rank, decisions, once, *others)

    monkeypatch.setattr(estimate, "_log", noted)
    for rank in largest_ranks(run):
        estimate_rank(run, rank)
    assert [way.keywords["by_first"] for way in ways] == [False] * len(largest_ranks(run))


PIPELINES = [cell for cell in CELLS if cell.pp > 1 and (not cell.dropout or cell in QUICK)]
# Over gloo its products read an operand while somebody waits for them, and some hold it alone.
GRID_IN_MAKE_TEST = "GPT-2-Optimus-pp2-replicate-no_dropout"


@pytest.mark.parametrize(
    "cell",
    full_unless(lambda cell: cell.title == GRID_IN_MAKE_TEST, PIPELINES),
    ids=lambda cell: cell.title,
)
def test_cells_have_the_log_of_the_complete_step(cell: Cell) -> None:
    layout = {**cell.layout, "micro_batches": 6}
    same_as_complete(a_run(layout, cell.config, BATCH, cell.task))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("more", "n"),
    [
        ({"dp": 2}, 1),
        ({"stages_per_rank": 2, "micro_batches": 4}, 1),
        ({"dp": 2, "dp_mode": "fsdp"}, 2),  # the first one finds its first layer gathered
    ],
)
def test_only_one_or_two_micro_batches_of_a_stage_run(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], n: int, rank: int
) -> None:
    """Whether or not a message came before it, after which weights are already copied."""
    ran: list[Any] = []
    real = Executor.forward

    def forward(self: Executor, action: Any, *rest: Any) -> Any:
        ran.append(action)
        return real(self, action, *rest)

    monkeypatch.setattr(Executor, "forward", forward)
    run = a_run({**MEGATRON, **more}, {"n_layers": 4}, {**BATCH, "dtype": "bfloat16"})
    estimate_rank(run, rank * (run.layout.n_processes // 2))
    stages = run.layout.stages_per_rank
    assert [action.micro for action in ran] == [*range(n)] * stages


def test_what_cannot_be_repeated_runs_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise NotRepeatableError("never")

    run = a_run(MEGATRON, {"n_layers": 2}, BATCH)
    expected = estimate_rank(run, 0)
    monkeypatch.setattr(estimate, "ways_of", lambda *_: [refuses])
    assert estimate_rank(run, 0) == expected


def test_remembered_results_are_those_of_torch() -> None:
    mode = fast_fake.FastFakeTensorMode()

    def results() -> list[torch.Tensor]:
        x = torch.empty(4, 6, dtype=torch.bfloat16)
        first, second = x.t().split(3)
        total = x.float().sum(0, keepdim=True)
        norm = torch.nn.functional.layer_norm(x.float(), (6,))
        return [x.t()[1:], first, second.contiguous(), total, x.add_(1), norm, x.to(torch.int64)]

    with mode:
        results()
        again = results()
    with FakeTensorMode():
        real = results()
    for ours, theirs in zip(again, real):
        assert ours.dtype == theirs.dtype
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())
        assert ours.storage_offset() == theirs.storage_offset()
        assert ours.device == theirs.device
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert again[0].untyped_storage()._cdata == again[1].untyped_storage()._cdata
