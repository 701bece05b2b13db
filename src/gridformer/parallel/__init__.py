"""Parallel schemes, which are applied to plain models from outside.

| scheme            | weights sharded  | between sections       | enter, leave                    |
|-------------------|------------------|------------------------|---------------------------------|
| single            | no               | whole                  | -                               |
| megatron          | over col         | replicated             | identity, all-reduce            |
| sequence parallel | over col         | s over col             | all-gather, reduce-scatter of s |
| megatron_2d       | over row and col | b over row, s over col | all-gather, reduce-scatter of s |
| optimus, gather   | over row and col | b over row, h over col | all-gather, reduce-scatter of h |
| optimus, panels   | over row and col | b over row, h over col | SUMMA products panel by panel   |
| optimus, weight   | over row and col | b/s over col, h/row    | both ends of a product          |
| SUPER, D&SP       | over branch      | b over branch          | all-gather, reduce-scatter of b |
| SUPER, D&SP-cSub  | over branch      | on the first branch    | broadcast, reduce               |

Each scheme composes with replicas (dp), over which ZeRO-1 and FSDP shard what every replica would
hold (gridformer.parallel.data), and with pipelines (pp, gridformer.parallel.pipeline): a rank then
holds only the layers of its own stages, sharded as the scheme says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gridformer.parallel.build import build_parallel, parallelize

__all__ = ["build_parallel", "parallelize"]


def __getattr__(name: str) -> Any:
    """Imports `build` on first use: it needs torch, while the specs of schemes do not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gridformer.parallel import build

    return getattr(build, name)
