"""A case of the fuzzer: a small random run, which may move to another layout while it trains.

A case follows from its seed and the schema of a run's settings.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

from gridformer.config import RunConfig
from tests.support.fuzz.drawing import Sections, draw_run, run_of, shortened

QUICK = 36  # the seeds below this are those of `make test`, and use few processes
LARGEST, USUAL, FEW = 16, 8, 4  # processes: of one case in eight, of the others, and of quick ones
# Settings that a run may change when it moves without changing its numbers.
METHODS = {
    "recompute", "recompute_layers", "update", "offload", "loss_chunk_tokens", "sanity_checks",
    "compile",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run and the batches it trains on.

    Attributes:
        run: Sections of settings; missing ones are defaults, or fixed in drawing.py.
        batch: How much is padded, and how many targets do not count.
        stop: The number of steps before the run moves to `moved`; 0 if it does not move.
        moved: The sections that differ after the move.
    """

    run: Sections
    batch: dict[str, float]
    steps: int
    stop: int
    moved: Sections

    @property
    def legs(self) -> list[RunConfig]:
        """Return the run, or the runs before and after the move."""
        first = run_of(self.run)
        return [first, run_of(self.after)] if self.stop else [first]

    @property
    def after(self) -> Sections:
        kept = {key: v for key, v in self.run.get("train", {}).items() if key not in METHODS}
        methods = self.moved.get("train", {})
        return {**self.run, "layout": self.moved.get("layout", {}), "train": {**kept, **methods}}

    @property
    def n_processes(self) -> int:
        return max(leg.layout.n_processes for leg in self.legs)

    def text(self) -> str:
        """Return the case on one line, which `--case` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Case:
        return Case(**json.loads(text))


def case_of(seed: int) -> Case:
    """Return the case of a seed; it depends only on the seed and the schema of settings."""
    chooser = random.Random(f"case {seed}")
    quick = seed < QUICK
    most = FEW if quick else USUAL if seed % 8 else LARGEST

    def suits(run: RunConfig) -> bool:
        """Accept runs of few enough processes, and grids of one device only rarely."""
        layout = run.layout
        cut = layout.rows * layout.cols * layout.branches > 1
        if layout.scheme == "single":
            cut = layout.n_processes > 1
        short = _n_messages(run) <= 50 or not quick
        return short and layout.n_processes <= most and (cut or seed % 10 == 5)

    run = shortened(draw_run(f"{seed}", suits=suits))
    batch = {"padded": chooser.choice((0.0, 0.5, 1.0)), "ignored": chooser.choice((0.0, 0.3, 0.95))}
    steps, stop, moved = chooser.choice((2, 2, 3)), 0, {}
    if chooser.random() < 0.25:
        stop, moved = chooser.randrange(1, steps), _moved(run, f"{seed} moved", most)
    return Case(run, batch, steps, stop, moved)


def _n_messages(run: RunConfig) -> int:
    """Estimate the number of messages in a step, which dominate the time of tiny models."""
    layout, train = run.layout, run.train
    tokens = train.global_batch * run.seq_len // layout.micro_batches
    chunks = -(-tokens // train.loss_chunk_tokens) if train.loss_chunk_tokens else 1
    return layout.n_processes * layout.micro_batches * (run.model.n_links + chunks)


def _moved(run: Sections, seed: str, most: int) -> Sections:
    """Draw another layout and other methods for the same run."""

    def may_change(key: str) -> bool:
        section, name = key.split(".")
        return section == "layout" or (section == "train" and name in METHODS)

    kept = {section: dict(values) for section, values in run.items() if section != "layout"}
    found = draw_run(seed, kept, may_change, lambda run: run.layout.n_processes <= most)
    methods = {key: value for key, value in found["train"].items() if key in METHODS}
    return {"layout": shortened(found).get("layout", {}), "train": methods}
