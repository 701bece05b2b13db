"""Tokens per second of processor time with packed rows and with a sample in each. Run as a module.

    python -m benchmarks.data.packing RUN.yaml [KEY=VALUE ...] [--rounds 5]

The run has pairs or conversations. In each round a step with one sample in each row and a step with
packed rows of the same lengths alternate, in this process and on one thread. It prints JSON: for
both ways, the share of padding, the tokens of a step that are not padding, and their number per
second.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from gridformer.config import LayoutConfig, RunConfig, load_run
from gridformer.data import RunData, open_training, resolve
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch

PACKED = ("data.document_mask=true", "data.packing=documents")


class Way:
    """Trains one of the two ways, step after step.

    Attributes:
        padding: The share of the positions of its first step that is padding.
        tokens: The tokens of each step that are not padding.
        seconds: The processor seconds of each step.
    """

    def __init__(self, run: RunConfig) -> None:
        run = run.model_copy(update={"layout": LayoutConfig()})
        data = RunData.open(run.data)
        self.run = run = resolve(run, data)
        self.batches = open_training(run, data)
        cpu = torch.device("cpu")
        model = build_parallel(run.model, run.layout, Axes(), run.train.seed, cpu, run.train.dtype)
        self.stepper = Stepper(model, run.train, Axes(), run.layout)
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Runs the next step. Reading its batch does not count."""
        number = len(self.tokens)
        batch: Batch = {
            key: torch.from_numpy(value) for key, value in self.batches.batch(number).items()
        }
        before = time.process_time()
        self.stepper(number, lambda rows: {key: value[rows] for key, value in batch.items()})
        self.seconds.append(time.process_time() - before)
        self.tokens.append(int(Model.n_tokens(batch)))

    def found(self) -> dict[str, Any]:
        """Returns the results, without the first step, which is slower."""
        run = self.run
        positions = run.train.global_batch * (run.seq_len + run.source_len)
        tokens, seconds = self.tokens[1:], self.seconds[1:]
        return {
            "padding": round(1 - sum(tokens) / (positions * len(tokens)), 3),
            "tokens a step": [min(tokens), max(tokens)],
            "tokens a second": [round(n / took) for n, took in zip(tokens, seconds)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ways = {
        "one in each row": Way(load_run(asked.run, asked.overrides)),
        "packed": Way(load_run(asked.run, [*asked.overrides, *PACKED])),
    }
    for _ in range(asked.rounds + 1):
        for way in ways.values():
            way.step()
    print(json.dumps({name: way.found() for name, way in ways.items()}, indent=2))


if __name__ == "__main__":
    main()
