"""The matrix products of a model, and how much work they have on a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gridformer.config import ModelConfig

Section = Literal["attention", "feed_forward", "head"]
Reads = Literal["tokens", "source", "sequences"]


@dataclass(frozen=True)
class Work:
    """The amount of work of one model replica.

    Attributes:
        tokens: T, tokens of one replica's micro-batch over all rows of the grid.
        micro_batches: Micro-batches per step.
        itemsize: Bytes per element of activations and gathered weights.
        state_bytes: Bytes per parameter for its value, gradient and optimizer state.
        source: Source tokens of the micro-batch, for models with an encoder and a decoder.
        sequences: Sequences of the micro-batch.
        recompute: `train.recompute` of the run.
        loss_chunk_tokens: Tokens whose logits exist at a time on a row of the grid; 0 for all.
        cast: `train.cast` of the run.
        dtype: The type of products, which may be tf32; empty for float32.
        memory_gib: `train.memory_gib` of the run.
    """

    tokens: int
    micro_batches: int = 1
    itemsize: int = 4
    state_bytes: float = 16
    source: int = 0
    sequences: int = 0
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: int = 0
    cast: Literal["auto", "step", "use"] = "auto"
    dtype: str = ""
    memory_gib: float = 0.0

    def rows_of(self, product: Product) -> int:
        """Returns the number of rows of a product's input, over all devices of the grid."""
        if product.reads == "source":
            return self.source
        return self.sequences if product.reads == "sequences" else self.tokens


@dataclass(frozen=True)
class Product:
    """A matrix product y = x W of a model, W [n_in, n_out].

    Attributes:
        name: Name of the product, shared by the layers of a stack.
        n_in: Rows of W.
        n_out: Columns of W.
        count: Number of such products in the model.
        normed: Whether x is the output of a norm that nothing else reads.
        rms: Whether that is an RMSNorm, which consists of many kernels.
        bias: Whether a bias is added.
        closes: Whether the product closes its section, see `gridformer.models.blocks.Role`.
        section: The section that it belongs to.
        reads: Which tokens its input has.
        ends_block: Whether nothing in its block reads y. Recomputing the block then skips it.
        parts: The columns of each weight that W consists of, and the pieces of it that are never
            split (`gridformer.models.blocks.Part`); empty if W is one weight.
        copied: Columns of W that devices hold in addition to `n_out`, because heads of keys and
            values do not divide over columns of devices, or over branches.
    """

    name: str
    n_in: int
    n_out: int
    count: int
    normed: bool = False
    rms: bool = False
    bias: bool = False
    closes: bool = False
    section: Section = "head"
    reads: Reads = "tokens"
    ends_block: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    copied: int = 0

    def over(self, columns: int) -> Product:
        """Returns the product with what `columns` devices hold of its parts."""
        extra = (n * (columns // blocks_of(pieces, columns) - 1) for n, pieces in self.parts)
        return replace(self, copied=sum(extra))


def blocks_of(pieces: int, columns: int) -> int:
    """Returns over how many blocks of columns a part of a product is sharded.

    The columns of a block hold the same pieces.

    Args:
        pieces: Pieces of the part that are never split, such as heads of keys; 0 if it must divide
            over columns.
        columns: Number of columns of devices, or branches.
    """
    return math.gcd(pieces, columns) if pieces else columns


@lru_cache(maxsize=64)
def products_of(model: ModelConfig) -> list[Product]:
    """Returns the distinct products of a model in forward order, with their counts."""
    from gridformer.models import in_few_layers

    sized = model.model_copy(update={"vocab_size": max(model.vocab_size, 1)})
    found: dict[str, Product] = {}
    for times, few in in_few_layers(sized):
        for one in _built(few):
            count = times * one.count
            if one.name in found:
                count += found[one.name].count
            found[one.name] = replace(one, count=count)
    return [*found.values()]


def _built(sized: ModelConfig) -> list[Product]:
    """Returns the products of a model, all of whose layers it builds."""
    import torch

    from gridformer.models import blocks, build_model

    with torch.device("meta"):
        modules = [*build_model(sized).modules()]
    norms = (blocks.LayerNorm, blocks.RMSNorm)
    read = {module.reader: module for module in modules if isinstance(module, norms)}
    found: dict[str, Product] = {}
    for module in modules:
        if isinstance(module, blocks.Linear | blocks.MergedLinear):
            role = module.role
            parts: tuple[tuple[int, int], ...] = ()
            if isinstance(module, blocks.MergedLinear):
                n_in, n_out = module.n_in, module.n_out
                bias = any(part.bias is not None for part in module.parts())
                parts = tuple((part.weight.shape[1], part.pieces) for part in module.parts())
            else:
                n_in, n_out = module.weight.shape
                bias = module.bias is not None
            product = Product(
                role.product,
                n_in,
                n_out,
                count=1,
                normed=role.product in read,
                rms=isinstance(read.get(role.product), blocks.RMSNorm),
                bias=bias,
                closes=not role.opens,
                section=role.section,
                reads=role.reads,
                ends_block=role.product.endswith("down") and sized.norm_position == "pre",
                parts=parts,
            )
        elif isinstance(module, blocks.TiedHead):
            h, v = sized.hidden_size, sized.vocab_size
            rms = isinstance(read.get("head"), blocks.RMSNorm)
            product = Product("head", h, v, 1, normed="head" in read, rms=rms)
        else:
            continue
        before = found.get(product.name)
        found[product.name] = replace(product, count=before.count + 1) if before else product
    return [*found.values()]
