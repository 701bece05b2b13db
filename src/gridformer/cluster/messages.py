"""How long one message takes on a cluster: collectives by algorithm and level of the network.

Rings and pipelined rings keep every link busy all the time, so a message takes as long as its
slowest level needs for its share, plus the latency of its hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from gridformer.cluster.file import Cluster

if TYPE_CHECKING:
    from numpy.typing import NDArray

Op = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send"
]


class MessageWork(NamedTuple):
    """The work of one message.

    Attributes:
        bytes: The bytes that one rank passes in; for all_gather and reduce_scatter, those of the
            gathered buffer.
        members: The places of its ranks on the machine: place i is device i % node_size of node
            i // node_size. For `send` the sender and the receiver.
        sharers: The number of similar messages, this one included, that have members in the same
            unit below the outermost level that this one crosses, and that travel at the same time;
            see `like_messages`.
    """

    op: Op
    bytes: float
    members: tuple[int, ...]
    sharers: int = 1


class _Spread(NamedTuple):
    """How the members of a group lie on one level of a machine."""

    below: int  # units of the level below that hold them
    units: int  # units of this level that hold them
    parts: frozenset[tuple[int, int]]  # members and links of the units below that differ


def like_messages(
    cluster: Cluster, members: Sequence[int], groups: Sequence[Sequence[int]] | NDArray
) -> int:
    """Returns `MessageWork.sharers` of a message among `members`, when all groups send at once."""
    import numpy as np  # which checks of a run do not load

    below = _outermost(_spread(cluster, members))
    if below == 0:
        return 1  # inside a node devices have links of their own
    size = cluster.levels[below - 1].size
    units = np.sort(np.asarray(groups) // size, axis=1)
    first = np.diff(units, axis=1, prepend=-1) > 0  # each unit of a group once
    first &= units[:, :1] < units[:, -1:]  # of groups that cross
    crossing = np.bincount(units[first], minlength=max(members) // size + 1)
    return max(1, int(crossing[np.asarray(members) // size].max()))


def message_s(cluster: Cluster, work: MessageWork) -> float:
    """Returns the time in seconds from when the last rank is ready until all have their result."""
    n = len(work.members)
    if n < 2:
        return 0.0
    spread = _spread(cluster, work.members)
    nodes = spread[0].units
    measured = cluster.tables.message_s(
        cluster.processes, work.op, n, nodes, work.sharers, work.bytes
    )
    if measured is not None:
        return measured
    ring = _ring_s(cluster, work, spread)
    if work.op == "all_reduce":
        ring = min(ring, _tree_s(cluster, work, spread))
    return cluster.host.message_us.value * 1e-6 + ring


def message_cpu_s(cluster: Cluster, work: MessageWork) -> float:
    """Returns for how many of these seconds a message over gloo keeps a thread busy on each rank.

    Within a node it is all of them: sockets are copied by the processor. Between nodes it is the
    time that such a message takes within one, or nothing if no such message was measured.
    """
    whole, n = message_s(cluster, work), len(work.members)
    nodes = _spread(cluster, work.members)[0].units
    if nodes == 1:
        return whole
    inside = cluster.tables.message_s(cluster.processes, work.op, n, 1, 1, work.bytes)
    return min(whole, inside or 0.0)


def _outermost(spread: Sequence[_Spread]) -> int:
    """Returns the index of the innermost level with a unit that holds all members."""
    return next((i for i, level in enumerate(spread) if level.units == 1), len(spread) - 1)


def _spread(cluster: Cluster, members: Sequence[int]) -> tuple[_Spread, ...]:
    """Returns how the members of a group lie on each level, from the inside out."""
    return _spread_over(tuple((one.size, one.shared_by) for one in cluster.levels), tuple(members))


@lru_cache(maxsize=1 << 14)  # a search asks for the same groups with many sizes of messages
def _spread_over(
    levels: tuple[tuple[int, int], ...], members: tuple[int, ...]
) -> tuple[_Spread, ...]:
    spread, below = [], 1
    for size, shared_by in levels:
        units: dict[int, list[int]] = {}
        for place in members:
            units.setdefault(place // below, []).append(place)
        parts = {(len(some), len({at // shared_by for at in some})) for some in units.values()}
        n_units = len({place // size for place in members})
        spread.append(_Spread(len(units), n_units, frozenset(parts)))
        below = size
    return tuple(spread)


def _ring_s(cluster: Cluster, work: MessageWork, spread: Sequence[_Spread]) -> float:
    """Returns the time of a ring, for broadcast and reduce of a pipelined chain."""
    n, outermost, latency = len(work.members), _outermost(spread), 0.0
    rounds = 2 if work.op == "all_reduce" else 1
    hops = 1 if work.op == "send" else rounds * (n - 1)
    for index in range(outermost, -1, -1):
        # A ring crosses this level as often as it has units there.
        here = min(hops, rounds * (spread[index].below - 1)) if index else hops
        latency += here * cluster.levels[index].latency_us.value * 1e-6
        hops -= here
    return _slowest_level_s(cluster, work, spread) + latency


def _tree_s(cluster: Cluster, work: MessageWork, spread: Sequence[_Spread]) -> float:
    """Returns the time of a double binary tree over the nodes, which has fewer hops than a ring."""
    n, nodes, levels = len(work.members), spread[0].units, cluster.levels
    if nodes < 2:
        return math.inf
    volume = n / (n - 1)  # a tree moves 2B where a ring moves 2B(n - 1)/n
    inner, outer = -(-n // nodes) - 1, math.ceil(math.log2(nodes))
    hops_us = inner * levels[0].latency_us.value
    hops_us += outer * levels[_outermost(spread)].latency_us.value
    return volume * _slowest_level_s(cluster, work, spread) + 2 * hops_us * 1e-6


def _slowest_level_s(cluster: Cluster, work: MessageWork, spread: Sequence[_Spread]) -> float:
    """Returns the longest time that the links of a level need for the message's bytes."""
    return max(_level_s(cluster, work, i, spread) for i in range(_outermost(spread) + 1))


def _level_s(cluster: Cluster, work: MessageWork, index: int, spread: Sequence[_Spread]) -> float:
    level, n_units = cluster.levels[index], spread[index].below
    if n_units < 2:
        return 0.0
    if spread[index].units == n_units and index + 1 < len(cluster.levels):
        return 0.0  # no two of its units have a common unit of this level
    efficiency = cluster.number("outer_efficiency" if index else "inner_efficiency")
    rate = level.bandwidth_gbps.value * 1e9 * efficiency
    n, sharers = len(work.members), work.sharers if index == _outermost(spread) else 1
    all_links = max(1, (cluster.levels[index - 1].size if index else 1) // level.shared_by)
    # The unit with the fewest links for what passes through it is the slowest.
    slowest = 0.0
    for here, links in spread[index].parts:
        volume = _through(work, n, here)
        slowest = max(slowest, volume / links, sharers * volume / max(all_links, links))
    if index > 0:
        slowest *= 1 + cluster.number("slowdown_per_node") * max(0, n_units - 2)
    return slowest / rate


def _through(work: MessageWork, n: int, here: int) -> float:
    """Returns the bytes that leave a unit which holds `here` of the n members."""
    if work.op == "all_reduce":
        return 2 * (n - 1) / n * work.bytes
    if work.op in ("all_gather", "reduce_scatter"):
        return (n - 1) / n * work.bytes
    if work.op == "all_to_all":
        return here * (n - here) / n * work.bytes
    return work.bytes
