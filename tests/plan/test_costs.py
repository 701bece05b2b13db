"""Times of messages, which are remembered for all groups that are alike."""

import itertools

import pytest
import torch

from gridformer.cluster.file import load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.auto.decisions import decide_run
from gridformer.plan.program import EventTimes
from gridformer.record.events import Part, Place, Start
from tests.support.round_cluster import round_cluster


def run_of(*layout: str) -> RunConfig:
    given = ["train.global_batch=16", *(f"layout.{one}" for one in layout)]
    return parse_run({"model": "gpt2-774m", "data": {"path": "."}}, given)


def costs_of(run: RunConfig) -> EventTimes:
    return EventTimes(run, load_cluster("dgx-h100"), decide_run(run))


def places_of(times: EventTimes, group: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    return [(one.members, one.sharers) for one in times.groups.places(group)]


@pytest.mark.parametrize(
    "layout",
    [
        ("scheme=optimus", "rows=2", "cols=4", "dp=2", "pp=2", "micro_batches=2"),
        ("scheme=megatron", "cols=4", "dp=8"),
    ],
)
def test_what_is_remembered_of_groups_is_what_is_found_anew(layout: tuple[str, ...]) -> None:
    """Groups of every two axes, and pairs of ranks, are asked for in one order and in another."""
    run = run_of("devices_per_node=8", *layout)
    found = costs_of(run)
    mesh = torch.from_numpy(found.groups.mesh)
    groups: list[tuple[int, ...]] = []
    for one in range(mesh.dim()):
        for other in range(one + 1, mesh.dim()):
            last = mesh.movedim((one, other), (-2, -1))
            groups += [tuple(g) for g in last.flatten(0, -3).flatten(1).tolist() if len(g) > 1]
        line = mesh.movedim(one, -1).flatten(0, -2)
        groups += [tuple(pair) for row in line.tolist() for pair in itertools.pairwise(row)]
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
    for number in order:
        group = groups[number]
        both = (places_of(one, group) for one in (found, costs_of(run)))
        assert next(both) == next(both)
        like = found.groups._groups(found.groups._along(group)).tolist()
        assert [*group] in like
        assert len({frozenset(one) for one in like}) == len(like)


def test_messages_to_one_rank_take_the_time_of_their_own_links() -> None:
    """Within a node it is shorter than between nodes, in whichever order they are asked for."""
    run = run_of("devices_per_node=8", "scheme=megatron", "cols=4", "pp=4", "micro_batches=4")
    line = 0, 4, 8, 12  # two nodes
    place = Place("", 0, "")

    def seconds(costs: EventTimes, rank: int, size: int = 1 << 20) -> float:
        part = Part("send", 4, size, "bfloat16")
        return costs.start_s(Start(1, "p2p", "pp", line, place, parts=(part,)), rank)[0]

    alone = {rank: seconds(costs_of(run), rank) for rank in (0, 8)}
    assert alone[0] < alone[8]
    for ranks in (0, 8), (8, 0):
        costs = costs_of(run)
        assert {rank: seconds(costs, rank) for rank in ranks} == alone
    sizes = [seconds(costs, 0, size) for size in (1 << 20, 1 << 24, 1 << 20)]
    assert sizes[0] == sizes[2] < sizes[1], "messages of other sizes take another time"


@pytest.mark.parametrize(
    ("sent", "received", "microseconds"),
    [
        # Four columns send through two links of 10 GB/s: 2 x 100 us for 10^6 bytes, and 15 us.
        ([1, 2], [], (200 + 15) + (400 + 15)),
        ([1, 2], [1], (200 + 15) + (400 + 15)),
        ([1], [1, 1], (200 + 15) + (200 + 15)),
        ([1], [3], 600 + 15),
    ],
)
def test_messages_in_one_direction_take_their_turns(
    sent: list[int], received: list[int], microseconds: float
) -> None:
    """Sizes are in 10^6 bytes, and the peers of a direction are in nodes of their own."""
    run = run_of("devices_per_node=4", "scheme=megatron", "cols=4", "pp=4", "micro_batches=4")
    costs = EventTimes(run, round_cluster(), decide_run(run))
    parts = [Part("send", peer, n * 500_000, "bfloat16") for peer, n in zip((4, 8), sent)]
    parts += [Part("recv", peer, n * 500_000, "bfloat16") for peer, n in zip((4, 8), received)]
    start = Start(1, "p2p", "pp", (0, 4, 8, 12), Place("", 0, ""), parts=tuple(parts))
    assert costs.start_s(start, 0)[0] == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((8, 8, 8, 8), (8, 8, 8, 8)),
        ((0, 8, 8, 8), (0, 8, 8, 8)),  # without what stays
        ((32, 0, 0, 0), (4, 8, 4, 12)),
    ],
)
def test_an_all_to_all_takes_the_time_of_what_leaves_or_comes(
    sent: tuple[int, ...], received: tuple[int, ...]
) -> None:
    """24 of 32 x 125,000 bytes cross the links of four devices, at 10 us for 10^6."""
    run = run_of("devices_per_node=4", "scheme=megatron", "cols=4")
    there, back = (tuple(62_500 * n for n in one) for one in (sent, received))
    start = Start(1, "all_to_all", "col", (0, 1, 2, 3), Place("", 0, ""), dtype="bfloat16")
    times = EventTimes(run, round_cluster(), decide_run(run))
    seconds = times.start_s(start._replace(pieces=(there, back)), 0)[0]
    assert seconds == pytest.approx((10 + 3 / 4 * 40 + 3 * 3) * 1e-6)
