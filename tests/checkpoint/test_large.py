"""A save of gpt-175b on 4,096 ranks, all of which this process plays without memory for tensors.

The first rank reads the notes of all others, joins what they say into one index, and writes that.
"""

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gridformer.checkpoint import save as saving
from gridformer.checkpoint.blocks import TensorBlock, packed_part, written_here
from gridformer.checkpoint.checkpoint import manifest_of, updated_parameters
from gridformer.checkpoint.manifest import read_manifest
from gridformer.checkpoint.save import Save
from gridformer.checkpoint.store import Kept, LocalStore
from gridformer.checkpoint.whole import shapes_of
from gridformer.config import RunConfig
from gridformer.mesh import Axes, Axis
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import mesh_ranks
from tests.support.large import gpt_175b


def blocks_of_all(run: RunConfig) -> Iterator[tuple[int, dict[str, TensorBlock]]]:
    """Yield each rank and the blocks that it writes."""
    layout, choices = run.layout, decide_run(run).choices
    ranks, meta = mesh_ranks(layout), torch.device("meta")
    for stage in range(layout.pp):
        for place in range(layout.rows * layout.cols):
            row, col = divmod(place, layout.cols)
            axes = Axes(
                pp=Axis("pp", layout.pp, stage),
                row=Axis("row", layout.rows, row),
                col=Axis("col", layout.cols, col),
                grid=Axis("grid", layout.rows * layout.cols, place),
            )
            model = build_parallel(
                run.model, layout, axes, 1, meta, run.train.dtype, choices, filled=False
            )
            shards = updated_parameters(model)
            names = [name.removeprefix("model.") for name in shards]
            for moment in ("exp_avg", "exp_avg_sq"):  # as large as parameters
                shards |= {f"{moment}.{n}": shards[f"model.{n}"] for n in names}
            for replica in range(layout.dp):
                of_replica = replace(axes, dp=Axis("dp", layout.dp, replica))
                yield int(ranks[stage, replica, row, col]), written_here(shards, of_replica)


@pytest.mark.full
def test_a_save_of_4096_ranks_is_planned_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpt_175b()
    first: dict[str, TensorBlock] = {}
    notes: dict[int, bytes] = {}
    for rank, blocks in blocks_of_all(run):
        if rank == 0:
            first = blocks
        else:
            notes[rank] = saving._Note(rank, 2**30, 0, packed_part(blocks)).content()
    assert len(notes) == 4095
    manifest = manifest_of(1, 0, run)

    def planned(out: Path) -> float:
        """Save once, without writing blocks, and return the processor time of the first rank."""
        save = Save(LocalStore(out), manifest, 0, len(notes) + 1, Kept(3))
        assert save.begin()
        for rank, note in notes.items():
            save.draft.tell(f"done-{rank}", note)
        began = time.process_time()
        save.run(first)
        assert not save.outcome.failure
        return time.process_time() - began

    monkeypatch.setattr(saving, "write_file", lambda *_: (2**30, 0))
    seconds = planned(tmp_path / "timed")
    tracemalloc.start()
    planned(tmp_path / "measured")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{seconds:.1f} s of processor time, {peak / 2**20:.0f} MiB")
    assert peak < 2 * 2**30

    index = read_manifest(tmp_path / "timed" / "checkpoints" / "step-00000001").index
    shapes = shapes_of(run.model)
    kinds = ("model", "exp_avg", "exp_avg_sq")
    whole = {f"{kind}.{name}": math.prod(shape) for kind in kinds for name, shape in shapes.items()}
    held: Counter[str] = Counter()
    for stored in index.of(whole):
        held[stored.name] += math.prod(stored.size)
    assert held == whole, "every element is in one file"
