"""All schemes by name. A new scheme needs a line here."""

from __future__ import annotations

from gridformer.config import LayoutConfig, Scheme
from gridformer.parallel.megatron import Megatron
from gridformer.parallel.megatron_2d import Megatron2D
from gridformer.parallel.optimus import Optimus
from gridformer.parallel.scheme import SchemeSpec
from gridformer.parallel.single import Single
from gridformer.parallel.subgraph import Branched

SPECS: dict[Scheme, SchemeSpec] = {
    spec.name: spec for spec in (Single(), Megatron(), Megatron2D(), Optimus(), Branched())
}


def spec_of(layout: LayoutConfig) -> SchemeSpec:
    """Returns the spec of a layout's scheme."""
    return SPECS[layout.scheme]


def describe(layout: LayoutConfig) -> str:
    """Returns a short description of a layout, such as `optimus 2x2, dp=2`."""
    phrase = spec_of(layout).describe(layout)
    if layout.dp > 1:
        phrase += f", dp={layout.dp}"
    if layout.dp_mode != "replicate":
        phrase += f" ({layout.dp_mode})"
    if layout.pp > 1:
        phrase += f", pp={layout.pp}"
    if layout.stages_per_rank > 1:
        phrase += f" x {layout.stages_per_rank} stages, interleaved"
    return phrase
