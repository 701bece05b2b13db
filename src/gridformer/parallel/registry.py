"""The specs of all schemes, those that other packages bring included."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint

from gridformer.config import LayoutConfig, schemes
from gridformer.parallel.scheme import SchemeSpec
from gridformer.utils.errors import UserError


@cache
def specs() -> dict[str, SchemeSpec]:
    """Returns the specs of all schemes by name.

    Raises:
        UserError: What a package brings cannot be imported or is no spec of that name.
    """
    return {name: _spec(entry) for name, entry in schemes().items()}


def _spec(entry: EntryPoint) -> SchemeSpec:
    what = f"the scheme {entry.name} ({entry.value})"
    try:
        spec = entry.load()
        spec = spec() if isinstance(spec, type) else spec
    except Exception as error:  # whatever the code of others raises
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{what} cannot be loaded ({why}): correct or uninstall it") from error
    if not isinstance(spec, SchemeSpec):
        raise UserError(f"{what} is of type {type(spec).__name__}: make it a SchemeSpec")
    if getattr(spec, "name", None) != entry.name:
        raise UserError(f"{what} has another name: set `name` of its spec to '{entry.name}'")
    return spec


def spec_of(layout: LayoutConfig) -> SchemeSpec:
    """Returns the spec of a layout's scheme."""
    return specs()[layout.scheme]


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
    if over := ["dp" if key == "dp" else key for key in layout.experts_over]:
        n = f"={layout.experts_dp}" if layout.experts_dp else ""
        parts.append(f"experts over {' x '.join(over)}{n}")
    if layout.pp > 1:
        k = layout.stages_per_rank
        stages = f"x {k} stages, interleaved" if k > 1 else ""
        stages = layout.pipeline if layout.splits_backward else stages
        parts.append(f"pp={layout.pp} {stages}".strip())
    if len(parts) > 1 and layout.n_processes == layout.dp * layout.pp:
        parts = parts[1:]  # the scheme has one device
    return ", ".join(parts)
