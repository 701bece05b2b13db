"""How long training waits for a save that takes ten steps: waited for, and beside the training.

    python -m benchmarks.saves [--device cpu|cuda] [--hidden 128] [--layers 4]

A disk is made slow on purpose: each file ends only when ten steps' time is over.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from unittest.mock import patch

import torch

from gridformer.checkpoint.checkpoint import manifest_of, shards_of
from gridformer.checkpoint.saver import Saver
from gridformer.checkpoint.store import Draft
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.units import format_bytes

STEPS_OF_A_SAVE = 10
STEPS = 24  # of which the save is begun after the second


def a_run(arguments: argparse.Namespace) -> RunConfig:
    model = {
        "n_layers": arguments.layers,
        "hidden_size": arguments.hidden,
        "n_heads": 4,
        "vocab_size": 4096,
        "max_seq_len": 128,
    }
    train = {"global_batch": arguments.batch, "device": arguments.device}
    return parse_run({"model": model, "data": {"path": "none"}, "train": train})


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Lets each file of a checkpoint take at least this long."""
    original = Draft.writing

    @contextmanager
    def writing(self: Draft, name: str) -> Iterator[BinaryIO]:
        with original(self, name) as file:
            began = time.monotonic()
            yield file
            if name.startswith("shard"):
                time.sleep(max(0.0, seconds - (time.monotonic() - began)))

    with patch.object(Draft, "writing", writing):
        yield


def measure(
    run: RunConfig, stepper: Stepper, step: Callable[[int], None], saver: Saver, wait: bool
) -> list[float]:
    """Returns the times of all steps, each with the save after it."""
    took = []
    for number in range(STEPS):
        began = time.perf_counter()
        step(number)
        if number == 1:
            shards = shards_of(stepper.model, stepper.updates)
            saver.save(manifest_of(number + 1, 0, run), shards, wait=wait, last=False)
        took.append(time.perf_counter() - began)
    saver.finish()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the thread that writes needs a core, too
    run = a_run(arguments)
    device = torch.device(arguments.device)
    model = build_parallel(run.model, LayoutConfig(), Axes(), 1, device)
    stepper = Stepper(model, run.train, Axes())
    batch = torch.randint(0, 4096, (arguments.batch, 129))

    def step(number: int) -> None:
        stepper(number, lambda rows: next_words(batch[rows]))

    for number in range(3):
        step(number)
    began = time.perf_counter()
    for number in range(3):
        step(number)
    plain = (time.perf_counter() - began) / 3
    print(f"a step takes {plain:.3f} s; a save is made to take {STEPS_OF_A_SAVE} steps")
    with slow_disk(STEPS_OF_A_SAVE * plain), tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), run, Axes())
        for name, wait in (("waited for", True), ("beside", False), ("beside, again", False)):
            took = measure(run, stepper, step, saver, wait)
            (outcome,) = saver.news()
            assert not outcome.failure, outcome.failure
            others = sorted(took[2:])[len(took) // 2 - 1]
            print(
                f"{name:14} save of {format_bytes(outcome.n_bytes)} took "
                f"{outcome.seconds:.3f} s ({outcome.seconds / plain:.1f} steps); "
                f"training waited {outcome.stalled_s:.3f} s "
                f"({outcome.stalled_s / plain:.2f} steps); "
                f"median of the steps after it {others:.3f} s"
            )


if __name__ == "__main__":
    main()
