"""Which devices of a layout share a node: the block that lets the fewest bytes cross its boundary.

A launcher puts ranks 0 to k-1 on the first node, the next k on the second, and so on, with k
devices a node. So ranks are placed by numbering them: a node holds a *block* of the mesh, as long
along each axis as its extent there, and the block's devices get consecutive ranks.

What enters a node. Collectives run over an axis as rings: each device receives from the one before
it. Ranks rise along every axis (see rank_grid), so a ring passes through all members in a node
before it leaves, and enters once. The bytes that enter there are those that the first member
receives, as any member does. With a block of k devices and an extent e along an axis there are k/e
rings of that axis in the node. If e is the whole axis they stay inside. Otherwise k/e devices
receive from another node, and

    bytes into a node = sum over the axes with extent < size of (k / extent) * bytes of one device

An axis of pipeline stages is no ring, but a stage inside the pipeline receives as much: activations
into the node's first stage, gradients into its last. The nodes at the two ends receive less.

Xu et al. 2021 (Optimus), figure 8, is the case of a square grid with 4 devices a node: with 1x4
strips all 4 devices of a node exchange with other nodes along the columns, over one cable; with 2x2
blocks 2 at a time do, and a column spans half as many nodes. On 8x8 with equal traffic the strip
lets 4 + 1 shares in and the block 2 + 2. On 4x4 it is 4 + 0 against 2 + 2: the bytes are equal, and
the number of devices that share the cable decides, for the block.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gridformer.config import LayoutConfig, divisors
from gridformer.utils.units import MIB, three_digits

if TYPE_CHECKING:
    from torch import Tensor

MESH_AXES = ("pp", "dp", "row", "col")  # outermost first
Sizes = tuple[int, int, int, int]  # one number an axis, in the order of MESH_AXES


@dataclass(frozen=True)
class NodeBlock:
    """The part of the mesh on one node: how many devices long it is along each axis."""

    pp: int = 1
    dp: int = 1
    row: int = 1
    col: int = 1

    @property
    def extents(self) -> Sizes:
        return self.pp, self.dp, self.row, self.col

    @property
    def n_devices(self) -> int:
        return math.prod(self.extents)

    def describe(self, sizes: Sizes) -> str:
        """For people: `2x2 of the grid`, `dp 2 x 1x2`, or `dp 4` where the grid is one device."""
        words = [f"{name} {e}" for name, e in (("pp", self.pp), ("dp", self.dp)) if e > 1]
        grid = f"{self.row}x{self.col}"
        if self.n_devices == 1:
            return "1 device"
        if words:
            return " x ".join(words + [grid] * (sizes[2:] != (1, 1)))
        return f"{grid} of the grid"


@dataclass(frozen=True)
class Candidate:
    """One way to place the mesh on nodes, and what enters a node with it.

    `block` is None for ranks in plain order where that is no block: of a 2x3 grid with 2 devices a
    node, the second node holds the end of one row and the start of the next. Such nodes differ, and
    the numbers are those of the busiest.
    `receivers` counts, by axis, the devices of a node that receive from another node.
    `bytes_in` are the bytes that enter the node over each axis in one optimizer step.
    """

    block: NodeBlock | None
    receivers: dict[str, int]
    bytes_in: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes that enter the node in one optimizer step."""
        return sum(self.bytes_in.values())

    @property
    def sharing(self) -> int:
        """The most devices that receive at once through the node's cable, over one axis."""
        return max((self.receivers[axis] for axis, n in self.bytes_in.items() if n), default=0)


def sizes_of(layout: LayoutConfig) -> Sizes:
    """The sizes of a layout's mesh, in the order of MESH_AXES; sub-grids stand for columns."""
    return layout.pp, layout.dp, layout.rows, layout.cols * layout.branches


def blocks(sizes: Sizes, devices_per_node: int) -> list[NodeBlock]:
    """Every block that fills a node; the whole mesh if it is no larger than one.

    Empty if devices_per_node does not divide the devices, see gridformer.parallel.validation.
    """
    assert devices_per_node >= 1, "0 means that nodes are not known: ranks lie in plain order"
    if math.prod(sizes) <= devices_per_node:
        return [NodeBlock(*sizes)]
    choices = [divisors(math.gcd(size, devices_per_node)) for size in sizes]
    every = [NodeBlock(*extents) for extents in itertools.product(*choices)]
    return [block for block in every if block.n_devices == devices_per_node]


