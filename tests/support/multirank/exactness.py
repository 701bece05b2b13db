"""The work of one rank to compare a layout with one device, used by several test modules."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gridformer import exactness
from gridformer.config import LayoutConfig, ModelConfig, Task, TrainConfig
from gridformer.config.train import DType
from gridformer.exactness import EQUAL, TINY, Tensors, differences, trained, without_methods
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.parallel.data.gradients import owned
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch, next_words
from tests.support.multirank.layouts import Layout, n_of
from tests.support.multirank.pool import WorkerPool, group_cache

CPU = torch.device("cpu")
N_CHOICES = 3  # of a question in `batches_of`
TOLERANCE = {"float64": EQUAL, "float32": 1e-5}
# In float32 the keys' bias has a gradient of noise above AdamW's usual eps; see exactness.TRAIN.
TRAIN = {**exactness.TRAIN, "global_batch": 24}
# Small, with dropout wherever it is possible.
EVERYTHING = {"dropout": 0.2, "attention_dropout": 0.1, "max_seq_len": 12, "n_layers": 1}

Found = TypeVar("Found")


def tiny(**changes: Any) -> ModelConfig:
    """Return a GPT-2 whose n and h divide by 1, 2, 3, 4, 6 and 12, and whose v divides by none."""
    return ModelConfig(**{**TINY, **changes})


def batch_of(step: int, config: ModelConfig, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (rows, config.max_seq_len + 1)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def batches_of(step: int, config: ModelConfig, rows: int, task: Task = "auto") -> Batch:
    """Return a family's batch with padding, and with ignored targets where it has them.

    Labels are numbers if `task` is regression. If it is choice, each row is several sequences.
    """
    if task == "choice":
        batch = batches_of(step, config, rows * N_CHOICES)
        found = {key: x.unflatten(0, (rows, N_CHOICES)) for key, x in batch.items()}
        return found | {"labels": batch["at"][:rows] % N_CHOICES}
    whole = batch_of(step, config, rows)
    batch = next_words(whole)
    s, generator = config.max_seq_len, torch.Generator().manual_seed(2000 + step)

    def lengths(n: int) -> Tensor:
        """Return True for a random number of first tokens in each row."""
        return torch.arange(n) < torch.randint(1, n + 1, (rows, 1), generator=generator)

    if config.family == "bert":
        batch["valid"], batch["segments"] = lengths(s), (~lengths(s)).long()
        masked = torch.rand(rows, s, generator=generator) < 0.3
        batch["targets"] = torch.where(masked & batch["valid"], batch["targets"], IGNORE)
        if config.sentence_pair:
            batch["pair"] = torch.randint(0, 2, (rows,), generator=generator)
    elif config.two_stacks:
        source = (rows, 2 * s)
        batch["source"] = torch.randint(0, config.vocab_size, source, generator=generator)
        batch["source_valid"] = lengths(2 * s)
        batch["targets"] = torch.where(lengths(s), batch["targets"], IGNORE)
    if config.n_labels:
        batch["at"] = torch.randint(0, s, (rows,), generator=generator)
        batch["labels"] = torch.randint(0, config.n_labels, (rows,), generator=generator)
        if task == "regression":
            batch["labels"] = torch.randn(rows, generator=generator)
    if config.span_head:
        batch["answer"] = torch.randint(0, s, (rows, 2), generator=generator)
    if not config.token_head:
        del batch["targets"]
    return batch


def rows_of(batch: Batch) -> ReadRows:
    return lambda rows: {key: value[rows] for key, value in batch.items()}


def with_documents(batch: Batch, chance: Tensor, reset: bool = True) -> Batch:
    """Return a batch of running text in which some tokens begin a document.

    Args:
        chance: Numbers in [0, 1); a third of the tokens begin a document.
        reset: Whether positions restart there.
    """
    begins = chance < 1 / 3
    documents = begins.cumsum(1)
    first = torch.searchsorted(documents, documents)
    ends = F.pad(begins[:, 1:], (0, 1))  # a window ends within a document
    targets = torch.where(ends, IGNORE, batch["targets"])
    found = {**batch, "targets": targets, "documents": documents}
    return found | ({"positions": torch.arange(begins.shape[1]) - first} if reset else {})


def with_pairs(batch: Batch, generator: torch.Generator) -> Batch:
    """Return a batch of sources and targets in which each row holds several pairs.

    Half of the sources end with padding, and some sources may have no target.
    """

    def chances(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator)

    numbers = (chances(batch["source"]) < 1 / 3).cumsum(1)
    of_source = numbers - numbers[:, :1]
    last = of_source[:, -1:]
    last = (last - (chances(last) < 1 / 2).long()).clamp(min=0)
    documents = (chances(batch["tokens"]) * (last + 1)).long().sort(1).values
    found = {**batch, "source_valid": of_source <= last}
    for prefix, numbers in (("source_", of_source), ("", documents)):
        first = torch.searchsorted(numbers, numbers)
        places = torch.arange(numbers.shape[1]) - first
        found |= {f"{prefix}documents": numbers, f"{prefix}positions": places}
    return found


def axes_of(layout: LayoutConfig, block: Any = None) -> Axes:
    """Return the axes of a layout over the worker's default group, made once per group."""
    key = ("axes", layout.model_dump_json(), str(block))
    if key not in group_cache():
        group_cache()[key] = build_axes(layout, device().type, block)
    axes: Axes = group_cache()[key]
    return axes


