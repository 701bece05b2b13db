"""The numbers that `python -m benchmarks.golden` writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.multirank import matrix
from tests.support.multirank.exactness import tiny

from gridformer.config import RunConfig
from gridformer.launch.plan import read_run_without_data

PREDICTED = Path(__file__).parent / "data" / "predict.json"


def predictions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the predictions of the saved file, by what follows `gridformer predict`."""
    from gridformer.cluster.file import load_cluster
    from gridformer.plan.predict import predict

    cluster = load_cluster("dgx-h100")

    def one(words: str) -> Any:
        model, *settings = words.split()
        run = read_run_without_data(model, [*settings, "train.compile=false"])
        whole = run.data.model_copy(update={"seq_len": run.model.max_seq_len})
        found = predict(run.model_copy(update={"data": whole}), cluster)
        names = ("step_s", "forward_s", "backward_s", "update_s", "peak_gib", "bubble_s")
        parts = {"exposed_s": found.exposed_communication_s, "launches": found.launches}
        return {name: getattr(found, name) for name in names} | parts

    for words in json.loads(PREDICTED.read_text()):
        yield words, lambda words=words: one(words)  # type: ignore[misc]


def run_of(cell: matrix.Cell, device: str) -> RunConfig:
    """Returns the run of a cell of the matrix."""
    return RunConfig.model_validate(
        {
            "model": tiny(**matrix.of_one_task(cell.config, 0)),
            "layout": cell.layout,
            "data": {"path": ".", "task": cell.task},
            "train": {"global_batch": 32, "device": device},
        }
    )


def cells() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields what is known of the quick cells before they run."""
    for cell in sorted(matrix.QUICK):
        if not matrix.refusal(cell):
            yield cell.title, lambda cell=cell: _cell(cell)  # type: ignore[misc]


def _cell(cell: matrix.Cell) -> Any:
    from gridformer.memory.estimate import estimate_rank
    from gridformer.memory.ranks import largest_ranks
    from gridformer.parallel.auto.decisions import decide_run
    from gridformer.record.events import Start, Wait
    from gridformer.record.rank import trace_rank

    found: dict[str, Any] = {}
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        run = run_of(cell, device)
        decisions = decide_run(run)
        traces = [
            trace_rank(run, rank, decisions, backend=backend)  # type: ignore[arg-type]
            for rank in range(run.layout.n_processes)
        ]
        said = [
            repr(event._replace(place=None) if isinstance(event, Start) else event.number)  # type: ignore[arg-type]
            for trace in traces
            for event in trace.unfolded()
            if isinstance(event, Start | Wait)
        ]
        found[f"messages {backend}"] = (
            len(said),
            hashlib.sha256("\n".join(said).encode()).hexdigest(),
        )
        found[f"troubles {backend}"] = [str(one) for trace in traces for one in trace.troubles]
        for rank in largest_ranks(run, decisions):
            one = estimate_rank(run, rank, decisions, complete=True, timeline=False)
            found[f"memory {device} {rank}"] = {
                "peak": one.peak,
                "moment": one.moment,
                **one.by_kind,
            }
    return found


def losses() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the losses and norms of the quick cells in real processes, to the last bit."""
    from tests.support.multirank.pool import WorkerPool

    pool = WorkerPool()

    def one(cell: matrix.Cell) -> Any:
        return pool.run(matrix.n_of(cell), _losses, cell)[0]

    for cell in sorted(matrix.QUICK, key=lambda cell: (matrix.n_of(cell), cell)):
        if not matrix.refusal(cell):
            yield cell.title, lambda cell=cell: one(cell)  # type: ignore[misc]


def _losses(cell: matrix.Cell) -> list[str]:
    from tests.support.multirank.exactness import CPU, axes_of, batches_of

    from gridformer.config import TrainConfig
    from gridformer.parallel import build_parallel
    from gridformer.train.step import Stepper

    run = run_of(cell, "cpu")
    train = TrainConfig(**matrix.SETTINGS)
    axes = axes_of(run.layout)
    model = build_parallel(run.model, run.layout, axes, 0, CPU, train.dtype)
    stepper = Stepper(model, train, axes, run.layout)
    found = []
    for step in range(matrix.QUICK_STEPS):
        batch = batches_of(step, run.model, train.global_batch, cell.task)
        result = stepper(step, lambda rows, batch=batch: {k: x[rows] for k, x in batch.items()})  # type: ignore[misc]
        found.append(repr((result.losses, result.grad_norm)))
    return found
