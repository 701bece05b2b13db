"""All schemes by name. A new scheme needs a line here."""

from __future__ import annotations

from gridformer.config import LayoutConfig, Scheme
from gridformer.parallel.megatron import Megatron
from gridformer.parallel.megatron_2d import Megatron2D
from gridformer.parallel.optimus import Optimus
from gridformer.parallel.scheme import SchemeSpec, Single
from gridformer.parallel.subgraph import Branched

SPECS: dict[Scheme, SchemeSpec] = {
    spec.name: spec for spec in (Single(), Megatron(), Megatron2D(), Optimus(), Branched())
}


def spec_of(layout: LayoutConfig) -> SchemeSpec:
    """Returns the spec of a layout's scheme."""
    return SPECS[layout.scheme]


def describe_layout(layout: LayoutConfig) -> str:
    """Returns a short description of a layout, such as `optimus 2x2, dp=2` or `fsdp=16`."""
    mode = layout.dp_mode
    sharded = f" ({mode})" if mode != "replicate" else ""
    parts = [spec_of(layout).describe(layout)]
    if layout.sequence_rows > 1:
        parts[0] += " over the sequence"
    if layout.dp == 1:
        parts[0] += sharded
    else:
        parts.append(f"fsdp={layout.dp}" if mode == "fsdp" else f"dp={layout.dp}{sharded}")
    if layout.pp > 1:
        k = layout.stages_per_rank
        parts.append(f"pp={layout.pp}" + (f" x {k} stages, interleaved" if k > 1 else ""))
    if len(parts) > 1 and layout.n_processes == layout.dp * layout.pp:
        parts = parts[1:]  # the scheme has one device
    return ", ".join(parts)
