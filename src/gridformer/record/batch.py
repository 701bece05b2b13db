"""Batches without content, which have the shapes of a run's batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.config.data import FINE_TUNING
from gridformer.data.samples.order import Rows
from gridformer.utils.batch import Batch


def rows_like(run: RunConfig, rows: Rows) -> Batch:
    """Returns rows with the keys, shapes and dtypes of the run's batches, but without content."""
    n = rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def ids(*shape: int) -> Tensor:
        return torch.zeros(n, *shape, dtype=torch.int64)

    def real(*shape: int) -> Tensor:
        return torch.ones(n, *shape, dtype=torch.bool)

    model, s, source = run.model, run.seq_len, run.source_len
    if run.task in FINE_TUNING:
        return _fine_tuning(run, ids, real)
    batch = {"tokens": ids(s), "targets": ids(s)}
    if model.two_stacks:
        batch |= {"source": ids(source)}
        if run.task == "pairs":
            batch |= {"source_valid": real(source)}
        if run.data.document_mask:
            batch |= {"source_documents": ids(source), "source_positions": ids(source)}
    if model.family == "bert":
        batch |= {"segments": ids(s)}
        if model.sentence_pair and not model.n_labels:
            batch |= {"pair": ids()}
    if run.data.document_mask:
        batch |= {"documents": ids(s)} | ({"positions": ids(s)} if run.data.reset_positions else {})
        if run.data.packing == "documents" and not model.two_stacks:
            batch |= {"valid": real(s)}
    if model.n_labels:
        batch |= {"valid": real(s), "at": ids(), "labels": ids()}
    return batch


def _fine_tuning(run: RunConfig, ids: Callable[..., Tensor], real: Callable[..., Tensor]) -> Batch:
    shape = (*(run.data.n_choices,) * (run.task == "choice"), run.seq_len)
    if run.model.two_stacks:
        batch = {"tokens": ids(*shape), "source": ids(*shape), "source_valid": real(*shape)}
    else:
        batch = {"tokens": ids(*shape), "valid": real(*shape)}
    if run.model.family == "bert":
        batch |= {"segments": ids(*shape)}
    if run.task == "answer":
        return batch | {"answer": ids(2)}
    labels = ids().float() if run.task == "regression" else ids()
    return batch | {"at": ids(*shape[:-1]), "labels": labels}
