"""Measures how long the planner's commands take: check, memory, predict and plan.

    python -m benchmarks.planner speed            # some minutes; nothing else should run
    python -m benchmarks.planner speed predict    # the commands with this word

Each command runs once in a process of its own, with all that it loads. Its processor time and that
of the processes it starts are counted, too, which other work on the machine changes less.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from gridformer.utils.process import n_cores

_SMALL = (
    "megatron-8.3b layout.scheme=megatron layout.cols=8 layout.dp=4 layout.pp=2 "
    "layout.micro_batches=8 train.global_batch=512 train.dtype=bfloat16"
)
_FSDP = "gpt2-1.5b layout.dp=64 layout.dp_mode=fsdp train.global_batch=512 train.dtype=bfloat16"
_LARGE = (
    "gpt-175b layout.scheme=megatron layout.cols=8 layout.pp=16 layout.dp=32 "
    "train.global_batch=1536"
)
_GRID = (
    "gpt-175b layout.scheme=optimus layout.rows=8 layout.cols=8 layout.dp=4 layout.pp=16 "
    "layout.micro_batches=32 train.global_batch=1024 train.dtype=bfloat16"
)
# Pipelines with many stages, stages of two lengths, and several stages of each rank.
_DEEP = (
    "gpt-1t layout.scheme=optimus layout.rows=8 layout.cols=8 layout.pp=64 "
    "layout.micro_batches=256 train.global_batch=2048"
)
_DEEPEST = (
    "gpt-1t layout.scheme=megatron layout.cols=8 layout.pp=128 layout.dp=4 "
    "layout.micro_batches=512 train.global_batch=2048 train.dtype=bfloat16"
)
_UNEVEN = (
    "gpt-1t layout.scheme=megatron layout.cols=8 layout.pp=96 layout.dp=5 "
    "layout.micro_batches=384 train.global_batch=1920 train.dtype=bfloat16"
)
_TWICE = (
    "gpt-1t layout.scheme=megatron layout.cols=8 layout.pp=64 layout.dp=8 "
    "layout.stages_per_rank=2 layout.micro_batches=256 train.global_batch=2048 "
    "train.dtype=bfloat16"
)
_INTERLEAVED = (
    "gpt-175b layout.scheme=megatron layout.cols=8 layout.pp=8 layout.stages_per_rank=3 "
    "layout.micro_batches=192 layout.sequence_parallel=true train.global_batch=192"
)
_LONG_ROUND = (
    "gpt-1t layout.scheme=megatron layout.cols=8 layout.pp=64 layout.stages_per_rank=2 "
    "layout.micro_batches=100 train.global_batch=100 train.dtype=bfloat16"
)
# Long sequences, and joined weights.
_LLAMA = (
    "llama-3.1-70b data.seq_len=131072 layout.scheme=megatron layout.cols=8 layout.pp=8 "
    "layout.dp=4 layout.micro_batches=32 train.global_batch=128 train.dtype=bfloat16"
)
_LLAMA_TWICE = (
    "llama-3.1-405b data.seq_len=131072 layout.scheme=megatron layout.cols=8 layout.pp=16 "
    "layout.dp=8 layout.stages_per_rank=2 layout.micro_batches=64 train.global_batch=512 "
    "train.dtype=bfloat16"
)
_ON = " --cluster dgx-h100"
_COMPILES_ANEW = "PYTHONDONTWRITEBYTECODE"


class Case(NamedTuple):
    """A command.

    Attributes:
        devices: How many devices it is about.
        words: What follows `gridformer`.
        bar_s: How long it may take; None if that is not set.
    """

    devices: int
    words: str
    bar_s: float | None = None


CASES = [
    Case(64, f"check {_SMALL}"),
    Case(64, f"memory {_SMALL}"),
    Case(64, f"predict {_SMALL}{_ON}", 5),
    Case(64, f"predict {_FSDP}{_ON}", 5),
    Case(64, f"predict {_INTERLEAVED}{_ON}", 5),
    Case(256, f"predict {_LLAMA}{_ON}", 5),
    Case(1024, f"predict {_LLAMA_TWICE}{_ON}", 5),
    Case(64, f"plan gpt2-1.5b --devices 64{_ON}", 15),
    Case(64, f"plan llama-3.1-8b --devices 64{_ON}", 15),
    Case(4096, f"check {_LARGE}", 10),
    Case(4096, f"memory {_LARGE}", 10),
    Case(4096, f"predict {_LARGE}{_ON}", 5),
    Case(4096, f"check {_GRID}", 10),
    Case(4096, f"memory {_GRID}", 10),
    Case(4096, f"predict {_GRID}{_ON}", 5),
    Case(4096, f"predict {_DEEP}{_ON}", 5),
    Case(4096, f"predict {_DEEPEST}{_ON}", 5),
    Case(3840, f"predict {_UNEVEN}{_ON}", 5),
    Case(4096, f"predict {_TWICE}{_ON}", 5),
    Case(512, f"predict {_LONG_ROUND}{_ON}", 5),
    Case(4096, f"plan gpt-175b --devices 4096 --batch 1536{_ON}", 60),
]


def measure(case: Case) -> tuple[float, float]:
    """Returns the seconds that a command takes, and its seconds of processor time.

    Its modules are compiled like those of an installed package, even if the environment forbids it.
    """
    environment = {name: value for name, value in os.environ.items() if name != _COMPILES_ANEW}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "gridformer", *case.words.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1 says that something does not fit
        raise RuntimeError(f"gridformer {case.words}: {done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, used


def main(words: Sequence[str]) -> None:
    """Prints the table of the commands, or of those that contain all of the words."""
    load = os.getloadavg()[0]
    print(f"{n_cores()} cores; the load of the machine before it began was {load:.1f}.\n")
    print("| devices | gridformer ... | bar | seconds | seconds of a processor |")
    print("|---|---|---|---|---|")
    for case in CASES:
        if not all(word in case.words for word in words):
            continue
        took, used = measure(case)
        bar = f"{case.bar_s:g}" if case.bar_s else ""
        print(f"| {case.devices} | `{case.words}` | {bar} | {took:.1f} | {used:.1f} |", flush=True)
