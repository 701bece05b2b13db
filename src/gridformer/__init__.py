"""Train transformers on a grid of devices, with the same loss as on one."""

from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gridformer.parallel.network.network import parallelize as parallelize


def __getattr__(name: str) -> object:
    """Imports `parallelize` on first use: it needs torch, and most commands start without it."""
    if name != "parallelize":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gridformer.parallel.network.network import parallelize

    return parallelize
