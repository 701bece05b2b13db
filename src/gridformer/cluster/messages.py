"""How long one message takes on a cluster: collectives by algorithm and level of the network.

Rings and pipelined rings keep every link busy all the time, so a message takes as long as its
slowest level needs for its share, plus the latency of its hops.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from gridformer.cluster.file import Cluster, Level

Op = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send"
]


class MessageWork(NamedTuple):
    """What one message does.

    Attributes:
        op: The collective, or `send`.
        bytes: What one rank hands in, for all_gather and reduce_scatter the gathered buffer.
        members: The places of its ranks on the machine: place i is device i % node_size of node
            i // node_size. For `send` the sender and the receiver.
        sharers: So many like messages, this one included, have members in the same unit below
            the outermost level that this one crosses, and travel at the same time; see
            `like_messages`.
    """

    op: Op
    bytes: float
    members: tuple[int, ...]
    sharers: int = 1


def like_messages(cluster: Cluster, members: Sequence[int], groups: Iterable[Sequence[int]]) -> int:
    """Returns `MessageWork.sharers` of a message in a group, when all groups send at once.

    Args:
        cluster: The machine.
        members: The places of the group.
        groups: The places of all groups of the same axis, that of the message among them.
    """
    below = _outermost(cluster, members)
    if below == 0:
        return 1  # inside a node devices have links of their own, see Level.shared_by
    size = cluster.levels[below - 1].size
    units = {place // size for place in members}
    crossing = [g for g in groups if len({place // size for place in g}) > 1]
    return max([1, *(sum(any(p // size == unit for p in g) for g in crossing) for unit in units)])


def message_s(cluster: Cluster, work: MessageWork) -> float:
    """Returns the time in seconds from when the last rank is ready until all have their result."""
    n = len(work.members)
    if n < 2:
        return 0.0
    nodes = len({place // cluster.node_size for place in work.members})
    measured = cluster.tables.message_s(
        cluster.processes, work.op, n, nodes, work.sharers, work.bytes
    )
    if measured is not None:
        return measured
    outermost = _outermost(cluster, work.members)
    ring = _ring_s(cluster, work, outermost)
    if work.op == "all_reduce":
        ring = min(ring, _tree_s(cluster, work, outermost))
    return cluster.host.message_us.value * 1e-6 + ring


def message_cpu_s(cluster: Cluster, work: MessageWork) -> float:
    """Returns for how many of these seconds a message over gloo keeps a thread busy on each rank.

    Within a node it is all of them: sockets are copied by the processor. Between nodes it is the
    time that such a message takes within one, or nothing if no such message was measured.
    """
    whole, n = message_s(cluster, work), len(work.members)
    nodes = len({place // cluster.node_size for place in work.members})
    if nodes == 1:
        return whole
    inside = cluster.tables.message_s(cluster.processes, work.op, n, 1, 1, work.bytes)
    return min(whole, inside or 0.0)


def _outermost(cluster: Cluster, members: Sequence[int]) -> int:
    """Returns the index of the innermost level of which one unit holds all members."""
    for index, level in enumerate(cluster.levels):
        if len({place // level.size for place in members}) == 1:
            return index
    return len(cluster.levels) - 1


def _ring_s(cluster: Cluster, work: MessageWork, outermost: int) -> float:
    """Returns the time of a ring, for broadcast and reduce of a pipelined chain."""
    n = len(work.members)
    slowest = max(_level_s(cluster, work, index, outermost) for index in range(outermost + 1))
    hops = {"all_reduce": 2 * (n - 1), "send": 1}.get(work.op, n - 1)
    latency = 0.0
    for index in range(outermost, -1, -1):
        size = cluster.levels[index - 1].size if index else 1
        units = len({place // size for place in work.members})
        # Of the hops of a ring, as many cross this level as it has units there.
        here = min(hops, (units - 1) * (2 if work.op == "all_reduce" else 1))
        if index == 0:
            here = hops
        latency += here * cluster.levels[index].latency_us.value * 1e-6
        hops -= here
    return slowest + latency


def _tree_s(cluster: Cluster, work: MessageWork, outermost: int) -> float:
    """Returns the time of a double binary tree over the nodes, which has fewer hops than a ring."""
    n = len(work.members)
    nodes = len({place // cluster.node_size for place in work.members})
    if nodes < 2:
        return math.inf
    volume = n / (n - 1)  # a tree moves 2B where a ring moves 2B(n - 1)/n
    slowest = volume * max(
        _level_s(cluster, work, index, outermost) for index in range(outermost + 1)
    )
    inner = -(-n // nodes) - 1
    outer = math.ceil(math.log2(nodes))
    hops_us = inner * cluster.levels[0].latency_us.value
    hops_us += outer * cluster.levels[outermost].latency_us.value
    return slowest + 2 * hops_us * 1e-6


def _level_s(cluster: Cluster, work: MessageWork, index: int, outermost: int) -> float:
    """Returns the time that the links of one level need for the message's bytes."""
    level = cluster.levels[index]
    below = cluster.levels[index - 1].size if index else 1
    units: dict[int, list[int]] = {}
    for place in work.members:
        units.setdefault(place // below, []).append(place)
    if len(units) < 2:
        return 0.0
    if len({place // level.size for place in work.members}) == len(units):
        return 0.0  # no two of its units have a common unit of this level
    rate = level.bandwidth_gbps.value * 1e9 * _efficiency(cluster, index)
    n, sharers = len(work.members), work.sharers if index == outermost else 1
    # The unit with the fewest links for what passes through it is the slowest.
    slowest = 0.0
    for places in units.values():
        links = len({place // level.shared_by for place in places})
        all_links = max(1, below // level.shared_by)
        volume = _through(work, n, len(places))
        slowest = max(slowest, volume / links, sharers * volume / max(all_links, links))
    if index > 0:
        slowest *= 1 + cluster.number("slowdown_per_node") * max(0, len(units) - 2)
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


def _efficiency(cluster: Cluster, index: int) -> float:
    return cluster.number("inner_efficiency" if index == 0 else "outer_efficiency")


def link_count(level: Level, devices: int) -> int:
    """Returns the number of links of a level that so many neighboring devices have."""
    return max(1, devices // level.shared_by)
