"""A pipeline's messages as NCCL carries them out: exact, and without circular waits.

NCCL's path runs over gloo; see tests/support/multirank/nccl_path.py. gloo does not show a deadlock
that NCCL has, so what the ranks did is replayed by NCCL's rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm import P2PChannel, Pending, p2p
from gridformer.config import LayoutConfig
from gridformer.parallel.pipeline import LOADING_RUNS, Executor
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


class Event(NamedTuple):
    """One rank starts a message, or waits for one that it has started.

    Attributes:
        number: Identifies the message on this rank.
        group: The group's name, the same on all its members.
        source: The sender's index along pp.
        to: The receiver's index along pp.
    """

    what: str
    number: int
    group: str = ""
    source: int = -1
    to: int = -1


def recorded(layout: Layout) -> tuple[list[Event], dict[tuple[int, int], list[int]]]:
    """Return what this rank did in a step, and the members of its groups by their ends."""
    plan, config = LayoutConfig(**layout), family("gpt2", n_layers=N_LAYERS)
    axes = axes_of(plan)
    stepper = stepper_of(config, plan, axes)
    executor = stepper.executor
    assert isinstance(executor, Executor)
    channel, here, numbers = executor.channel, axes.pp.index, count()
    events: list[Event] = []

    def watched(what: str, begin: Callable[..., Pending]) -> Callable[..., Pending]:
        def start(x: Tensor, peer: int, label: str) -> Pending:
            pending, number = begin(x, peer, label), next(numbers)
            source, to = (here, peer) if what == "send" else (peer, here)
            group = channel._group(source, to)
            assert group is not None
            events.append(Event(what, number, str(group.group_name), source, to))
            wait = pending.wait

            def waited() -> Tensor:
                events.append(Event("wait", number))
                return wait()

            pending.wait = waited  # type: ignore[method-assign]
            return pending

        return start

    channel.send = watched("send", channel.send)  # type: ignore[method-assign]
    channel.receive = watched("receive", channel.receive)  # type: ignore[method-assign]
    (read,) = reads_of(config, 1)
    stepper(0, read)
    members = {edge: dist.get_process_group_ranks(group) for edge, group in channel._groups.items()}
    return events, members


def stuck(ranks: Sequence[Sequence[Event]]) -> list[int]:
    """Return the ranks that never finish by NCCL's rules.

    A rank's messages of one group are carried out in order, and a message is carried out once both
    its ends have nothing before it. A rank that waits for a message does nothing else meanwhile.
    """
    left = [deque(events) for events in ranks]
    queues: dict[str, list[deque[Event]]] = {}
    done: list[set[int]] = [set() for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(left):
            while events and (events[0].what != "wait" or events[0].number in done[rank]):
                event = events.popleft()
                moved = True
                if event.what != "wait":
                    queues.setdefault(event.group, [deque() for _ in ranks])[rank].append(event)
        for of_rank in queues.values():
            for a, queue in enumerate(of_rank):
                if not queue or queue[0].what != "send":
                    continue
                b = queue[0].to
                there = of_rank[b][0] if of_rank[b] else None
                if there and (there.what, there.source) == ("receive", a):
                    done[a].add(queue.popleft().number)
                    done[b].add(of_rank[b].popleft().number)
                    moved = True
    return [rank for rank, events in enumerate(left) if events]


def sharing(events: Sequence[Event], name: Callable[[Event], str]) -> list[Event]:
    """Return the same events with other groups."""
    return [e if e.what == "wait" else e._replace(group=name(e)) for e in events]


def way(event: Event) -> str:
    """Name a group of all ranks for each direction."""
    return "up" if event.to > event.source else "down"


@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout in LAYOUTS[:2], LAYOUTS[:-1]),
    ids=name_of,
)
def test_messages_do_not_deadlock(pool: WorkerPool, layout: Layout) -> None:
    """In a group of two, one rank only sends and the other only receives.

    With groups of all ranks, one for each direction, a receive that is posted early blocks a send.
    """
    pp, ring = layout["pp"], "stages_per_rank" in layout
    found = pool.run(pp, on_nccl, recorded, layout)
    ranks: list[list[Event]] = [events for events, _ in found]
    messages = sum(event.what == "send" for events in ranks for event in events)
    stages = pp * layout.get("stages_per_rank", 1)
    assert messages == 2 * layout["micro_batches"] * (stages - 1)
    assert stuck(ranks) == []

    with_all = stuck([sharing(events, way) for events in ranks])
    assert bool(with_all) == (layout["pp"] > 2 and layout.get("pipeline") != "gpipe"), with_all

    edges = {(i, (i + 1) % pp) for i in range(pp if ring else pp - 1)}
    edges |= {(b, a) for a, b in edges}
    groups: dict[tuple[int, int], set[str]] = {edge: set() for edge in edges}
    for rank, (events, members) in enumerate(found):
        assert members == {edge: sorted(edge) for edge in edges if rank in edge}
        for event in events:
            if event.what != "wait":
                groups[event.source, event.to].add(event.group)
    names = [name for of_edge in groups.values() for name in of_edge]
    assert len({*names}) == len(names) == len(edges), "each pair and direction has its own"


def test_a_deadlock_is_found() -> None:
    """Two ranks send before they receive: this deadlocks over one group, but not over two."""

    def both_send(one: str, other: str) -> list[list[Event]]:
        found: list[list[Event]] = []
        for here, there, mine, theirs in ((0, 1, one, other), (1, 0, other, one)):
            sends = Event("send", 0, mine, here, there)
            receives = Event("receive", 1, theirs, there, here)
            found.append([sends, receives, Event("wait", 1), Event("wait", 0)])
        return found

    assert stuck(both_send("up", "down")) == []
    assert stuck(both_send("all", "all")) == [0, 1]
    alone: list[Any] = [[Event("receive", 0, "all", 1, 0), Event("wait", 0)], []]
    assert stuck(alone) == [0]
