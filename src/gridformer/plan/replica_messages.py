"""In which messages the gradients and the updated parameters of a rank travel over replicas.

gridformer.parallel.data.buckets joins small tensors, and each large one travels alone. Over many
replicas the latency of a message counts for more than its bytes, so a rank's many messages take
much longer than one of as many bytes.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from gridformer.cluster.messages import Op
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.data.buckets import BUCKET_BYTES
from gridformer.parallel.pipeline.stage_shares import StageShares, stack_of, stacks_of
from gridformer.plan.launches import biases_of, norms_of
from gridformer.plan.load import AxisPlace
from gridformer.plan.sizes import Sizes

_Stack = tuple[tuple[float, ...], int]  # bytes of the tensors of a layer, and the layers


class InBuckets(NamedTuple):
    """How a rank's tensors travel over replicas, one message after the other.

    Attributes:
        seconds: How long all of them take.
        n: How many messages they are.
        joined: The bytes of tensors that share a message, to which they are copied.
    """

    seconds: float
    n: int
    joined: float


def in_buckets(
    sizes: Sizes,
    shares: StageShares,
    common: bool,
    op: Op,
    n_bytes: float,
    place: AxisPlace,
) -> InBuckets:
    """Returns how long a rank's tensors travel over replicas.

    Args:
        sizes: Sizes of a micro-batch on one device.
        shares: What the rank has of the model.
        common: Whether it is the tensors that every device of a grid holds, or the others.
        op: The collective.
        n_bytes: The bytes of all of them. What is not in layers is one more message.
        place: Where the replicas lie.
    """
    seconds, joined, left, number = 0.0, 0.0, n_bytes, 0
    for (one, together), n in _buckets(_stacks(sizes, shares, common)):
        seconds += n * sizes.costs.message_s(op, one, place)
        joined += n * one * together
        left -= n * one
        number += n
    if left > 1:
        seconds += sizes.costs.message_s(op, left, place)
        number += 1
    return InBuckets(seconds, number, joined)


def _stacks(sizes: Sizes, shares: StageShares, common: bool) -> tuple[_Stack, ...]:
    """Returns the tensors of a layer of each stack, in the model's order."""
    found = []
    for stack, n in stacks_of(sizes.run).items():
        layer: list[float] = []
        for choice in sizes.choices.products.values():
            product = choice.product
            if product.section == "head" or stack_of(product) != stack:
                continue
            if choice.common == common:
                layer += _tensors(sizes, choice) * max(1, round(product.count / n))
        found.append((tuple(layer), round(n * dict(shares.layers)[stack])))
    return tuple(found)


def _tensors(sizes: Sizes, choice: Choice) -> list[float]:
    """Returns the bytes of the parameters of a product on a device, with those of its norm."""
    product, choices, h = choice.product, sizes.choices, sizes.run.model.hidden_size
    rows, cols = (1, 1) if choice.common else (choices.rows, choices.cols)
    parts = product.parts or ((choice.n_out, 0),)
    widths = [n / (blocks_of(pieces, cols) if product.parts else cols) for n, pieces in parts]
    found = [product.n_in * width / rows for width in widths]
    # Vectors that devices of a grid share are first summed over them, all in one message.
    shared = choices.rows * choices.cols > 1 and sizes.lies in ("replicated", "s", "h")
    if biases_of(sizes, product) and not (shared and product.closes):
        found.append(sum(widths))
    norms = [] if shared else [float(h)] * norms_of(sizes, product)
    return [n * sizes.wide for n in (*norms, *found)]


_Bucket = tuple[float, bool]  # its bytes, and whether it has more than one tensor


@lru_cache(maxsize=1 << 10)  # a search asks again for the same layers with other settings
def _buckets(stacks: tuple[_Stack, ...]) -> tuple[tuple[_Bucket, int], ...]:
    """Returns the buckets of layers, and how many there are of each."""
    found: Counter[_Bucket] = Counter()
    filled: list[float] = []

    def close() -> None:
        if filled:
            found[sum(filled), len(filled) > 1] += 1
            filled.clear()

    for layer, n in stacks:
        for _ in range(n):
            for n_bytes in layer:
                if n_bytes >= BUCKET_BYTES:
                    found[n_bytes, False] += 1
                    continue
                if sum(filled) + n_bytes > BUCKET_BYTES:
                    close()
                filled.append(n_bytes)
            close()
    return tuple(found.items())
