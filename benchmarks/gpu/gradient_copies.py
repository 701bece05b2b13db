"""How much of a step's memory traffic copies gradients into messages and parameters out of them.

    python -m benchmarks.gpu.gradient_copies --model gpt2-1.5b --tokens 8192

One rank of 8 replicas is traced as it would run on GPUs, with tensors without memory, in bfloat16.
Every kernel counts the bytes that it reads and writes. "In place" is the same step with gradients
that are views of buckets from its beginning on: nothing is copied, but the buckets are filled with
zeros, and the backward pass reads and writes them to add each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.machine import describe_machine
from benchmarks.gpu.report import table
from gridformer.config import ModelConfig, RunConfig, shipped_model
from gridformer.parallel.data import gradients
from gridformer.parallel.data.zero import FlatBucket
from gridformer.parallel.validation import check_layout
from gridformer.record.device import NAME
from gridformer.record.events import Kernel
from gridformer.record.kernels import launched_work
from gridformer.record.rank import trace_rank
from gridformer.train import step
from gridformer.utils.units import GIB

REPLICAS = 8
MODES: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"dp_mode": "zero1"},
    "fsdp": {"dp_mode": "fsdp"},
}


class _Bytes(TorchDispatchMode):
    """Counts the bytes that kernels read and write inside the context."""

    n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        work = launched_work(func, args, kwargs or {}, out, NAME)
        self.n += work.bytes if work else 0
        return out


@contextmanager
def counted() -> Iterator[_Bytes]:
    """Counts what is copied into messages and out of them."""
    counter = _Bytes()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with counter:
                return real(*args)

        return run

    with (
        patch.object(gradients._Bucket, "_as_message", counting(gradients._Bucket._as_message)),
        patch.object(FlatBucket, "join", counting(FlatBucket.join)),
        patch.object(FlatBucket, "join_parts", counting(FlatBucket.join_parts)),
        patch.object(FlatBucket, "part", counting(FlatBucket.part)),
    ):
        yield counter


@contextmanager
def in_place() -> Iterator[None]:
    """Makes gradients exist from the beginning of a step on, and messages copy nothing."""

    def clear(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

    def message(self: gradients._Bucket, grads: list[Tensor]) -> Tensor:
        return grads[0].new_empty(sum(grad.numel() for grad in grads))

    with (
        patch.object(step, "clear_gradients", clear),
        patch.object(gradients._Bucket, "_as_message", message),
    ):
        yield


def run_of(model: ModelConfig, mode: str, tokens: int, micro_batches: int) -> RunConfig:
    """Returns a run in which each replica computes `tokens` in a micro-batch."""
    s = min(model.max_seq_len, tokens)
    batch = tokens // s * REPLICAS * micro_batches
    layout = {"dp": REPLICAS, "micro_batches": micro_batches, **MODES[mode]}
    run = RunConfig.model_validate(
        {
            "model": model.model_dump(),
            "data": {"path": "none", "seq_len": s},
            "layout": layout,
            "train": {"global_batch": batch, "dtype": "bfloat16", "device": "cuda"},
        }
    )
    check_layout(run)
    return run


def bytes_of(run: RunConfig) -> int:
    """Returns the bytes that all kernels of a step read and write."""
    trace = trace_rank(run, 0, kernels=True)
    assert trace.complete, trace.troubles
    return sum(event.bytes for event in trace.unfolded() if isinstance(event, Kernel))


def main(
    model: Annotated[str, typer.Option(help="A shipped GPT-2.")] = "gpt2-1.5b",
    tokens: Annotated[int, typer.Option(min=1, help="Of a micro-batch of a replica.")] = 8192,
    out: Annotated[Path | None, typer.Option(help="Also append the Markdown to this file.")] = None,
) -> None:
    """Prints the table as Markdown."""
    config = ModelConfig(**shipped_model(model))
    rows = []
    for mode in MODES:
        for micro_batches in (1, 4):
            run = run_of(config, mode, tokens, micro_batches)
            with counted() as copied:
                total = bytes_of(run)
            placed = ""
            if mode == "replicate":
                with in_place():
                    placed = f"{bytes_of(run) / total - 1:+.1%}"
            gib = f"{copied.n / GIB:.1f}"
            rows.append([mode, str(micro_batches), gib, f"{copied.n / total:.1%}", placed])
    columns = ["dp_mode", "micro-batches", "copied, GiB", "of a step's bytes", "in place"]
    machine = describe_machine("benchmarks.gpu.gradient_copies")
    text = f"{machine['date']}, torch {machine['torch']}\n\n`{machine['command']}`\n\n"
    text += table(columns, rows)
    print(text)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    typer.run(main)
