"""The work of one replica of a run: tokens, dtypes, and bytes of parameters and optimizer.

Nothing here loads torch, so a run that is far too large is refused without waiting for it.
"""

from __future__ import annotations

from gridformer.config import RunConfig
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Work

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def replica_work(run: RunConfig) -> Work:
    """Returns the amount of work of one replica of a run, which `decide` reads."""
    layout, train = run.layout, run.train
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    sequences *= run.sequences_per_sample
    devices = layout.rows * layout.cols * layout.branches
    return Work(
        tokens=sequences * run.seq_len,
        source=sequences * run.source_len,
        sequences=sequences,
        micro_batches=layout.micro_batches,
        itemsize=ITEMSIZE[train.dtype],
        state_bytes=state_bytes(run, layout.dp),
        recompute=train.recompute,
        loss_chunk_tokens=train.loss_chunk_tokens,
        # Blocks that do not communicate are compiled whole, and compiled code keeps no copies.
        cast="use" if train.compile and devices == 1 else train.cast,
        dtype="tf32" if train.tf32 and train.dtype == "float32" else train.dtype,
        memory_gib=train.memory_gib or 0.0,
    )


def resolved(run: RunConfig, choices: Choices) -> RunConfig:
    """Returns the run with what was decided in place of `layout.reshard: auto`."""
    if run.layout.reshard != "auto":
        return run
    layout = run.layout.model_copy(update={"reshard": choices.reshard})
    return run.model_copy(update={"layout": layout})


def parameter_bytes(run: RunConfig) -> int:
    """Returns the bytes of a parameter, a gradient or a moment of the optimizer."""
    return 8 if run.train.dtype == "float64" else 4


def state_bytes(run: RunConfig, replicas: int) -> float:
    """Returns the bytes per parameter of value, gradient and two moments on one of its replicas.

    Gradients of several micro-batches accumulate unsharded (gridformer.parallel.data.zero).
    Parameters that FSDP gathers are not counted, not even with `reshard: step`.

    Args:
        run: The run.
        replicas: Number of replicas that share sharded state.
    """
    layout, train = run.layout, run.train
    part = 1.0 if layout.dp_mode == "replicate" else 1 / replicas
    value = part if layout.dp_mode == "fsdp" else 1.0
    gradient, moments = part, 2 * part
    if layout.micro_batches > 1:
        gradient = 1.0
    elif train.update == "in_backward":
        gradient /= run.model.n_layers
    if train.offload == "optimizer" and train.device != "cpu":
        moments = 0.0
    return (value + gradient + moments) * parameter_bytes(run)