def plain_block(sizes: Sizes, devices_per_node: int) -> NodeBlock | None:
    """What a node holds in plain order (`col` innermost), or None if that is no block."""
    if math.prod(sizes) <= devices_per_node:
        return NodeBlock(*sizes)
    left, extents = devices_per_node, []
    for size in reversed(sizes):
        if left % size and size % left:
            return None  # nodes begin at different places of this axis
        extent = min(size, left)
        extents.append(extent)
        left //= extent
    return NodeBlock(*reversed(extents))


def search(sizes: Sizes, traffic: Mapping[str, float], devices_per_node: int) -> list[Candidate]:
    """Every block that fills a node, and the plain order where it is none, the best first.

    The best lets the fewest bytes into a node. Among equals it is the one whose devices share the
    node's cable least, then the one closest to plain order: the longest along `col`, then along
    `row`, `dp` and `pp`.

    Args:
        sizes: of the mesh, see sizes_of.
        traffic: by axis, the bytes that one device receives over it in one optimizer step, with
            ring algorithms. An axis that is absent moves nothing. What moves over all devices at
            once ("world") enters every node alike and is left out.
        devices_per_node: at least 1, and a divisor of the devices if there are more (see
            gridformer.parallel.validation.check).
    """
    shapes = blocks(sizes, devices_per_node)
    assert shapes, f"devices_per_node={devices_per_node} does not divide the mesh {sizes}"
    candidates = [_candidate(block, _receivers(sizes, block), traffic) for block in shapes]
    if plain_block(sizes, devices_per_node) is None:
        nodes = _plain_receivers(sizes, devices_per_node)
        candidates.append(
            max((_candidate(None, node, traffic) for node in nodes), key=lambda c: c.total)
        )

    def badness(candidate: Candidate) -> tuple[int, ...]:
        extents = candidate.block.extents if candidate.block else (0, 0, 0, 0)
        return candidate.total, candidate.sharing, *(-e for e in reversed(extents))

    return sorted(candidates, key=badness)


def _candidate(
    block: NodeBlock | None, receivers: Sequence[int], traffic: Mapping[str, float]
) -> Candidate:
    # Whole bytes, so that equal sums compare equal.
    bytes_in = {axis: n * round(traffic.get(axis, 0)) for axis, n in zip(MESH_AXES, receivers)}
    return Candidate(block, dict(zip(MESH_AXES, receivers)), bytes_in)


def _receivers(sizes: Sizes, block: NodeBlock) -> list[int]:
    """By axis, the devices of a block that receive from another node: one a ring that leaves it."""
    return [
        0 if extent == size else block.n_devices // extent
        for extent, size in zip(block.extents, sizes)
    ]


