"""Parallel schemes, applied to plain models from outside.

| scheme            | weights          | between sections     | enter, leave                     |
|-------------------|------------------|----------------------|----------------------------------|
| single            | whole            | nothing cut          | -                                |
| megatron          | cut over col     | nothing cut          | identity, all-reduce             |
| sequence parallel | cut over col     | s over col           | all-gather, reduce-scatter of s  |
| megatron_2d       | cut over row, col| b over row, s: col   | all-gather, reduce-scatter of s  |
| optimus, gather   | cut over row, col| b over row, h: col   | all-gather, reduce-scatter of h  |
| optimus, panels   | cut over row, col| b over row, h: col   | SUMMA products panel by panel    |
| SUPER, D&SP       | cut over branch  | b over branch        | all-gather, reduce-scatter of b  |
| SUPER, D&SP-cSub  | cut over branch  | on the first branch  | broadcast, reduce                |

Each composes with replicas (dp), which may share out what they would all hold
(gridformer.parallel.data.zero), and with pipelines (pp, gridformer.parallel.pipeline): a rank then
holds the layers of its own stages, cut as its scheme says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gridformer.parallel.build import build_parallel, parallelize

__all__ = ["build_parallel", "parallelize"]


def __getattr__(name: str) -> Any:
    """What is built needs torch; what schemes are (gridformer.parallel.registry) does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gridformer.parallel import build

    return getattr(build, name)
