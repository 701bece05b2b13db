"""Places the mesh on nodes and racks: finds the block per node that the fewest bytes enter.

With k devices per node, a launcher puts ranks 0 to k-1 on the first node, the next k on the second,
and so on. So the mesh is placed by numbering its ranks: each node holds a *block* of the mesh with
an extent along each axis. Collectives run over an axis as rings in rank order, which enter a node
once. A block of k devices with extent e along an axis holds k/e rings of it, which stay inside the
node if e is the whole axis; otherwise the first device of each receives from another node:

    bytes into a node = sum over the axes with extent < size of (k / extent) * bytes of one device

The stages of a pipeline are no ring, but a node in its middle receives as much: activations into
its first stage and gradients into its last. Figure 8 of Xu et al. 2021 (Optimus) is the case of a
square grid with 4 devices per node: 2x2 blocks, not 1x4 strips. Racks hold blocks of nodes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gridformer.config import LayoutConfig, divisors
from gridformer.utils.units import MIB, counted, three_digits

if TYPE_CHECKING:
    from torch import Tensor

MESH_AXES = ("pp", "dp", "row", "col")  # outermost first
Sizes = tuple[int, int, int, int]  # one number per axis, in the order of MESH_AXES


@dataclass(frozen=True)
class NodeBlock:
    """The part of the mesh on one node: its extent in devices along each axis.

    Attributes:
        rack: The part of the mesh of nodes in one rack: its extent in nodes along each axis. None
            if racks are unknown, and nodes then follow each other in plain order.
    """

    pp: int = 1
    dp: int = 1
    row: int = 1
    col: int = 1
    rack: NodeBlock | None = field(default=None, kw_only=True)

    @property
    def extents(self) -> Sizes:
        """Its devices along each axis, in the order of MESH_AXES."""
        return self.pp, self.dp, self.row, self.col

    @property
    def n_devices(self) -> int:
        """The number of devices in it."""
        return math.prod(self.extents)

    def describe(self, sizes: Sizes) -> str:
        """Returns `2x2 of the grid`, `dp 2 x 1x2`, or `dp 4` if the grid is one device."""
        words = [f"{name} {e}" for name, e in (("pp", self.pp), ("dp", self.dp)) if e > 1]
        grid = f"{self.row}x{self.col}"
        if self.n_devices == 1:
            return "1 device"
        if words:
            return " x ".join(words + [grid] * (sizes[2:] != (1, 1)))
        return f"{grid} of the grid"


@dataclass(frozen=True)
class Candidate:
    """One way to place the mesh on nodes, and the bytes that enter a node with it.

    Attributes:
        block: The block on each node. It is None for the plain order of ranks if that gives no
            block: in a 2x3 grid with 2 devices per node, the second node holds the end of one row
            and the start of the next. Such nodes differ, and the numbers are those of the busiest.
        receivers: For each axis, the number of devices of a node that receive from another node.
        bytes_in: For each axis, the bytes that enter the node in one optimizer step.
    """

    block: NodeBlock | None
    receivers: dict[str, int]
    bytes_in: dict[str, int]

    @property
    def total(self) -> int:
        """The bytes that enter the node in one optimizer step, over all axes."""
        return sum(self.bytes_in.values())

    @property
    def sharing(self) -> int:
        """The most devices that receive at once through the node's link, over any one axis."""
        return max((self.receivers[axis] for axis, n in self.bytes_in.items() if n), default=0)


def sizes_of(layout: LayoutConfig) -> Sizes:
    """Returns the sizes of the mesh in the order of MESH_AXES; sub-grids count as columns."""
    return layout.pp, layout.dp, layout.rows, layout.cols * layout.branches


def blocks(sizes: Sizes, devices_per_node: int) -> list[NodeBlock]:
    """Returns every block that fills a node, or the whole mesh if it fits into one node.

    There is none if devices_per_node does not divide the number of devices.
    """
    if math.prod(sizes) <= devices_per_node:
        return [NodeBlock(*sizes)]
    choices = [divisors(math.gcd(size, devices_per_node)) for size in sizes]
    every = [NodeBlock(*extents) for extents in itertools.product(*choices)]
    return [block for block in every if block.n_devices == devices_per_node]


def plain_block(sizes: Sizes, devices_per_node: int) -> NodeBlock | None:
    """Returns the block of each node in plain order (`col` innermost), or None if there is none."""
    if math.prod(sizes) <= devices_per_node:
        return NodeBlock(*sizes)
    left, extents = devices_per_node, []
    for size in reversed(sizes):
        if left % size and size % left:
            return None  # nodes begin at different places along this axis
        extent = min(size, left)
        extents.append(extent)
        left //= extent
    return NodeBlock(*reversed(extents))


