"""The matrix products of a model, and how much work they have on a layout.

torch is loaded late, so a run that is far too large is refused without waiting for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from gridformer.config import ModelConfig, RunConfig

Section = Literal["attention", "feed_forward", "head"]
Reads = Literal["tokens", "source", "sequences"]
EXPERTS = "experts"  # what names of products of mixtures begin with
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


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
        recompute, cast, memory_gib: Those of `train` in the run.
        recompute_share: The fraction of layers to which `recompute` applies, where it is blocks.
        loss_chunk_tokens: Tokens whose logits exist at a time on a row of the grid; 0 for all.
        dtype: The type of products, which may be tf32; empty for float32.
    """

    tokens: int
    micro_batches: int = 1
    itemsize: int = 4
    state_bytes: float = 16
    source: int = 0
    sequences: int = 0
    recompute: Literal["none", "selective", "full", "except_attention"] = "none"
    recompute_share: float = 1.0
    loss_chunk_tokens: int = 0
    cast: Literal["auto", "step", "use"] = "auto"
    dtype: str = ""
    memory_gib: float = 0.0

    @property
    def recomputed(self) -> float:
        """The fraction of blocks that are recomputed."""
        blocks = self.recompute in ("full", "except_attention")
        return self.recompute_share if blocks else 0.0

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
        count: Number of such products in the model.
        normed: Whether x is the output of a norm that nothing else reads.
        rms: Whether that is an RMSNorm, which consists of many kernels.
        closes: Whether the product closes its section (`gridformer.models.blocks.Role`).
        reads: Which tokens its input has.
        ends_block: Whether nothing in its block reads y. Recomputing the block then skips it.
        parts: The columns of each weight that W consists of, and the pieces of it that are never
            split (`gridformer.models.blocks.Part`); empty if W is one weight.
        copied: Columns of W that devices hold in addition to `n_out`, because heads of keys and
            values do not divide over columns of devices, or over branches.
        held: Weights of this size that the model has for each one that a token passes: more than 1
            for experts.
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
    held: float = 1.0

    @property
    def keys(self) -> int:
        """Columns of W that compute keys and values of attention, without those in `copied`."""
        if self.section != "attention" or not self.name.endswith("kv"):
            return 0
        if self.parts:
            return sum(width for width, _ in self.parts[1:])
        return 2 * self.n_out // 3 if self.name.endswith("qkv") else self.n_out

    def over(self, columns: int) -> Product:
        """Returns the product with what `columns` devices hold of its parts."""
        extra = (n * (columns // blocks_of(pieces, columns) - 1) for n, pieces in self.parts)
        return replace(self, copied=sum(extra))


def keys_chunks(model: ModelConfig, columns: int, biased: bool) -> int:
    """Returns in how many chunks of heads attention gathers keys and values over rows.

    `biased` says whether a learned bias is added to scores. See gridformer.models.blocks.sequence.
    """
    heads = model.kv_heads // blocks_of(model.kv_heads, columns)
    alone = biased or model.attention_dropout > 0.0
    return 1 if alone else next(n for n in (4, 3, 2, 1) if heads % n == 0)


def blocks_of(pieces: int, columns: int) -> int:
    """Returns over how many blocks of columns, or branches, a part of a product is sharded.

    The columns of a block hold the same pieces, which are never split, such as heads of keys; a
    part without pieces must divide over columns.
    """
    return math.gcd(pieces, columns) if pieces else columns


def blocks_over(pieces: int, columns: int, rows: int) -> tuple[int, int]:
    """Returns over how many blocks columns shard a part, and the rows what a column has of it.

    Rows shard pieces only if columns do not share them, so that they are those of their queries.
    """
    over = blocks_of(pieces, columns)
    if not pieces:
        return over, rows
    return over, blocks_of(pieces // over, rows) if over == columns else 1


@lru_cache(maxsize=64)
def products_of(model: ModelConfig) -> list[Product]:
    """Returns the distinct products of a model in forward order, with their counts.

    What a network has more than its outline is taken for experts.
    """
    from gridformer.models import count_parameters, in_few_layers

    sized = model.outline.model_copy(update={"vocab_size": max(model.vocab_size, 1)})
    products: dict[str, Product] = {}
    for times, few in in_few_layers(sized):
        for one in _built(few):
            count = times * one.count
            if one.name in products:
                count += products[one.name].count
            products[one.name] = replace(one, count=count)
    if model.outline is not model:
        wide = [one for one in products.values() if one.section == "feed_forward"]
        more = count_parameters(model) - count_parameters(sized)
        held = 1 + max(0, more) / sum(one.n_in * one.n_out * one.count for one in wide)
        products |= {one.name: replace(one, held=held) for one in wide}
    return [*products.values()]


def _built(sized: ModelConfig) -> list[Product]:
    """Returns the products of a model, all of whose layers it builds."""
    import torch

    from gridformer.models import blocks, build_model

    with torch.device("meta"):
        modules = [*build_model(sized).modules()]
    norms = (blocks.LayerNorm, blocks.RMSNorm)
    read = {module.reader: module for module in modules if isinstance(module, norms)}
    products: dict[str, Product] = {}
    for module in modules:
        if isinstance(module, blocks.MergedLinear):
            name, n_in, n_out = module.role.product, module.n_in, module.n_out
            parts = tuple((part.weight.shape[1], part.pieces) for part in module.parts())
            bias = any(part.bias is not None for part in module.parts())
        elif isinstance(module, blocks.Linear):
            name, (n_in, n_out), parts = module.role.product, module.weight.shape, ()
            bias = module.bias is not None
        elif isinstance(module, blocks.Experts):
            for one in _of_experts(sized):
                n = products[one.name].count if one.name in products else 0
                products[one.name] = replace(one, count=n + 1)
            continue
        elif isinstance(module, blocks.TiedHead):
            name, n_in, n_out = "head", sized.hidden_size, sized.vocab_size
            parts, bias = (), False
        else:
            continue
        rms = isinstance(read.get(name), blocks.RMSNorm)
        product = Product(name, n_in, n_out, 1, name in read, rms, bias, parts=parts)
        if not isinstance(module, blocks.TiedHead):
            role, ends = module.role, name.endswith("down") and sized.norm_position == "pre"
            product = replace(
                product,
                closes=not role.opens,
                section=role.section,
                reads=role.reads,
                ends_block=ends,
            )
        before = products.get(name)
        products[name] = replace(product, count=before.count + 1) if before else product
    return [*products.values()]


def _of_experts(model: ModelConfig) -> list[Product]:
    """Returns the products of a mixture, as one feed-forward of all that a token passes."""
    h, f, k = (
        model.hidden_size,
        model.experts_per_token * model.expert_size,
        model.experts_per_token,
    )
    held = model.n_experts / k
    up = Product(f"{EXPERTS}_up", h, 2 * f, 1, True, True, section="feed_forward", held=held)
    down = Product(f"{EXPERTS}_down", f, h, 1, closes=True, section="feed_forward", held=held)
    return [up, down]


# --------------------------------------------------------------------------- work


def replica_work(run: RunConfig) -> Work:
    """Returns the amount of work of one replica of a run."""
    layout, train = run.layout, run.train
    sequences = train.global_batch // (layout.dp * layout.micro_batches)
    sequences *= run.sequences_per_sample
    return Work(
        tokens=sequences * run.seq_len,
        source=sequences * run.source_len,
        sequences=sequences,
        micro_batches=layout.micro_batches,
        itemsize=ITEMSIZE[train.dtype],
        state_bytes=state_bytes(run, layout.shards),
        recompute=train.recompute,
        recompute_share=recompute_share(run),
        loss_chunk_tokens=train.loss_chunk_tokens,
        cast=train.cast,
        dtype="tf32" if train.tf32 and train.dtype == "float32" else train.dtype,
        memory_gib=train.memory_gib or 0.0,
    )


def recompute_share(run: RunConfig) -> float:
    """Returns the fraction of layers that `train.recompute_layers` names, with equal stages."""
    model, k = run.model, run.train.recompute_layers
    stacks = [model.n_layers, model.n_decoder_layers * model.two_stacks]
    if run.layout.pp > 1:
        stacks = [sum(stacks)]
        k *= run.layout.n_stages
    return sum(min(k, n) for n in stacks) / sum(stacks) if k else 1.0


def parameter_bytes(run: RunConfig) -> int:
    """Returns the bytes of a parameter, a gradient or a moment of the optimizer."""
    return 8 if run.train.dtype == "float64" else 4


def moment_bytes(run: RunConfig, matrices: bool = True) -> int:
    """Returns the bytes of the moments of a parameter.

    `matrices` are those of layers, of which Muon has one moment; AdamW has two of everything.
    """
    n = 1 if matrices and run.train.optimizer == "muon" else 2
    return n * (2 if run.train.moments_dtype == "bfloat16" else parameter_bytes(run))


def state_bytes(run: RunConfig, replicas: int, matrices: bool = True) -> float:
    """Returns the bytes per parameter of value, gradient and moments on a device.

    `replicas` share what `dp_mode` shards. For `matrices` see `moment_bytes`.

    Gradients of several micro-batches accumulate unsharded, unless each pass sums its own
    (gridformer.parallel.data.zero).
    Parameters that FSDP gathers are not counted, not even with `reshard: step`.
    """
    layout, train = run.layout, run.train
    part = 1.0 if layout.dp_mode == "replicate" else 1 / replicas
    value = part if layout.dp_mode == "fsdp" else 1.0
    gradient, moments = part, part * moment_bytes(run, matrices)
    if layout.micro_batches > 1:
        gradient = part if layout.gradient_sync == "micro_batch" else 1.0
    elif train.update == "in_backward":
        gradient /= run.model.n_layers
    if train.offload == "optimizer" and train.device != "cpu":
        moments = 0.0
    return (value + gradient) * parameter_bytes(run) + moments
