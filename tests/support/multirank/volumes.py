"""Counts what one layer of a layout sends, for the tests of volumes.

Models of two layers and of one are run; their difference is one layer, without the traffic of the
embedding, the last norm, the head and the loss.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch

from gridformer.comm import Recorder, record_messages
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.cost import Choices, Traffic
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.train.forward_backward import RowSplit
from gridformer.utils.batch import next_words
from tests.support.multirank.exactness import CPU, axes_of, batch_of, rows_of, tiny

B = 12  # sequences; divisible by 1, 2, 3 and 4
CONFIG = tiny()
S, H, V = CONFIG.max_seq_len, CONFIG.hidden_size, CONFIG.vocab_size
BSH = B * S * H
LAYER = ("qkv", "out", "up", "down")


@dataclass
class Volume:
    """Traffic of one rank and pass: elements and messages by label, and elements by axis."""

    moved: dict[str, Fraction]
    count: dict[str, Counter[str]]
    by_axis: dict[str, Fraction]

    def minus(self, other: Volume) -> Volume:
        def less(a: dict[str, Fraction], b: dict[str, Fraction]) -> dict[str, Fraction]:
            return {k: v - b.get(k, 0) for k, v in a.items() if v != b.get(k, 0)}

        count = {k: c - other.count.get(k, Counter()) for k, c in self.count.items()}
        return Volume(
            less(self.moved, other.moved),
            {k: c for k, c in count.items() if c},
            less(self.by_axis, other.by_axis),
        )


def volume_of(recorder: Recorder, label: str = "") -> Volume:
    """Return the volume of all records, or of those with one label."""
    volume = Volume({}, {}, {})
    recorder = Recorder([r for r in recorder.records if r.label == label or not label])
    for r in recorder.records:
        moved = Fraction(r.moved).limit_denominator(1000)
        volume.moved[r.label] = volume.moved.get(r.label, Fraction()) + moved
        volume.by_axis[r.axis] = volume.by_axis.get(r.axis, Fraction()) + moved
        volume.count.setdefault(r.label, Counter())[r.op] += 1
    for label, moved in volume.moved.items():
        assert math.isclose(recorder.moved(label), moved, rel_tol=1e-12)
        assert recorder.count(label) == volume.count[label]
    for axis, moved in volume.by_axis.items():
        assert math.isclose(recorder.moved(axis=axis), moved, rel_tol=1e-12)
    return volume


@cache  # cached by each worker, since the traffic is the same every time
def passes(layout: LayoutConfig, config: ModelConfig) -> tuple[Recorder, Recorder]:
    """Run forward and backward of one micro-batch of B sequences a replica on one rank."""
    torch.set_num_threads(1)
    axes = axes_of(layout)
    model = build_parallel(config, layout, axes, 1, CPU)
    n = B * axes.dp.size
    split, read = RowSplit(n, 1, axes), rows_of(next_words(batch_of(0, config, n)))
    (part,) = split.micro_batches(read(split.all_rows))
    with gathered_weights_scope(model):
        with record_messages() as forward:
            loss = model.losses(part.batch)["tokens"]
        with record_messages() as backward:
            loss.backward()
    # Everything is float32, or ids of words.
    assert all(r.itemsize == 4 or r.label == "tokens" for r in forward.records)
    return forward, backward


def one_layer(layout: dict[str, Any], label: str = "") -> tuple[Volume, Volume]:
    """Return one layer's forward and backward volumes; `label` selects messages of one purpose."""
    plan = LayoutConfig(**layout)
    two, one = (passes(plan, tiny(n_layers=n)) for n in (2, 1))
    forward, backward = (volume_of(a, label).minus(volume_of(b, label)) for a, b in zip(two, one))
    return forward, backward


def optimus(grid: tuple[int, int], **how: str) -> dict[str, Any]:
    """Return a layout that leaves nothing to `auto` except what is asked for."""
    rows, cols = grid
    fixed = {"schedule": "gather", "keep_gathered": "none"}
    return {"scheme": "optimus", "rows": rows, "cols": cols, **fixed, **how}


def short(layout: dict[str, Any]) -> str:
    return "-".join(str(value) for name, value in layout.items() if name != "scheme")


def predicted(choices: Choices, first: bool = True) -> tuple[Traffic, Traffic]:
    """Return the predicted forward and backward traffic of one layer's products."""
    nothing = Traffic(0, 0, 0)
    layer = [choices[name] for name in LAYER]
    forward = sum((choices.forward(choice, first) for choice in layer), nothing)
    return forward, sum((choices.backward(choice) for choice in layer), nothing)


def agrees(counted: Volume, said: Traffic) -> None:
    """Check the elements over rows and columns and the messages of products."""
    for axis, moved in (("col", said.col), ("row", said.row)):
        assert math.isclose(counted.by_axis.get(axis, 0), moved, rel_tol=1e-9), axis
    assert counted.by_axis.keys() <= {"col", "row"}
    assert sum(counted.count.get("product", Counter()).values()) == said.messages
