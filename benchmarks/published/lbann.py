"""Attention as SUPER computed it in LBANN, simulated on the record of gridformer's code.

SUPER's code is public: LBANN's commit 8faaec753 of 2021-07-07, "Subgraph Parallelism support for
Transformer models". What it launches is read there, function by function, and nothing is fitted to
how long it took.

- Queries, keys and values are projected for all heads together, and so is the output. Under
  sub-graph parallelism the projections are common layers: a slice sends each sub-graph its heads,
  and a concatenation brings their outputs back (python/lbann/modules/subgraph/transformer.py).
- Slicing and concatenating copy, with one kernel for all heads (layers/transform/slice.cu).
- Between them each head is computed by itself: two products over the local samples
  (`GemmStridedBatched` in layers/math/matmul.cpp), the scale as zeros and an `Axpy`
  (weighted_sum.hpp), the mask as a copy and an `Axpy` (sum.hpp), and the softmax as four kernels or
  five (misc/channelwise_softmax.cu). Backward are four products, three kernels of the softmax, and
  zeros and an `Axpy` for the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gridformer.plan.predict import Recorded
from gridformer.record.events import Event, Kernel, Trace

_BLOCK = 256  # threads of a block of the softmax: longer rows take another kernel for their maximum
_SIZES = {"float16": 2, "bfloat16": 2, "float64": 8}  # bytes of an element, where they are not 4


def as_lbann(recorded: Recorded) -> Recorded:
    """Returns the record of a step with the attention of LBANN.

    Args:
        recorded: The record, of a model whose attention is `attention` kernels.
    """
    return replace(recorded, traces=[of_lbann(trace) for trace in recorded.traces])


def of_lbann(trace: Trace) -> Trace:
    """Returns a trace in which each kernel of attention is those that LBANN launched.

    Args:
        trace: The trace.
    """
    events: list[Event] = []
    update = trace.update
    for number, event in enumerate(trace.events):
        if number == trace.update:
            update = len(events)
        if isinstance(event, Kernel) and event.kind == "attention":
            events += _heads(event)
        else:
            events.append(event)
    return replace(trace, events=events, update=update)


def _heads(whole: Kernel) -> Iterator[Kernel]:
    """Yields the kernels of all heads, and those that cut heads apart and join them."""
    samples, heads, queries, keys, width, hides = whole.shape
    backward = "backward" in whole.op
    for rows in (queries, keys, keys, queries):  # of queries, keys, values and the output
        yield _pass("slice or concatenate", 2 * samples * rows * heads * width, whole)
    for _ in range(heads):
        parts = _backward if backward else _forward
        yield from parts(whole, samples, queries, keys, width, hides > 0)


def _forward(
    whole: Kernel, samples: int, queries: int, keys: int, width: int, masked: bool
) -> Iterator[Kernel]:
    scores, rows = samples * queries * keys, samples * queries
    yield _product(whole, samples, queries, keys, width)
    yield _pass("zeros", scores, whole)
    yield _pass("axpy", 3 * scores, whole)
    if masked:
        yield _pass("copy", 2 * scores, whole)
        yield _pass("axpy", 3 * scores, whole)
    yield _pass("max", scores, whole)
    if keys > _BLOCK:
        yield _pass("max", rows * -(-keys // _BLOCK), whole)
    yield _pass("zeros", rows, whole)
    yield _pass("sum", scores, whole)
    yield _pass("exp", 2 * scores, whole)
    yield _product(whole, samples, queries, width, keys)


def _backward(
    whole: Kernel, samples: int, queries: int, keys: int, width: int, masked: bool
) -> Iterator[Kernel]:
    scores, rows = samples * queries * keys, samples * queries
    yield _product(whole, samples, queries, keys, width)
    yield _product(whole, samples, keys, width, queries)
    yield _pass("zeros", rows, whole)
    yield _pass("dot", 2 * scores, whole)
    yield _pass("softmax", 3 * scores, whole)
    yield _pass("zeros", scores, whole)
    yield _pass("axpy", 3 * scores, whole)
    yield _product(whole, samples, queries, width, keys)
    yield _product(whole, samples, keys, width, queries)


def _product(whole: Kernel, batch: int, m: int, n: int, k: int) -> Kernel:
    moved = _SIZES.get(whole.dtype, 4) * batch * (m * k + k * n + m * n)
    return whole._replace(
        op="bmm", kind="product", shape=(batch, m, n, k), flop=2 * batch * m * n * k,
        bytes=moved,
    )  # fmt: skip


def _pass(op: str, n_elements: int, whole: Kernel) -> Kernel:
    """Returns a memory-bound kernel that reads and writes this many elements in all."""
    moved = _SIZES.get(whole.dtype, 4) * n_elements
    return whole._replace(op=op, kind="memory", shape=(), flop=0, bytes=moved)