def search_blocks(
    sizes: Sizes, traffic: Mapping[str, float], devices_per_node: int
) -> list[Candidate]:
    """Ranks every block that fills a node, and the plain order if that is not a block.

    The fewest bytes enter a node with the best candidate. Ties are broken by the fewest devices
    that share the node's link, then by closeness to the plain order: the longest extent along
    `col`, then along `row`, `dp` and `pp`.

    Args:
        traffic: For each axis, the bytes that one device receives over it in one optimizer step
            with ring algorithms, without messages over all devices, which enter nodes equally.
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


def search_racks(sizes: Sizes, best: Candidate, nodes_per_rack: int) -> list[Candidate]:
    """Ranks the blocks of nodes that fill a rack, by the bytes that enter a rack.

    Nodes form a mesh as devices do, and what a node lets in over an axis passes from node to node
    along that axis. So the same search serves racks, with extents in nodes. `nodes_per_rack` must
    divide the number of nodes if that is larger. There are no candidates if nodes hold no block.
    """
    if best.block is None:
        return []
    return search_blocks(nodes_of(sizes, best.block), best.bytes_in, nodes_per_rack)


def nodes_of(sizes: Sizes, block: NodeBlock) -> Sizes:
    """Returns the sizes of the mesh in nodes."""
    pp, dp, row, col = (size // extent for size, extent in zip(sizes, block.extents))
    return pp, dp, row, col


def _candidate(
    block: NodeBlock | None, receivers: Sequence[int], traffic: Mapping[str, float]
) -> Candidate:
    # Rounded to whole bytes so that equal sums compare equal.
    bytes_in = {axis: n * round(traffic.get(axis, 0)) for axis, n in zip(MESH_AXES, receivers)}
    return Candidate(block, dict(zip(MESH_AXES, receivers)), bytes_in)


def _receivers(sizes: Sizes, block: NodeBlock) -> list[int]:
    """Counts, by axis, the devices that receive from another node: one per ring that leaves it."""
    return [
        0 if extent == size else block.n_devices // extent
        for extent, size in zip(block.extents, sizes)
    ]


def _plain_receivers(sizes: Sizes, devices_per_node: int) -> list[list[int]]:
    """Like _receivers for each node in plain order, counted device by device."""
    import numpy as np

    node = np.arange(math.prod(sizes)).reshape(sizes) // devices_per_node
    # A device receives from the one before it; the ring closes, so the first from the last.
    entered = [node[np.roll(node, 1, axis) != node] for axis in range(len(sizes))]
    counts = [np.bincount(nodes, minlength=int(node.max()) + 1) for nodes in entered]
    each: list[list[int]] = np.stack(counts, 1).tolist()
    return each


def rank_grid(sizes: Sizes, block: NodeBlock | None) -> Tensor:
    """Returns the rank at each coordinate of the mesh: int64 [pp, dp, row, col].

    The ranks of one node are consecutive, and so are the nodes of one rack. `col` is innermost
    within a block, among the blocks of a rack and among racks. Ranks ascend along every axis, so a
    ring in the order of ranks visits the members on one node one after the other.
    """
    import torch

    if block is None:
        return torch.arange(math.prod(sizes)).view(sizes)
    assert all(size % e == 0 for size, e in zip(sizes, block.extents)), (sizes, block)
    in_nodes = nodes_of(sizes, block)
    nodes = rank_grid(in_nodes, block.rack).view(*in_nodes, 1, 1, 1, 1)
    # From [node along each axis, place in the node along each axis] to (node, place) per axis.
    places = torch.arange(block.n_devices).view(block.extents)
    both = (nodes * block.n_devices + places).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return both.reshape(sizes)


def sub_grids(pp: int, dp: int, g: int, order: Literal["topology", "contiguous"]) -> Tensor:
    """Returns the rank of process x of sub-grid y for each pipeline stage: int64 [pp, dp, g].

    With `topology` it is x*g + y, so the g members of a segmented collective (equal x) have
    neighboring ranks. With `contiguous` it is y*dp + x, so the dp members of a sub-grid do
    (Jain et al. 2021, SUPER).
    """
    import torch

    ranks = torch.arange(pp * dp * g)
    if order == "topology":
        return ranks.view(pp, dp, g)
    return ranks.view(pp, g, dp).transpose(1, 2)


def split_messages(
    n: int, g: int, units: Sequence[int], order: Literal["topology", "contiguous"]
) -> list[int]:
    """Counts the messages of one split by the level of the network, own pieces included.

    They are counted from the placement of ranks. Jain et al. 2021 have formulas for one level
    (equations 4 to 7), for sizes that divide each other. With `order=topology` the members of a
    segmented collective have consecutive ranks, so they fill a node, then a rack, and so on:
    the nearest first, whatever the levels are.

    Args:
        units: Numbers of processes in a unit of each level, the smallest first, such as in a node
            and in a rack. They need not divide n.

    Returns:
        For each level the number of messages within its units that leave those of the level
        below, and last the number of messages between units of the largest level.
    """
    within = [0] * len(units)
    for group in sub_grids(1, n // g, g, order)[0].tolist():
        for level, k in enumerate(units):
            counts = Counter(rank // k for rank in group).values()
            within[level] += sum(count * count for count in counts)
    return [b - a for a, b in itertools.pairwise([0, *within, n * g])]


# --------------------------------------------------------------------------- explanations


def explain(
    candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int, few: int = 3
) -> str:
    """Returns a table of the best `few` candidates and the plain order, and a sentence below it."""
    plain, best = plain_block(sizes, devices_per_node), candidates[0]
    axes = [axis for axis, size in zip(MESH_AXES, sizes) if size > 1]
    table = [["", "a node holds", *axes, "total", "ratio", "sharing"]]
    for number, one in enumerate(candidates):
        if number >= few and one.block != plain:
            continue
        ratio = "1.00"
        if one.total != best.total:
            ratio = f"{one.total / best.total:.2f}" if best.total else "-"
        mib = [_mib(one.bytes_in[axis]) for axis in axes]
        mark = "" if number else ">"
        sums = [_mib(one.total), ratio, str(one.sharing)]
        table.append([mark, _words(one, sizes, plain), *mib, *sums])
    widths = [max(map(len, column)) for column in zip(*table)]
    text = [f"MiB that enter a node of {counted(devices_per_node, 'device')} in one step, by axis:"]
    for mark, holds, *numbers in table:
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[2:])]
        text.append(f"{mark:{widths[0]}} {holds:{widths[1]}}  {'  '.join(right)}")
    return "\n".join([*text, _reason(candidates, sizes, devices_per_node, plain)])


def _reason(
    candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int, plain: NodeBlock | None
) -> str:
    """Says in one sentence what a node holds, what enters it, and how the plain order compares."""
    n, best = math.prod(sizes), candidates[0]
    if n <= devices_per_node:
        return f"One node holds all {n} devices, so nothing enters it."
    in_order = next(candidate for candidate in candidates if candidate.block == plain)
    holds = f"A node holds {_words(best, sizes, plain)}"
    if best.block is None:
        holds = "A node holds rows in order, wherever a row ends"
    start = f"{holds}: {_mib(best.total)} MiB enter it in a step"
    if best is in_order:
        if len(candidates) == 1:
            return f"{start}; no other block fills a node."
        second = candidates[1]
        return (
            f"{start}; with {_words(second, sizes, plain)}, the next best, it would be "
            f"{_mib(second.total)}."
        )
    if best.total < in_order.total:
        return f"{start}; with rows in order it would be {_mib(in_order.total)}."
    return (
        f"{start}, as with rows in order, but {best.sharing} of its devices share the network "
        f"link, not {in_order.sharing}."
    )


def explain_racks(
    candidates: Sequence[Candidate], node: NodeBlock, sizes: Sizes, nodes_per_rack: int
) -> str:
    """Returns a sentence on which nodes a rack holds, and what enters it; see `search_racks`."""
    best = candidates[0]
    if best.block is None:
        return f"A rack holds {nodes_per_rack} nodes in order."
    extents = tuple(a * b for a, b in zip(best.block.extents, node.extents))
    if extents == sizes:
        return f"One rack holds all {math.prod(sizes)} devices, so nothing enters it."
    holds = NodeBlock(*extents).describe(sizes)
    others = [candidate for candidate in candidates if candidate.total > best.total]
    worst = f"; at worst it would be {_mib(others[-1].total)}" if others else ""
    return (
        f"A rack of {nodes_per_rack} nodes holds {holds}: {_mib(best.total)} MiB enter it in a "
        f"step{worst}."
    )


def _words(candidate: Candidate, sizes: Sizes, plain: NodeBlock | None) -> str:
    if candidate.block is None:
        return "rows in order"
    shape = candidate.block.describe(sizes)
    return f"{shape} (rows in order)" if candidate.block == plain else shape


def _mib(n_bytes: int) -> str:
    return three_digits(n_bytes / MIB)
