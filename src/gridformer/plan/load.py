"""What a rank does in one pass, in seconds by kind, and what single kernels and messages take."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from gridformer.cluster.file import Cluster
from gridformer.cluster.kernels import KernelWork, kernel_s
from gridformer.cluster.messages import MessageWork, Op, like_messages, message_s
from gridformer.config import LayoutConfig, RunConfig
from gridformer.mesh.node_placement import NodeBlock, sizes_of
from gridformer.parallel.auto.formulas import product_work
from gridformer.parallel.registry import spec_of


@dataclass
class Load:
    """The work of one rank in a part of a step.

    Attributes:
        products: Seconds of matrix products.
        attention: Seconds of fused attention.
        memory: Seconds of memory-bound kernels, and of copies between host and device.
        launches: Kernels and messages that the host launches.
        exposed: Seconds by axis in which the device waits for messages.
        hidden: Seconds by axis of messages that travel during computation.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: float = 0.0
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels."""
        return self.products + self.attention + self.memory

    @property
    def device_s(self) -> float:
        """Seconds of kernels and of messages that the device waits for."""
        return self.compute_s + sum(self.exposed.values())

    def add(self, other: Load, times: float = 1.0) -> None:
        """Adds another load, a number of times.

        Args:
            other: The other load.
            times: How many times it is added; it may be a fraction.
        """
        self.products += other.products * times
        self.attention += other.attention * times
        self.memory += other.memory * times
        self.launches += other.launches * times
        for axis, seconds in other.exposed.items():
            self.exposed[axis] += seconds * times
        for axis, seconds in other.hidden.items():
            self.hidden[axis] += seconds * times

    def times(self, n: float) -> Load:
        """Returns this load a number of times."""
        found = Load()
        found.add(self, n)
        return found

    def message(self, axis: str, seconds: float, behind: float = 0.0, launches: float = 1) -> None:
        """Adds a message, of which computation of `behind` seconds hides as much as it can.

        Args:
            axis: The axis of the message.
            seconds: How long it travels; 0 adds nothing.
            behind: Seconds of computation that can hide it.
            launches: How many messages and kernels the host launches for it.
        """
        if not seconds:
            return
        shown = max(0.0, seconds - behind)
        self.exposed[axis] += shown
        self.hidden[axis] += seconds - shown
        self.launches += launches


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast
class AxisPlace:
    """Where the ranks of one axis lie on the machine.

    Attributes:
        members: The places of one group of the axis.
        sharers: How many such groups use the same links at the same time.
    """

    members: tuple[int, ...]
    sharers: int = 1

    @property
    def size(self) -> int:
        """The number of ranks of a group."""
        return len(self.members)


class StepCosts:
    """Seconds of kernels and messages on one cluster; remembers what it was asked before."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._kernels: dict[KernelWork, float] = {}
        self._messages: dict[tuple[str, float, AxisPlace], float] = {}
        self._places: dict[tuple[object, ...], dict[str, AxisPlace]] = {}

    def product_s(
        self, batch: int, m: int, n: int, k: int, dtype: str, itemsize: int, more_bytes: int = 0
    ) -> float:
        """Returns the seconds of a product of `batch` matrices [m, k] and [k, n].

        Args:
            batch: The number of products.
            m, n, k: Their sizes.
            dtype: The type of the operands.
            itemsize: Its bytes.
            more_bytes: What it reads and writes besides operands and a result of this type.
        """
        work = product_work(batch, m, n, k, dtype, itemsize)
        return self._kernel(work._replace(bytes=work.bytes + more_bytes) if more_bytes else work)

    def attention_s(
        self,
        shape: tuple[int, int, int, int, int, int],
        dtype: str,
        itemsize: int,
        passes: float,
        own: bool = False,
    ) -> float:
        """Returns the seconds of fused attention.

        Args:
            shape: (batch, heads, queries, keys, width, hides): see `KernelWork`.
            dtype: The type of the operands.
            itemsize: Its bytes.
            passes: 1 for the forward pass and 2 for the backward pass, as in `train.flops`.
            own: Whether it is gridformer's kernel, and not PyTorch's.
        """
        batch, heads, queries, keys, width, _ = shape
        op = ("attention" if own else "sdpa") + ("_backward" if passes > 1 else "")
        flop = 4.0 * batch * heads * queries * keys * width * passes
        n_bytes = passes * 2 * batch * heads * (queries + keys) * width * itemsize
        return self._kernel(KernelWork("attention", flop, n_bytes, dtype, shape, op))

    def memory_s(self, n_bytes: float) -> float:
        """Returns the seconds of a memory-bound kernel that moves this many bytes."""
        return self._kernel(KernelWork("memory", 0.0, n_bytes)) if n_bytes else 0.0

    def copy_s(self, n_bytes: float) -> float:
        """Returns the seconds of copying this many bytes between the host and a device."""
        return self._kernel(KernelWork("copy", 0.0, n_bytes)) if n_bytes else 0.0

    def message_s(self, op: Op, n_bytes: float, place: AxisPlace) -> float:
        """Returns the seconds of a message; `n_bytes` as in `MessageWork`.

        Args:
            op: The collective, or `send`.
            n_bytes: Bytes of the message.
            place: Where its ranks lie; one rank sends nothing.
        """
        if place.size < 2 or not n_bytes:
            return 0.0
        key = op, n_bytes, place
        if key not in self._messages:
            work = MessageWork(op, n_bytes, place.members, place.sharers)
            self._messages[key] = message_s(self.cluster, work)
        return self._messages[key]

    def places_of(self, run: RunConfig, block: NodeBlock | None) -> dict[str, AxisPlace]:
        """Returns where one group of each axis lies; rank i is on device i.

        Args:
            run: The run.
            block: What each node holds.
        """
        layout = run.layout
        key = layout.scheme, *sizes_of(layout), layout.order, layout.common, block
        if key not in self._places:
            self._places[key] = _places(layout, self.cluster, block)
        return self._places[key]

    def _kernel(self, work: KernelWork) -> float:
        if work not in self._kernels:
            self._kernels[work] = kernel_s(self.cluster, work)
        return self._kernels[work]


