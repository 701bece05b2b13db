"""Frees what the measurement of one layout has used before that of the next one begins."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@contextmanager
def released(device: torch.device) -> Iterator[None]:
    """Frees the models and destroys the process groups that are made inside the block.

    Models may be in cycles of references, which only the garbage collector frees, and each group
    of NCCL keeps buffers on the GPU. All ranks make groups in the same order, so they also destroy
    them in the same order. After an error nothing is done: groups would wait for the ranks that
    failed.

    Args:
        device: The device of this rank.
    """
    before = groups()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # no message is under way
    for group in groups():
        if group not in before:
            dist.destroy_process_group(group)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def groups() -> list[ProcessGroup]:
    """Returns the process groups of this rank in the order in which they were made."""
    return [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else []
