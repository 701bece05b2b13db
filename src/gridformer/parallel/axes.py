"""Builds the named axes of this process from a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import MESH_AXIS, expert_axes

if TYPE_CHECKING:
    from torch import Tensor

    from gridformer.mesh.axes import Split

# The prefix of the names of the axes of replicated heads of keys and values.
HEADS = "kv"


def build_axes(layout: LayoutConfig, device_type: str, block: NodeBlock | None = None) -> Axes:
    """Builds the axes of this process; every process of the layout must call it.

    Ranks are numbered with `col` innermost and `pp` outermost (Narayanan et al. 2021): first within
    a node's block of the mesh if there is one, then over the blocks. For sub-graph parallelism
    `layout.order` says how.
    """
    if layout.n_processes == 1:
        return Axes(device_type=device_type)
    spec = spec_of(layout)
    names = ("pp", "dp", *spec.mesh)
    axes = Axes.of(mesh_ranks(layout, block), names, device_type)
    samples, boundary = spec.samples_over(layout), spec.boundary(layout)
    same = [] if boundary.activation_layout == "b" else [boundary.axis]
    if samples:
        axes = replace(axes, batch=axes[MESH_AXIS[samples]])
    if layout.sequence_rows > 1:
        axes = replace(axes, sequence=axes.row)
    if boundary.h_over:
        same.append(boundary.h_over)
    if layout.experts_over:
        over = expert_axes(layout)
        axes.fold("experts", over, (layout.experts_dp or layout.dp) if "dp" in over else 1)
    if same:
        axes = replace(axes, same_batch=axes[same[0] if len(same) == 1 else "grid"])
    for name in ("dp", "dp_branch")[: 1 + (spec.replicas(layout) > layout.dp)]:
        if 0 < layout.shard_over < axes[name].size:
            axes.split_in_levels(name, layout.shard_over)
    return axes


def mesh_ranks(layout: LayoutConfig, block: NodeBlock | None = None) -> Tensor:
    """Returns the rank at each position of a layout's mesh, int64 [pp, dp, *mesh of the scheme]."""
    return spec_of(layout).ranks(layout, block)


def split_heads(model: ModelConfig, layout: LayoutConfig, axes: Axes) -> None:
    """Creates the axes of replicated heads of keys and values, if a model on a layout needs them.

    Every process of the layout must call it before models are built, even a process without such
    heads.
    """
    replicated(axes, model.kv_heads, spec_of(layout).boundary(layout).axis)


def replicated(axes: Axes, pieces: int, over: str) -> Split | None:
    """Returns the axes of pieces, such as heads of keys, that several ranks of an axis hold.

    It is None if the pieces, which are never split, divide over the axis.
    """
    size = axes[over].size
    n_blocks = blocks_of(pieces, size)
    return None if n_blocks == size else axes.split(over, n_blocks, HEADS)
