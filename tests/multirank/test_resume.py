"""Runs that stop and resume: bit-exact under the same layout, exact under any other."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from gridformer.checkpoint import checkpoint, find
from gridformer.checkpoint import save as saving
from gridformer.checkpoint.checkpoint import check_same_run, data_start_of
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.data import TokenFolder
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.plan import Plan
from gridformer.utils.errors import CheckpointError
from tests.support.checkpoints import flip_a_bit
from tests.support.data import open_batches
from tests.support.marks import full_unless
from tests.support.multirank.layouts import n_of, name_of
from tests.support.multirank.pool import RankFailed, WorkerPool
from tests.support.multirank.runs import (
    MIDDLE,
    STEPS,
    assert_same_bits,
    assert_same_run,
    losses,
    plan_of,
    start_from,
    stored,
    tokens,
    train,
)


def named(layout: dict[str, Any]) -> str:
    more = [
        str(layout[key])
        for key in ("common", "pp", "stages_per_rank", "pipeline", "dp_mode")
        if key in layout
    ]
    return "-".join([name_of({"scheme": "single", **layout}), *more])


def train_and_fail(plan: Plan) -> None:
    """Train on one rank; the last rank's disk fails while it writes the second checkpoint.

    For space, which may come back, a last save would wait.
    """
    written = []

    def failing(file: BinaryIO, blocks: Any) -> tuple[int, int]:
        written.append(file)
        if len(written) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            file.write(b"half a file")
            raise OSError(errno.EIO, "input/output error")
        return original(file, blocks)

    original = saving.write_file
    with patch.object(saving, "write_file", failing):
        train(plan)


WIDE: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 3}
SOME: list[dict[str, Any]] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "pipelined", "stationary": "input"},
    WIDE,
]
SUPER: dict[str, Any] = {"scheme": "subgraph", "branches": 2, "dp": 2}
FIRST: dict[str, Any] = {"scheme": "subgraph", "branches": 4, "common": "first"}
# Processes of the last two sub-grids hold nothing, and save nothing.
NOTHING: dict[str, Any] = {**FIRST, "branches": 3, "attention": "outside", "feed_forward": "common"}
SOME += [{**SUPER, "order": "contiguous"}, FIRST]

# Replicas that shard state, and pipelines.
SHAPES: list[dict[str, Any]] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "single", "dp": 3},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 1, "dp": 2, "stationary": "input"},
    SUPER,
    {"scheme": "subgraph", "branches": 2},
    {**SUPER, "common": "first"},
]
CUT = [{**shape, "dp_mode": mode} for shape in SHAPES for mode in ("zero1", "fsdp")]
THREE, INTERLEAVED = SHAPES[1], {"pp": 2, "stages_per_rank": 2, "micro_batches": 4}
HYBRID = {"dp": 4, "dp_mode": "fsdp", "shard_over": 2}
V_SHAPED = {**INTERLEAVED, "pipeline": "zbv"}
SOME += [{**HYBRID, "dp_mode": "zero1"}, *CUT, HYBRID, INTERLEAVED, V_SHAPED]
QUICK = [FIRST, HYBRID, INTERLEAVED]


@pytest.mark.parametrize("layout", full_unless(QUICK.__contains__, SOME), ids=named)
def test_same_layout_is_bit_exact(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Each layout has another schedule, which goes on where it was."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    schedules = ("wsd", "linear", "constant", "inverse_sqrt", "cosine")
    schedule = schedules[(len(SOME) - 1 - SOME.index(layout)) % len(schedules)]
    how: dict[str, Any] = {"dtype": "float32", "lr_schedule": schedule}
    how |= {"decay_fraction": 0.5} if schedule == "wsd" else {}
    pool.run(n_of(layout), train, plan_of(token_folder, whole, layout, **how))
    start_from(whole, resumed)
    plan = plan_of(token_folder, resumed, layout, **how)
    assert plan.resume_step == MIDDLE
    pool.run(n_of(layout), train, plan)
    assert losses(resumed) == losses(whole)
    assert_same_bits(whole, resumed)
    if layout is INTERLEAVED:  # the table lies on both stages
        for table in ("model.tokens.weight", "exp_avg.tokens.weight"):
            assert [name for name, _ in stored(whole)].count(table) == 1


ONE: dict[str, Any] = {}
GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}
STAGES: dict[str, Any] = {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 3}
# Weights placed differently, norms that are whole or sharded, and processes that hold nothing;
# tests/multirank/test_moves.py draws others.
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "gather"},
        {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast", "stationary": "input"},
    ),
    (SUPER, {"scheme": "optimus", "rows": 2, "cols": 2}),
    (FIRST, {"scheme": "single"}),
    (NOTHING, SUPER),
    ({**THREE, "dp_mode": "zero1"}, {**SHAPES[0], "dp_mode": "fsdp"}),
    (INTERLEAVED, STAGES),
    (V_SHAPED, STAGES),
    (STAGES, V_SHAPED),
    ({**SUPER, "dp_mode": "fsdp", "shard_over": 2}, HYBRID),
    (ONE, {"pp": 2, "micro_batches": 4}),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-to-".join(map(named, p)))
def test_any_layout_resumes_from_any_other(
    pool: WorkerPool,
    token_folder: Path,
    tmp_path: Path,
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    before, after = pair
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    pool.run(n_of(before), train, plan_of(token_folder, whole, before))
    start_from(whole, moved)
    pool.run(n_of(after), train, plan_of(token_folder, moved, after))
    assert_same_run(whole, moved)


def test_a_last_save_that_fails_leaves_the_checkpoint_before(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    layout = {"scheme": "optimus", "rows": 2, "cols": 2}
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    pool.run(4, train, plan_of(token_folder, whole, layout))
    with pytest.raises(RankFailed, match=r"SaveError: the checkpoint of step 5 could not be saved"):
        pool.run(4, train_and_fail, plan_of(token_folder, crashed, layout))
    newest = find.latest(crashed)
    assert newest is not None
    assert newest.name == f"step-{MIDDLE:08d}"
    verify_checkpoint(newest)
    pool.run(4, train, plan_of(token_folder, crashed, layout))
    assert losses(crashed) == losses(whole)
    left = sorted(path.name for path in (crashed / "checkpoints").iterdir())
    assert left == [f"step-{MIDDLE:08d}", f"step-{STEPS:08d}"], "the half-written one is gone"


def test_tokens_are_counted_on(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    """A resumed run counts on, in metrics.jsonl and in its checkpoints."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    pool.run(1, train, plan_of(token_folder, whole, {}))
    start_from(whole, resumed)
    pool.run(1, train, plan_of(token_folder, resumed, {}))
    each = 24 * 12  # tokens per step
    assert tokens(resumed) == [*(each * step for step in range(STEPS + 1)), each * STEPS]


