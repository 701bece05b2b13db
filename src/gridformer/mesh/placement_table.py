"""Explains where the mesh lies on nodes and racks: a table of the best blocks, and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gridformer.mesh.node_placement import MESH_AXES, Candidate, NodeBlock, Sizes, plain_block
from gridformer.utils.units import MIB, three_digits


@dataclass(frozen=True)
class PlacementRow:
    """A row of the explanation.

    Attributes:
        block: The block in words.
        mib: MiB that enter a node in one step, by axis.
        total_mib: Their sum.
        ratio: The total divided by that of the best, infinite if the best is 0.
        sharing: Number of devices that share the node's link.
        chosen: Whether this is the best.
        plain: Whether this is the plain order.
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
) -> list[PlacementRow]:
    """Returns rows for the best `few` candidates, and for the plain order if it is not among them.

    Axes of size 1 are left out of `mib` because nothing moves over them.

    Args:
        candidates: Result of search.
        sizes: Sizes of the mesh, see sizes_of.
        devices_per_node: Number of devices per node.
        few: Number of best candidates.
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
            PlacementRow(
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
    """Says in one sentence what a node holds, what enters it, and how the plain order compares.

    Args: see `rows`.
    """
    n = math.prod(sizes)
    if n <= devices_per_node:
        return f"One node holds all {n} devices, so nothing enters it."
    best, plain = candidates[0], plain_block(sizes, devices_per_node)
    other = next(candidate for candidate in candidates if candidate.block == plain)
    holds = f"A node holds {_words(best, sizes, plain)}"
    if best.block is None:
        holds = "A node holds rows in order, wherever a row ends"
    start = f"{holds}: {three_digits(best.total / MIB)} MiB enter it"
    if best is other:
        if len(candidates) == 1:
            return f"{start} in a step; no other block fills a node."
        second = candidates[1]
        end = f"the next best, it would be {three_digits(second.total / MIB)}."
        return f"{start} in a step; with {_words(second, sizes, plain)}, {end}"
    if best.total < other.total:
        end = f"it would be {three_digits(other.total / MIB)}."
        return f"{start} in a step; with rows in order {end}"
    return (
        f"{start} in a step, as with rows in order, but {best.sharing} of its devices share the "
        f"network link, not {other.sharing}."
    )


def explain(
    candidates: Sequence[Candidate], sizes: Sizes, devices_per_node: int, few: int = 3
) -> str:
    """Returns `rows` as a table in plain text with `reason` below; a `>` marks the chosen block.

    Args: see `rows`.
    """
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
    text = [f"MiB that enter a node of {devices_per_node} devices in one step, by axis:"]
    for line in table:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:])]
        text.append(f"{left[0]} {left[1]}  {'  '.join(right)}")
    return "\n".join([*text, reason(candidates, sizes, devices_per_node)])


def explain_racks(
    candidates: Sequence[Candidate], node: NodeBlock, sizes: Sizes, nodes_per_rack: int
) -> str:
    """Returns a sentence on which nodes a rack holds, and what enters it.

    Args:
        candidates: Result of search_racks.
        node: The block on each node.
        sizes: Sizes of the mesh, see sizes_of.
        nodes_per_rack: Number of nodes per rack.
    """
    best = candidates[0]
    if best.block is None:
        return f"A rack holds {nodes_per_rack} nodes in order."
    extents = tuple(a * b for a, b in zip(best.block.extents, node.extents))
    if extents == sizes:
        return f"One rack holds all {math.prod(sizes)} devices, so nothing enters it."
    holds = NodeBlock.of(extents).describe(sizes)
    others = [candidate for candidate in candidates if candidate.total > best.total]
    worst = f"; at worst it would be {three_digits(others[-1].total / MIB)}" if others else ""
    return (
        f"A rack of {nodes_per_rack} nodes holds {holds}: {three_digits(best.total / MIB)} MiB "
        f"enter it in a step{worst}."
    )


def _words(candidate: Candidate, sizes: Sizes, plain: NodeBlock | None) -> str:
    if candidate.block is None:
        return "rows in order"
    shape = candidate.block.describe(sizes)
    return f"{shape} (rows in order)" if candidate.block == plain else shape
