"""Predictions, each in a process of its own: a prediction registers a device type with torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.planner.rows import Row
from gridformer.config import RunConfig


@dataclass(frozen=True)
class Predicted:
    """What a prediction says; see `gridformer.plan.prediction`. `error` tells why there is none."""

    step_s: float = float("nan")
    forward_s: float = float("nan")
    backward_s: float = float("nan")
    peak_gib: float = float("nan")
    error: str = ""


@dataclass(frozen=True)
class Question:
    """What is to be predicted.

    Attributes:
        run: The run.
        layers_only: Whether only transformer layers count.
        training: Whether it is an optimizer step, or the forward passes of a batch.
        memory: Whether memory is wanted, too.
        row: The published row that the run belongs to, if its machine and the place of its ranks
            in nodes are wanted; then there is no memory.
    """

    run: RunConfig
    layers_only: bool = False
    training: bool = True
    memory: bool = False
    row: Row | None = None


def answer(question: Question, cluster: Path) -> Predicted:
    """Predicts in this process, without torch.compile."""
    from benchmarks.planner.pricing import cluster_of, price, record, uncompiled
    from gridformer.cluster.file import load_cluster
    from gridformer.plan.predict import predict

    try:
        if question.row is not None:
            found = price(record(question.row, question.training), cluster_of(question.row))
        else:
            found = predict(
                uncompiled(question.run),
                load_cluster(cluster),
                question.layers_only,
                training=question.training,
                memory=question.memory,
            )
    except Exception as error:
        return Predicted(error=f"{type(error).__name__}: {error}")
    peak = float("nan") if found.peak_gib is None else found.peak_gib
    return Predicted(found.step_s, found.forward_s, found.backward_s, peak)


@contextmanager
def predicting(
    questions: list[Question], cluster: Path, n_processes: int = 2
) -> Iterator[list[Future[Predicted]]]:
    """Predicts in other processes while this one does something else."""
    with ProcessPoolExecutor(n_processes, get_context("spawn")) as pool:
        yield [pool.submit(answer, question, cluster) for question in questions]


def predict_all(questions: list[Question], cluster: Path) -> list[Predicted]:
    """Predicts everything, with two processes."""
    with predicting(questions, cluster) as futures:
        return [future.result() for future in futures]