def hop_from(i: int) -> str:
    """Returns the name of the axis place between the pipeline's rank i and the next, in a ring."""
    return f"pp from {i}"


def _places(
    layout: LayoutConfig, cluster: Cluster, block: NodeBlock | None
) -> dict[str, AxisPlace]:
    n = layout.n_processes
    if n == 1:
        return {}
    spec = spec_of(layout)
    ranks = spec.ranks(layout, block)
    groups: dict[str, tuple[int, ...]] = {"world": tuple(range(n))}
    for i, name in enumerate(("pp", "dp", *spec.mesh)):
        if ranks.shape[i] > 1:
            index = tuple(slice(None) if j == i else 0 for j in range(ranks.dim()))
            groups[name] = tuple(ranks[index].tolist())
    if "pp" in groups:
        # A message goes from one stage to the next, at the slowest between those furthest apart.
        hops = [*zip(groups["pp"], (*groups["pp"][1:], groups["pp"][0]))]
        groups["pp"] = max(hops[:-1], key=lambda pair: _levels_between(pair, cluster))
        groups |= {hop_from(i): pair for i, pair in enumerate(hops)}
    if spec.replicas(layout) > layout.dp:
        groups["replicas"] = tuple(sorted(ranks[0].flatten().tolist()))
    elif "dp" in groups:
        groups["replicas"] = groups["dp"]
    places = {axis: AxisPlace(group, _sharers(group, cluster, n)) for axis, group in groups.items()}
    # Of a hop, only the devices of two stages send, those of other stages on a node do not.
    stages = ranks.reshape(layout.pp, -1)
    for i in range(layout.pp) if layout.pp > 1 else ():
        pairs = torch.stack((stages[i], stages[(i + 1) % layout.pp]), 1).tolist()
        every = [tuple(pair) for pair in pairs]
        place = AxisPlace(every[0], like_messages(cluster, every[0], every))
        places[hop_from(i)] = place
        if groups["pp"] == every[0]:
            places["pp"] = place
    return places


def _levels_between(pair: tuple[int, ...], cluster: Cluster) -> int:
    """Returns how many levels of the network a message between two devices passes."""
    return sum(pair[0] // level.size != pair[1] // level.size for level in cluster.levels)


def _sharers(ranks: tuple[int, ...], cluster: Cluster, n_devices: int) -> int:
    """Returns how many groups like this one leave the same unit of the machine at the same time.

    The unit is that below the outermost level that the group crosses. Groups of an axis are
    disjoint, and each has as many members in the unit as this one. See also
    `gridformer.cluster.like_messages`, which counts all groups.
    """
    inner = 1
    for level in cluster.levels:
        if all(rank // level.size == ranks[0] // level.size for rank in ranks):
            break
        inner = level.size
    if inner == 1:
        return 1
    here = sum(rank // inner == ranks[0] // inner for rank in ranks)
    return max(1, min(inner, n_devices) // here)
