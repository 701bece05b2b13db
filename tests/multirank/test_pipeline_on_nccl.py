"""A pipeline's messages as NCCL carries them out: exact, and without circular waits.

NCCL's path runs over gloo; see tests/support/multirank/nccl_path.py. gloo does not show a deadlock
that NCCL has, so what the ranks did is replayed by NCCL's rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm import P2PChannel, p2p
from gridformer.config import LayoutConfig
from gridformer.parallel.pipeline import LOADING_RUNS
from gridformer.utils.batch import Batch
from tests.support.marks import full_unless
from tests.support.multirank.exactness import TOLERANCE, TRAIN, axes_of, compare
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pipelines import (
    LENGTH,
    Layout,
    family,
    reads_of,
    stepper_of,
)
from tests.support.multirank.pool import WorkerPool

INTERLEAVED: Layout = {"pp": 4, "stages_per_rank": 2, "micro_batches": 8}
LAYOUTS: list[Layout] = [
    INTERLEAVED,
    {"pp": 4, "micro_batches": 6, "pipeline": "1f1b"},
    {"pp": 4, "micro_batches": 6, "pipeline": "gpipe"},
    {"pp": 5, "micro_batches": 6, "pipeline": "1f1b"},
    {"pp": 3, "stages_per_rank": 2, "micro_batches": 6},
    {"pp": 2, "stages_per_rank": 2, "micro_batches": 4},
    {"pp": 2, "stages_per_rank": 3, "micro_batches": 4, "dp": 2},
]
N_LAYERS = 8  # enough stages for all layouts


def how(layout: Layout) -> tuple[Any, ...]:
    """Return what `compare` gets: a small GPT-2 with labels and dropout."""
    model = family("gpt2", n_layers=N_LAYERS).model_dump()
    return layout, {**model, "max_seq_len": LENGTH}, {**TRAIN, "dtype": "float64"}, 2


def name_of(layout: Layout) -> str:
    return "-".join(map(str, layout.values()))


@pytest.mark.parametrize(
    "layout", full_unless(lambda layout: layout == INTERLEAVED, LAYOUTS), ids=name_of
)
def test_equals_one_device(pool: WorkerPool, layout: Layout) -> None:
    for found in pool.run(LayoutConfig(**layout).n_processes, on_nccl, compare, *how(layout)):
        wrong = {k: v for k, v in found.items() if not v <= TOLERANCE["float64"]}
        assert not wrong


@pytest.mark.parametrize("layout", [INTERLEAVED, LAYOUTS[1]], ids=name_of)
def test_messages_through_the_host_change_nothing(pool: WorkerPool, layout: Layout) -> None:
    compared = partial(on_nccl, loading_runs=99)
    for found in pool.run(LayoutConfig(**layout).n_processes, compared, compare, *how(layout)):
        wrong = {k: v for k, v in found.items() if not v <= TOLERANCE["float64"]}
        assert not wrong


def sent_with_gaps() -> Tensor:
    """Send a column of a wider matrix to the next rank of a ring, and back."""
    axes = axes_of(LayoutConfig(pp=dist.get_world_size()))
    channel, here, n = P2PChannel(axes, ring=True), axes.pp.index, axes.pp.size
    ahead, back = torch.empty(4), torch.empty(4)
    coming = [channel.receive(ahead, (here - 1) % n), channel.receive(back, (here + 1) % n)]
    wide = (torch.arange(8.0) + 10 * here).view(4, 2)
    with patch.object(p2p, "isend", wraps=dist.isend) as isend:
        going = [channel.send(wide[:, 1], (here + 1) % n)]
        going.append(channel.send((-wide)[:, 1], (here - 1) % n))
    assert all(call.args[0].is_contiguous() for call in isend.call_args_list), "NCCL refuses gaps"
    for pending in (*coming, *going):
        pending.wait()
    return torch.stack((ahead, back))


@pytest.mark.parametrize("way", ["gloo", "nccl"])
def test_a_message_may_have_gaps(pool: WorkerPool, way: str) -> None:
    found = pool.run(3, on_nccl, sent_with_gaps) if way == "nccl" else pool.run(3, sent_with_gaps)
    for rank, (ahead, back) in enumerate(found):
        column = torch.tensor([1.0, 3.0, 5.0, 7.0])
        assert torch.equal(ahead, column + 10 * ((rank - 1) % 3))
        assert torch.equal(back, -column - 10 * ((rank + 1) % 3))


# --------------------------------------------------------------------------- deadlocks


def ways(layout: Layout) -> list[tuple[str, set[bool]]]:
    """Return for each of several runs whether its messages went through the host."""
    plan, config = LayoutConfig(**layout), family("gpt2", n_layers=4, n_labels=0)
    stepper = stepper_of(config, plan, axes_of(plan))
    (read,) = reads_of(config, 1)
    found: list[tuple[str, set[bool]]] = []

    def noted(x: Tensor, peer: int, group: Any) -> Any:
        found[-1][1].add(dist.get_process_group_ranks(group) == [*range(plan.n_processes)])
        return isend(x, peer, group=group)

    def words(rows: Any) -> Batch:
        return {key: x for key, x in read(rows).items() if key in ("tokens", "targets")}

    def half(rows: Any) -> Batch:
        return {key: x[:, : LENGTH // 2] for key, x in words(rows).items()}

    isend = dist.isend
    with patch.object(p2p, "isend", noted):
        for step in range(4):
            found.append(("train", set()))
            stepper(step, words)
        for _ in range(3):
            found.append(("evaluate", set()))
            stepper.evaluate([words])
        for _ in range(3):
            found.append(("half as long", set()))
            stepper.evaluate([half])
    return found


def test_while_kernels_are_loaded_messages_go_through_the_host(pool: WorkerPool) -> None:
    """A receive over NCCL would occupy the GPU, for which the loading of a kernel may wait."""
    layout: Layout = {"pp": 2, "dp": 2, "micro_batches": 2}
    on_device, through_host = {False}, {True}
    for found in pool.run(4, partial(on_nccl, loading_runs=LOADING_RUNS), ways, layout):
        of_kind: dict[str, list[set[bool]]] = {}
        for kind, seen in found:
            of_kind.setdefault(kind, []).append(seen)
        assert of_kind["train"] == [through_host, through_host, on_device, on_device]
        assert of_kind["evaluate"] in ([through_host] * 2 + [on_device], [set()] * 3)
        assert of_kind["half as long"] == of_kind["evaluate"]
    for found in pool.run(4, ways, layout):
        assert {True} not in [seen for _, seen in found], "gloo's are in the host's memory anyway"