def _plain_receivers(sizes: Sizes, devices_per_node: int) -> list[list[int]]:
    """The same of each node in plain order, counted device by device."""
    n = math.prod(sizes)
    nodes = [[0] * len(sizes) for _ in range(-(-n // devices_per_node))]
    for rank in range(n):
        stride = 1
        for axis in reversed(range(len(sizes))):
            first = rank // stride % sizes[axis] == 0  # the ring closes: its last member sends
            source = rank + stride * (sizes[axis] - 1) if first else rank - stride
            nodes[rank // devices_per_node][axis] += (
                source // devices_per_node != rank // devices_per_node
            )
            stride *= sizes[axis]
    return nodes


def rank_grid(sizes: Sizes, block: NodeBlock | None) -> Tensor:
    """The rank at each coordinate of the mesh: [pp, dp, row, col], int64.

    The ranks of one node are consecutive. `col` is innermost within a block and among blocks, and
    the first device is rank 0. None gives the plain order.

    Ranks rise along every axis. So rank order within a process group (torch sorts its members) is
    the order of coordinates, and a ring in rank order visits the members in a node one after the
    other.
    """
    import torch

    ranks = torch.arange(math.prod(sizes))
    if block is None:
        return ranks.view(sizes)
    assert all(size % e == 0 for size, e in zip(sizes, block.extents)), (sizes, block)
    n_blocks = [size // e for size, e in zip(sizes, block.extents)]
    # From [block by axis, place in it by axis] to the two beside each other for every axis.
    both = ranks.view(*n_blocks, *block.extents).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return both.reshape(sizes)


def sub_grids(pp: int, dp: int, g: int, order: Literal["topology", "contiguous"]) -> Tensor:
    """The rank of process x of sub-grid y, for each pipeline stage: [pp, dp, g], int64.

    `topology`: x*g + y, so that the g members of a segmented collective (equal x) are neighbors.
    `contiguous`: y*dp + x, so that the dp members of a sub-grid are (Jain et al. 2021, SUPER).
    """
    import torch

    ranks = torch.arange(pp * dp * g)
    if order == "topology":
        return ranks.view(pp, dp, g)
    return ranks.view(pp, g, dp).transpose(1, 2)


def split_messages(
    n: int, g: int, k: int, order: Literal["topology", "contiguous"]
) -> tuple[int, int]:
    """Messages of one split within nodes and between them, own pieces included.

    n processes in g sub-grids, k processes a node, which need not divide anything. Counted from
    where ranks lie; specification, section 4, has formulas for sizes that divide each other.
    """
    within = 0
    for group in sub_grids(1, n // g, g, order)[0].tolist():
        within += sum(count * count for count in Counter(rank // k for rank in group).values())
    return within, n * g - within


# --------------------------------------------------------------------------- for people


@dataclass(frozen=True)
class Row:
    """A line of the explanation. `mib` by axis, and `total_mib`, enter a node in one step.

    `ratio` is the total over that of the best (infinite where the best is 0), `sharing` the devices
    that share the node's cable. `chosen` marks the best, `plain` the plain order.
    """

    block: str
    mib: dict[str, float]
    total_mib: float
    ratio: float
    sharing: int
    chosen: bool
    plain: bool


def rows(
    candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int, few: int = 3
) -> list[Row]:
    """The best `few` of search's result, and the plain order if it is not among them.

    Axes of size 1 are left out of `mib`: nothing moves over them.
    """
    plain = plain_block(sizes, devices_per_node)
    best = candidates[0]
    found = []
    for place, candidate in enumerate(candidates):
        if place >= few and candidate.block != plain:
            continue
        if best.total:
            ratio = candidate.total / best.total
        else:
            ratio = math.inf if candidate.total else 1.0
        found.append(
            Row(
                block=_words(candidate, sizes, plain),
                mib={
                    axis: candidate.bytes_in[axis] / MIB
                    for axis, size in zip(MESH_AXES, sizes)
                    if size > 1
                },
                total_mib=candidate.total / MIB,
                ratio=ratio,
                sharing=candidate.sharing,
                chosen=place == 0,
                plain=candidate.block == plain,
            )
        )
    return found


def reason(candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int) -> str:
    """One sentence: what a node holds, what enters it, and what the plain order would let in."""
    n = math.prod(sizes)
    if n <= devices_per_node:
        return f"One node holds all {n} devices: nothing enters it."
    best, plain = candidates[0], plain_block(sizes, devices_per_node)
    other = next(candidate for candidate in candidates if candidate.block == plain)
    holds = f"A node holds {_words(best, sizes, plain)}"
    if best.block is None:
        holds = "Nodes are filled with rows in order, wherever a row ends"
    start = f"{holds}: {three_digits(best.total / MIB)} MiB enter one"
    if best is other:
        if len(candidates) == 1:
            return f"{start} in a step; no other block fills a node."
        second = candidates[1]
        end = f"the next best, {three_digits(second.total / MIB)}."
        return f"{start} in a step; with {_words(second, sizes, plain)}, {end}"
    if best.total < other.total:
        return f"{start} in a step; with rows in order {three_digits(other.total / MIB)}."
    return (
        f"{start} in a step, as with rows in order, but {best.sharing} of its devices share the "
        f"cable, not {other.sharing}."
    )


def explain(
    candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int, few: int = 3
) -> str:
    """The rows as a table in plain text, and the reason below it. The chosen block has a `>`."""
    lines = rows(candidates, sizes, devices_per_node, few)
    axes = list(lines[0].mib)
    table = [["", "a node holds", *axes, "total", "ratio", "sharing"]]
    for row in lines:
        ratio = f"{row.ratio:.2f}" if math.isfinite(row.ratio) else "-"
        numbers = [three_digits(row.mib[axis]) for axis in axes]
        mark = ">" if row.chosen else ""
        table.append(
            [mark, row.block, *numbers, three_digits(row.total_mib), ratio, str(row.sharing)]
        )
    widths = [max(map(len, column)) for column in zip(*table)]
    text = [f"MiB into a node in one step, {devices_per_node} devices a node, by axis:"]
    for line in table:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:])]
        text.append(f"{left[0]} {left[1]}  {'  '.join(right)}")
    return "\n".join([*text, reason(candidates, sizes, devices_per_node)])


def _words(candidate: Candidate, sizes: Sizes, plain: NodeBlock | None) -> str:
    if candidate.block is None:
        return "rows in order"
    shape = candidate.block.describe(sizes)
    return f"{shape} (rows in order)" if candidate.block == plain else shape
