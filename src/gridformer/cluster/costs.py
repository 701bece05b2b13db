"""`Costs`: the seconds of kernels and messages on a cluster, each of which is computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gridformer.cluster.file import Cluster
from gridformer.cluster.messages import MessageWork, Op, like_messages, message_cpu_s, message_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Tiles of the results that libraries for products choose from, and the fraction of the rate of
# large tiles that they reach: a tile reads (m + n) numbers for every m * n multiplications.
TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.82), (64, 64, 0.65), (32, 32, 0.35))
# Steps along k that the start and the end of a tile cost: loading the first operands, writing the
# result.
K_OVERHEAD = 128
# Fused attention reaches this fraction of the rate of large products: FlashAttention-2 (Dao 2023)
# reaches 50 to 73% of an A100's peak, where products reach 80 to 90%.
ATTENTION_RATE = 0.72
# Queries and keys of the tiles in which fused attention works. It leaves out the tiles of scores
# that a causal mask hides altogether.
ATTENTION_TILE = 128
# Copies between a GPU and pinned memory of its host reach this fraction of the link's bandwidth.
# Assumed: links lose about a tenth to headers of packets, and more to the host.
LINK_EFFICIENCY = 0.8
# Passes over the scores of unfused attention, forward and backward: softmax reads and writes them,
# so does dropout, which also has a mask; backward they read one more operand each.
SCORE_PASSES = (4.5, 6.5)
BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}


class KernelWork(NamedTuple):
    """The work of one kernel.

    Attributes:
        kind: `product`, `attention` (fused), `copy` (between host and GPU) or `memory` (others).
        bytes: Bytes read and written, or copied.
        dtype: Type of a product's operands, such as `float16` or `tf32`.
        shape: For products (batch, m, n, k); for attention (batch, heads, queries, keys, width,
            hides), where hides is 0 without a mask, 1 if it is causal, and more if a query sees at
            most that many keys, of which its own is the last.
        op: The operator that launched it, such as `add`, or empty; that of attention's backward
            pass contains `backward`. `attention` and `attention_backward` are gridformer's kernel,
            and others PyTorch's.
        order: For products whether their operands are transposed, `nn`, `nt` or `tn`; empty if
            that is not known. `tables.ProductRow` describes them.
    """

    kind: Literal["product", "attention", "memory", "copy"]
    flop: float
    bytes: float
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    op: str = ""
    order: str = ""


def kernel_s(cluster: Cluster, work: KernelWork) -> float:
    """Returns the time in seconds that a kernel takes on a device, without its launch."""
    if work.kind == "copy":
        return work.bytes / (cluster.link_gbps * 1e9 * LINK_EFFICIENCY)
    measured = _measured_s(cluster, work)
    if measured is not None:
        return measured
    memory_s = work.bytes / (
        cluster.device.memory_gbps.value * 1e9 * cluster.number("memory_efficiency")
    )
    if work.kind == "memory" or not work.flop:  # or a product of no rows
        return memory_s
    rate = _peak(cluster, work.dtype) * 1e12 * cluster.number("product_efficiency")
    if work.kind == "attention" and not cluster.device.fused_attention and len(work.shape) == 6:
        return _unfused_s(cluster, work)
    if work.kind == "attention" or len(work.shape) != 4:
        again = 1.25 if "backward" in work.op else 1.0  # a backward pass recomputes the scores
        seen = computed_scores(*work.shape[2:4], work.shape[5]) if len(work.shape) == 6 else 1.0
        flop = again * work.flop * seen
        return max(memory_s, flop / (rate * ATTENTION_RATE))
    batch, m, n, k = work.shape
    n_processors = max(1, int(cluster.device.n_processors.value))
    return max(memory_s, _product_s(batch, m, n, k, rate, n_processors))


@cache
def computed_scores(queries: int, keys: int, hides: int) -> float:
    """Returns the fraction of scores that fused attention computes: tiles not hidden altogether.

    The last query is at the position of the last key; `hides` is as in `KernelWork`.
    """
    if not hides:
        return 1.0
    window, seen = hides if hides > 1 else keys, 0
    for first in range(keys - queries, keys, ATTENTION_TILE):
        begin = max(0, first - window + 1) // ATTENTION_TILE * ATTENTION_TILE
        end = min(keys, -(-(first + ATTENTION_TILE) // ATTENTION_TILE) * ATTENTION_TILE)
        seen += max(0, end - begin)
    return min(1.0, seen * ATTENTION_TILE / (queries * keys))


def _measured_s(cluster: Cluster, work: KernelWork) -> float | None:
    """Returns the time by the tables of a calibrated cluster, or None if they do not have it."""
    tables, busy, shape = cluster.tables, cluster.processes, work.shape
    if work.kind == "product" and len(shape) == 4:
        return tables.product_s(busy, work.dtype, shape, work.order)
    if work.kind == "attention" and len(shape) == 6:
        op = "gridformer" if work.op in ("attention", "attention_backward") else "sdpa"
        seconds = tables.attention_s(busy, work.dtype, shape, "backward" in work.op, op)
        if seconds is not None and shape[5]:
            # A window hides more than the mask of any row, and fewer queries than keys hide less.
            side = math.isqrt(shape[2] * shape[3])
            seconds *= computed_scores(*shape[2:4], shape[5]) / computed_scores(side, side, 1)
        return seconds
    if work.kind == "memory":
        return tables.memory_s(busy, work.op, work.bytes, work.dtype)
    return None


def _product_s(batch: int, m: int, n: int, k: int, rate: float, n_processors: int) -> float:
    """Returns the time of the fastest choice of tiles: whole waves of tiles on all processors."""
    best = math.inf
    for tile_m, tile_n, quality in TILES:
        for rows, cols in ((tile_m, tile_n), (tile_n, tile_m)):
            tiles = batch * -(-m // rows) * -(-n // cols)
            # With fewer tiles than processors, several processors share a tile's k.
            split = max(1, min(n_processors // tiles, k // 512))
            waves = -(-tiles * split // n_processors)
            if waves > 4:  # later waves start while earlier ones end
                waves = max(4.0, tiles / n_processors + 0.5)  # type: ignore[assignment]
            steps = k / split + K_OVERHEAD * (1 if split == 1 else 2)
            best = min(best, waves * 2 * rows * cols * steps / (quality * rate / n_processors))
    return best


def _unfused_s(cluster: Cluster, work: KernelWork) -> float:
    """Returns the time of attention as products and passes over all scores, masked ones too."""
    batch, heads, queries, keys, width, _ = work.shape
    scores = batch * heads * queries * keys
    backward = "backward" in work.op
    size = BYTES.get(work.dtype, 4)
    moved = size * (scores + batch * heads * width * (queries + keys))
    into = KernelWork(
        "product", 2.0 * scores * width, moved, work.dtype, (batch * heads, queries, keys, width)
    )
    out = into._replace(shape=(batch * heads, queries, width, keys))
    passes = KernelWork("memory", 0.0, SCORE_PASSES[backward] * size * scores, work.dtype)
    times = kernel_s(cluster, into), kernel_s(cluster, out), kernel_s(cluster, passes)
    return (1 + backward) * (times[0] + times[1]) + times[2]


def _peak(cluster: Cluster, dtype: str) -> float:
    """Returns the peak in TFLOP/s; types without one compute at the rate of float32."""
    peaks = cluster.device.peak_tflops
    if dtype in peaks:
        return peaks[dtype].value
    if dtype == "bfloat16" and "float16" in peaks and "float32" not in peaks:
        return peaks["float16"].value
    return peaks["float32"].value if "float32" in peaks else max(p.value for p in peaks.values())


# --------------------------------------------------------------------------- tables of costs


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
    """The seconds of kernels and messages on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.on_cpu = cluster.device.kind == "cpu"
        # Where the groups of each axis of a mesh lie, by what a caller knows the mesh by.
        self.axes: dict[tuple[object, ...], dict[str, tuple[GroupPlace, ...]]] = {}
        self._kernels: dict[KernelWork, float] = {}
        self._messages: dict[tuple[Op, float, tuple[GroupPlace, ...]], MessageTime] = {}

    def kernel_s(self, work: KernelWork) -> float:
        """Returns the seconds of a kernel."""
        if work not in self._kernels:
            self._kernels[work] = kernel_s(self.cluster, work)
        return self._kernels[work]

    def product_s(self, m: int, n: int, k: int, dtype: str, itemsize: int, batch: int = 1) -> float:
        """Returns the seconds of products of several [m, k] and one [k, n], which are read once."""
        n_bytes = (batch * m * (k + n) + k * n) * itemsize
        flop, shape = 2.0 * batch * m * n * k, (batch, m, n, k)
        return self.kernel_s(KernelWork("product", flop, n_bytes, dtype, shape))

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
    """The groups of ranks of a mesh, the rank at each position; rank i is on device i."""

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