def train_and_count(plan: Plan) -> list[int]:
    """Return the steps that this rank saved."""
    with patch.object(checkpoint, "manifest_of", wraps=checkpoint.manifest_of) as made:
        train(plan)
    return [call.args[0] for call in made.call_args_list]


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4, 5]), (5, [5])])
def test_each_step_is_saved_once(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, every: int, steps: list[int]
) -> None:
    """The last step is always saved, and only once if it is due anyway."""
    plan = plan_of(token_folder, tmp_path, {}, save_every=every)
    assert pool.run(1, train_and_count, plan) == [steps]


def test_ranks_share_the_checking_of_all_files(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """If one bit of the numbers in any file is wrong, the checkpoint is not loaded."""
    layout = {"scheme": "megatron", "cols": 2}
    pool.run(2, train, plan_of(token_folder, tmp_path, layout, steps=MIDDLE))
    plan = plan_of(token_folder, tmp_path, layout)
    assert plan.resume is not None
    files = sorted(plan.resume.glob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        flip_a_bit(file)
        with pytest.raises(RankFailed) as failure:
            pool.run(2, train, plan)
        assert f"{file} is damaged (its checksum is wrong)" in str(failure.value)
        flip_a_bit(file)
    pool.run(2, train, plan)


def test_another_models_checkpoint_is_refused(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    pool.run(1, train, plan_of(token_folder, tmp_path, {}))
    plan = plan_of(token_folder, tmp_path, {})
    assert plan.resume is not None
    other = plan.run.model_copy(
        update={"model": plan.run.model.model_copy(update={"hidden_size": 36, "ffn_size": 144})}
    )
    manifest = read_manifest(plan.resume)
    with pytest.raises(CheckpointError, match=r"model.hidden_size is 36, there 24.*--out"):
        check_same_run(manifest, other, plan.resume)
    with pytest.raises(RankFailed, match="is of another model"):
        pool.run(1, train, Plan(other, tmp_path, plan.resume, MIDDLE, decide_run(other)))


CHANGED, LATER = 2, 4  # the steps after which the data change, and at which the grid is left


def changed_plan(data: Path, out: Path, layout: dict[str, Any], restart: bool = True) -> Plan:
    """Plan what is left of a run with half the batch and shorter samples, as `train` does."""
    plan = plan_of(data, out, layout, global_batch=12, save_every=1, keep_checkpoints=9)
    values = plan.run.data.model_copy(update={"seq_len": 8, "restart": restart})
    run = plan.run.model_copy(update={"data": values})
    assert plan.resume is not None
    manifest = read_manifest(plan.resume)
    check_same_run(manifest, run, plan.resume)
    return replace(plan, run=run, data_start=data_start_of(manifest, run))


def test_what_resumes_with_other_data_is_exact(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """One device, a grid, and a grid that one device takes over have the same losses."""
    first = tmp_path / "first"
    pool.run(1, train, plan_of(token_folder, first, {}, steps=CHANGED))
    alone, grid, moved = (tmp_path / name for name in ("alone", "grid", "moved"))
    for out in (alone, grid):
        start_from(first, out, CHANGED)
    plan = changed_plan(token_folder, alone, {})
    assert plan.data_start == CHANGED
    pool.run(1, train, plan)
    pool.run(n_of(GRID), train, changed_plan(token_folder, grid, GRID))
    start_from(grid, moved, LATER)
    plan = changed_plan(token_folder, moved, {})
    assert (plan.resume_step, plan.data_start) == (LATER, CHANGED), "it began anew only once"
    pool.run(1, train, plan)
    want = losses(alone)
    assert list(want) == list(range(1, STEPS + 1))
    for out in (grid, moved):
        for step, got in losses(out).items():
            assert got == pytest.approx(want[step], rel=1e-9), (out, step)
    assert changed_plan(token_folder, alone, {}, restart=False).data_start == CHANGED

    plan = plan_of(token_folder, first, {}, global_batch=12)
    assert plan.resume is not None
    manifest = read_manifest(plan.resume)
    with pytest.raises(CheckpointError, match=r"global_batch is 12, there 24.*data\.restart=true"):
        check_same_run(manifest, plan.run, plan.resume)


def test_the_first_batch_is_that_of_a_new_run(token_folder: Path, tmp_path: Path) -> None:
    run = plan_of(token_folder, tmp_path, {}).run
    new = open_batches(run, TokenFolder.open(run.data.path), "train")
    later = replace(new, start=7)
    for step in range(3):
        for key, value in new.batch(step).items():
            assert np.array_equal(later.batch(step + 7)[key], value)
