"""`Costs`: the seconds of kernels and messages on a cluster, each of which is computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gridformer.cluster.file import Cluster
from gridformer.cluster.kernels import KernelWork, kernel_s
from gridformer.cluster.messages import MessageWork, Op, like_messages, message_cpu_s, message_s

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast
class GroupPlace:
    """The places of a group's ranks on the machine, and `MessageWork.sharers` of its messages."""

    members: tuple[int, ...]
    sharers: int = 1


class MessageTime(NamedTuple):
    """Seconds of a message, and for how many of them it keeps a core of a CPU from kernels."""

    seconds: float
    cpu_s: float

    def beside(self, kernels_s: float) -> float:
        """Returns the seconds to wait for it after kernels that run meanwhile."""
        return max(self.cpu_s, self.seconds - kernels_s)


class Costs:
    """The seconds of kernels and messages on one cluster.

    Attributes:
        axes: Where the groups of each axis of a mesh lie, by what a caller knows the mesh by.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.on_cpu = cluster.device.kind == "cpu"
        self.axes: dict[tuple[object, ...], dict[str, tuple[GroupPlace, ...]]] = {}
        self._kernels: dict[KernelWork, float] = {}
        self._messages: dict[tuple[Op, float, tuple[GroupPlace, ...]], MessageTime] = {}

    def kernel_s(self, work: KernelWork) -> float:
        """Returns the seconds of a kernel."""
        if work not in self._kernels:
            self._kernels[work] = kernel_s(self.cluster, work)
        return self._kernels[work]

    def product_s(self, m: int, n: int, k: int, dtype: str, itemsize: int) -> float:
        """Returns the seconds of a product [m, k] x [k, n] whose operands are read once."""
        n_bytes = (m * k + k * n + m * n) * itemsize
        return self.kernel_s(KernelWork("product", 2.0 * m * n * k, n_bytes, dtype, (1, m, n, k)))

    def moved_s(self, n_bytes: float) -> float:
        """Returns the seconds of a memory-bound kernel that reads and writes this many bytes."""
        return self.kernel_s(KernelWork("memory", 0.0, n_bytes)) if n_bytes else 0.0

    def message(self, op: Op, n_bytes: float, places: tuple[GroupPlace, ...]) -> MessageTime:
        """Returns the time of a message in the slowest of some groups that send at once."""
        key = op, n_bytes, places
        if key not in self._messages:
            works = [MessageWork(op, n_bytes, one.members, one.sharers) for one in places]
            slowest = max(message_s(self.cluster, work) for work in works)
            cpu_s = max(message_cpu_s(self.cluster, w) for w in works) if self.on_cpu else 0.0
            self._messages[key] = MessageTime(slowest, cpu_s)
        return self._messages[key]


class MeshGroups:
    """The groups of ranks of a mesh on a cluster, where rank i is on device i.

    Args:
        mesh: The rank at each position.
        cluster: The cluster.
    """

    def __init__(self, mesh: NDArray, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._position = mesh.flatten().argsort()  # by rank
        self._places: dict[tuple[int, ...], tuple[GroupPlace, ...]] = {}
        self._alike: dict[tuple[object, ...], tuple[GroupPlace, ...]] = {}

    def places(self, ranks: tuple[int, ...]) -> tuple[GroupPlace, ...]:
        """Returns the groups like this one that lie differently, which send at the same time."""
        if ranks not in self._places:
            along = self._along(ranks)
            if along not in self._alike:
                self._alike[along] = self._different(self._groups(along))
            self._places[ranks] = self._alike[along]
        return self._places[ranks]

    def _along(self, ranks: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the dimensions of the mesh in which ranks differ, and their places in each."""
        shape, flat = self.mesh.shape, self._position[[*ranks]]
        along = []
        for d in range(len(shape)):
            at = flat // math.prod(shape[d + 1 :]) % shape[d]
            if (at != at[0]).any():
                along.append((d, tuple(at.tolist())))
        return tuple(along)

    def _groups(self, along: Sequence[tuple[int, tuple[int, ...]]]) -> NDArray:
        varying = [d for d, _ in along]
        fixed = [d for d in range(self.mesh.ndim) if d not in varying]
        view = self.mesh.transpose(*fixed, *varying)
        view = view.reshape(-1, *(self.mesh.shape[d] for d in varying))
        index: tuple[Any, ...] = (slice(None), *([*at] for _, at in along))
        return view[index]

    def _different(self, like: NDArray) -> tuple[GroupPlace, ...]:
        """Returns the first of those groups that lie alike relative to their first rank."""
        different: dict[bytes, NDArray] = {}
        relative = [like // one.size - like[:, :1] // one.size for one in self.cluster.levels]
        for number, group in enumerate(like):
            different.setdefault(b"".join(one[number].tobytes() for one in relative), group)
        groups = [tuple(group.tolist()) for group in different.values()]
        return tuple(GroupPlace(one, like_messages(self.cluster, one, like)) for one in groups)