def built(
    layout: Layout, config: ModelConfig, dtype: DType = "float32"
) -> tuple[Model, Axes, LayoutConfig]:
    """Return this worker's part of a model on a layout, whose work then takes one thread."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    return build_parallel(config, plan, axes, 1, CPU, dtype), axes, plan


def device() -> torch.device:
    """Return this worker's device: its GPU in a pool of NCCL processes, otherwise the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def compare(
    layout: dict[str, Any],
    model: dict[str, Any],
    train: dict[str, Any],
    n_steps: int = 5,
    documents: bool = False,
    task: Task = "auto",
) -> dict[str, float]:
    """Return the largest relative differences to one device by the first word of their names.

    They are relative to the largest element of the reference's whole tensor. With `documents`,
    rows of the batches hold several documents, or several pairs. For `task` see `batches_of`.
    """
    torch.set_num_threads(1)
    config, settings, plan = tiny(**model), TrainConfig(**train), LayoutConfig(**layout)
    plain = without_methods(settings).model_dump_json()
    want = computed_once(_one_device, config.model_dump_json(), plain, n_steps, documents, task)
    axes = axes_of(plan)
    cut = build_parallel(config, plan, axes, settings.seed, device(), settings.dtype)
    stepper = Stepper(cut, settings, axes, plan)
    _check_decay(stepper)
    got = trained(stepper, _reads(config, settings, n_steps, documents, task))
    if not stepper.updates.in_backward:  # which leaves no gradients
        gradients(cut)
    assert_copies_equal(cut, axes)
    worst: dict[str, float] = {}
    for name, difference in differences(cut, got, want).items():
        kind = name.partition(" ")[0]
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


def gradients(model: Model) -> Tensors:
    """Return the gradients that this rank owns; the others are undefined after they are reduced."""
    found = {}
    for name, parameter in owned(model):
        assert parameter.grad is not None, name
        assert _strides(parameter.grad) == _strides(parameter), name
        found[name] = parameter.grad
    return found


def _strides(x: Tensor) -> list[int]:
    """Return the strides of x; along a dimension of size 1 they mean nothing."""
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


_computed: dict[Any, Any] = {}


def computed_once(compute: Callable[..., Found], *args: Any) -> Found:
    """Compute something on rank 0, broadcast it to all ranks and cache it there.

    Tests use the same few models and settings again and again.
    """
    key = (compute.__module__, compute.__name__, *args)
    if not dist.is_initialized():
        if key not in _computed:
            _computed[key] = compute(*args)
        return cast(Found, _computed[key])
    here = torch.tensor(float(key in _computed), device=device())
    dist.all_reduce(here, dist.ReduceOp.MIN)
    if not here:
        if dist.get_rank() == 0 and key not in _computed:
            _computed[key] = compute(*args)
        values_of_first = [_computed.get(key)]
        dist.broadcast_object_list(values_of_first, 0, device=device())
        _computed[key] = values_of_first[0]
    return cast(Found, _computed[key])


def _one_device(
    config_json: str, settings_json: str, n_steps: int, documents: bool, task: Task
) -> Tensors:
    config = ModelConfig.model_validate_json(config_json)
    settings = TrainConfig.model_validate_json(settings_json)
    axes = Axes(device_type=device().type)
    whole = build_parallel(config, LayoutConfig(), axes, settings.seed, device(), settings.dtype)
    found = trained(
        Stepper(whole, settings, axes), _reads(config, settings, n_steps, documents, task)
    )
    norms = [float(norm) for name, norm in found.items() if name.startswith("norm of")]
    assert not settings.clip_norm or min(norms) > settings.clip_norm, "the test must clip"
    return found


def _reads(
    config: ModelConfig, settings: TrainConfig, n_steps: int, documents: bool, task: Task
) -> list[ReadRows]:
    def read_of(step: int) -> ReadRows:
        batch = batches_of(step, config, settings.global_batch, task)
        if documents:
            generator = torch.Generator().manual_seed(3000 + step)
            if config.two_stacks:
                batch = with_pairs(batch, generator)
            else:
                chance = torch.rand(batch["tokens"].shape, generator=generator)
                batch = with_documents(batch, chance)
        return rows_of(batch)

    return [read_of(step) for step in range(n_steps)]


def _check_decay(stepper: Stepper) -> None:
    """Check that all but biases and norms decay, and each owned parameter updates once."""
    decays = {
        id(parameter): group["weight_decay"]
        for group in stepper.updates.param_groups
        for parameter in group["params"]
    }
    held = owned(stepper.model)
    assert len(decays) == sum(len(g["params"]) for g in stepper.updates.param_groups)
    assert decays.keys() == {id(parameter) for _, parameter in held}
    for name, parameter in held:
        vector = name.endswith(".bias") or "norm" in name
        if stepper.model.config.family == "network":
            vector = parameter.dim() < 2
        assert decays[id(parameter)] == (0.0 if vector else stepper.train.weight_decay), name


def assert_equal_one_device(
    pool: WorkerPool,
    layout: Layout,
    model: dict[str, Any],
    train: dict[str, Any],
    task: Task = "auto",
) -> None:
    """Train two steps under these settings, and compare with one device."""
    ranks = pool.run(n_of(layout), compare, layout, model, train, 2, False, task)
    worst_of(ranks, TOLERANCE[train["dtype"]])


def worst_of(ranks: list[dict[str, float]], limit: float = TOLERANCE["float64"]) -> float:
    """Return the largest difference on any rank, after checking that all of them are small."""
    for rank, one in enumerate(ranks):
        assert one.get("initial", 0.0) == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in one.items() if not v <= limit}
        assert not wrong, f"rank {rank}: {wrong}"
    return max(value for one in ranks for value in one.values())
