"""A case of the fuzzer: a random small run, which may move on its way.

A case follows from its seed and the schema of a run's settings.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

from gridformer.config import RunConfig
from tests.support.fuzz.drawing import Sections, draw_run, run_of, shortened

QUICK = 40  # the first so many seeds are those of `make test`, and of few processes
LARGEST, USUAL, FEW = 16, 8, 4  # processes: of one case in eight, of the others, of quick ones
# What a run may change on its way without a change of its numbers.
METHODS = {"recompute", "update", "offload", "loss_chunk_tokens", "sanity_checks"}


@dataclass(frozen=True)
class Case:
    """run: sections of settings; what is missing is a default, or fixed in drawing.py. batch: how
    much is padded, and how many targets do not count. stop: steps before a move to `moved`, which
    are sections that differ; 0 for none."""

    run: Sections
    batch: dict[str, float]
    steps: int
    stop: int
    moved: Sections

    @property
    def legs(self) -> list[RunConfig]:
        """The run; or what it is before it moves, and after."""
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
        """One line, which `--case` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Case:
        return Case(**json.loads(text))


def case_of(seed: int) -> Case:
    """The same for the same seed, and the same schema of settings."""
    chooser = random.Random(f"case {seed}")
    quick = seed < QUICK
    most = FEW if quick else USUAL if seed % 8 else LARGEST

    def suits(run: RunConfig) -> bool:
        """Not too many processes; and a grid of one device shows little, so it is rare."""
        layout = run.layout
        cut = layout.rows * layout.cols * layout.branches > 1
        if layout.scheme == "single":
            cut = layout.n_processes > 1
        short = _n_messages(run) <= 50 or not quick
        return short and layout.n_processes <= most and (cut or seed % 10 == 5)

    run = shortened(draw_run(f"{seed}", suits=suits))
    batch = {
        "padded": chooser.choice((0.0, 0.5, 1.0)),
        "ignored": chooser.choice((0.0, 0.3, 0.95)),
    }
    steps, stop, moved = chooser.choice((2, 2, 3)), 0, {}
    if chooser.random() < 0.25:
        stop, moved = chooser.randrange(1, steps), _moved(run, f"{seed} moved", most)
    return Case(run, batch, steps, stop, moved)


def _n_messages(run: RunConfig) -> int:
    """In proportion to those of a step: what takes the time of tiny models."""
    layout, train = run.layout, run.train
    tokens = train.global_batch * run.seq_len // layout.micro_batches
    chunks = -(-tokens // train.loss_chunk_tokens) if train.loss_chunk_tokens else 1
    return layout.n_processes * layout.micro_batches * (run.model.n_links + chunks)


def _moved(run: Sections, seed: str, most: int) -> Sections:
    """Another layout and other methods for the same run."""

    def may_change(key: str) -> bool:
        section, name = key.split(".")
        return section == "layout" or (section == "train" and name in METHODS)

    kept = {section: dict(values) for section, values in run.items() if section != "layout"}
    found = draw_run(seed, kept, may_change, lambda run: run.layout.n_processes <= most)
    methods = {key: value for key, value in found["train"].items() if key in METHODS}
    return {"layout": shortened(found).get("layout", {}), "train": methods}
