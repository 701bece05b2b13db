"""The exactness matrix: whether small models train on a scheme's layouts as on one device.

Losses, norms, every gradient and every weight are compared, in float64 on CPU processes.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer.config import LayoutConfig, RunConfig, Task, TrainConfig
from gridformer.launch import launch
from gridformer.mesh import Axes
from gridformer.mesh.process_group import close_process_groups, init_process_groups
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.copies import assert_copies_equal
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import replica_part, stored
from gridformer.parallel.registry import specs
from gridformer.parallel.sharding import shard_of
from gridformer.parallel.validation import check_layout
from gridformer.record.batch import rows_like
from gridformer.train.step import ReadRows, Stepper
from gridformer.utils.batch import IGNORE, Batch
from gridformer.utils.errors import ConfigError
from gridformer.utils.placeholder_module import without_dynamo

EQUAL = 1e-9
_STEPS = 2  # the second is the first with moments and updated copies
_TIMEOUT_S = 1800.0

# n and h divide by 1, 2, 3, 4, 6 and 12, and v divides by none.
TINY = {"n_layers": 2, "hidden_size": 48, "n_heads": 12, "vocab_size": 89, "max_seq_len": 24}
# The gradient of the keys' bias is zero in exact arithmetic, because softmax does not depend on it.
# With its usual eps AdamW would turn rounding noise in it into full steps.
TRAIN: dict[str, Any] = {
    **{"global_batch": 32, "clip_norm": 0.05, "lr": 1e-3},
    **{"weight_decay": 0.1, "adam_eps": 1e-4},
}
# The heads of fine-tuning, without that of tokens: labels of sequences, and spans.
FINE_TUNED: dict[str, Any] = {"token_head": False, "span_head": True, "n_labels": 3}
T5: dict[str, Any] = {"family": "t5", "relative_buckets": 8, "relative_max_distance": 16}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {"family": "gpt2", "n_labels": 3},
    "BERT": {"family": "bert"},
    "T5": T5,
    "Transformer": {"family": "transformer", "label_smoothing": 0.1},
    # Its 3 heads of keys and values do not divide over 2 columns, so both columns have all of them.
    "Llama": {"family": "llama", "n_kv_heads": 3, "qk_norm": True, "tied_head": False},
    "BERT, fine-tuned": {"family": "bert", "sentence_pair": False, **FINE_TUNED},
    "GPT-2, fine-tuned": {"family": "gpt2", **FINE_TUNED},
    "Llama, fine-tuned": {"family": "llama", "n_kv_heads": 3, "tied_head": False, **FINE_TUNED},
    "T5, fine-tuned": {**T5, **FINE_TUNED},
    # 5 experts do not divide over 2 devices; the balance is a loss, or moves biases.
    "Experts": {
        **{"family": "llama", "n_kv_heads": 3, "n_experts": 5, "experts_per_token": 3},
        **{"expert_size": 24, "balance_loss": 0.1, "z_loss": 0.01, "tied_head": False},
    },
    # Norms over all heads are OLMoE's.
    "DeepSeek experts": {
        **{"family": "llama", "qk_norm": True, "qk_norm_over": "all", "n_experts": 6},
        **{"experts_per_token": 2, "expert_size": 24, "shared_size": 48, "dense_layers": 1},
        **{"router": "sigmoid", "router_bias": True, "balance_rate": 0.01, "routed_scale": 2.5},
        "n_kv_heads": 3,
    },
}
PIPELINES = (1, 2, 4)
REPLICAS = ("none", "replicate", "zero1", "fsdp")
IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full", "loss_chunk_tokens": 21},
    "selective": {"recompute": "selective", "loss_chunk_tokens": 50},
    "some layers": {"recompute": "except_attention", "recompute_layers": 1},
    "in_backward": IN_BACKWARD,
    "clip_by_layer": {"clip_by": "layer"},
    "in_backward, not clipped": {"update": "in_backward", "clip_norm": 0.0},
    "offload": {"offload": "optimizer"},
    "muon": {"optimizer": "muon"},
    "muon by head": {"optimizer": "muon", "muon_by_head": True, "clip_by": "layer"},
    "all": {**IN_BACKWARD, "offload": "optimizer", "recompute": "full", "loss_chunk_tokens": 21},
    "attention by operators": {"attention": "math"},
}


class Cell(NamedTuple):
    """One combination of a key of MODELS, a grid, stages, the mode of two replicas, and so on.

    Attributes:
        grid: The scheme and its grid, as keys of a layout.
        replicas: The mode of two replicas, or `none`.
        method: A key of METHODS, or empty.
    """

    model: str
    grid: Mapping[str, Any]
    pp: int
    replicas: str
    dropout: bool
    method: str = ""

    @property
    def layout(self) -> dict[str, Any]:
        """The layout, with as many micro-batches as stages."""
        pipeline = {"pp": self.pp, "micro_batches": self.pp} if self.pp > 1 else {}
        replicas = {"dp": 2, "dp_mode": self.replicas} if self.replicas != "none" else {}
        return {**pipeline, **replicas, **self.grid}

    @property
    def config(self) -> dict[str, Any]:
        """The model; a pipeline's has three layers, so that four stages are unequal."""
        dropout = {"dropout": 0.1, "attention_dropout": 0.1} if self.dropout else {}
        n_layers = 3 if self.pp > 1 else 2
        return {"n_layers": n_layers, "max_seq_len": 12, **MODELS[self.model], **dropout}

    def run(self) -> RunConfig:
        """Returns the run, which is checked.

        Raises:
            ConfigError: The model cannot run on the layout.
        """
        task: Task = "auto" if MODELS[self.model].get("token_head", True) else "classify"
        sections = {
            "model": {**TINY, **self.config},
            "layout": self.layout,
            "data": {"path": ".", "task": task},
            "train": {**TRAIN, "dtype": "float64", **METHODS.get(self.method, {})},
        }
        return check_layout(RunConfig.model_validate(sections))


def cells_of(given: Mapping[str, Any], full: bool) -> list[Cell]:
    """Returns one cell of each model, or with `full` all combinations, each with some method.

    `given` are the scheme and other keys that every layout has. If they say no grid, grids are the
    scheme's arrangements of two devices for each of its axes.
    """
    spec, methods = specs()[given["scheme"]], ("", *METHODS)
    arranged = spec.arrangements(2 ** len(spec.axes))
    grids = [given] if given.keys() & {*spec.axes} else [{**one, **given} for one in arranged]
    if full:
        every = itertools.product(MODELS, grids, PIPELINES, REPLICAS, (False, True))
        cells = [Cell(*one) for one in every]
        chosen = zip((cell for cell in cells if n_of(cell) <= 16), itertools.cycle(methods))
        return [cell._replace(method=method) for cell, method in chosen]
    axes = itertools.cycle(((1, "none"), (2, "none"), *((1, mode) for mode in REPLICAS[1:])))
    quick = zip(MODELS, itertools.cycle(grids), axes, itertools.cycle((False, True)), methods)
    return [Cell(model, grid, *ways, dropout, how) for model, grid, ways, dropout, how in quick]


def n_of(cell: Cell) -> int:
    """Returns the number of a cell's processes."""
    return LayoutConfig(**cell.layout).n_processes


# --------------------------------------------------------------------------- one training

Tensors = dict[str, Tensor]
# Parameters whose gradients are zero in exact arithmetic, so that only rounding noise moves them:
# softmax over tokens, or over choices, does not see what is added to all of them.
_ALWAYS_ZERO = ("span.ends.bias", "classifier.labels.bias")


def trained(stepper: Stepper, reads: Sequence[ReadRows]) -> Tensors:
    """Trains on these batches. Returns all numbers that this rank has, by a name for each."""
    found = held("initial", stepper.model)
    keep_gradients(stepper, found)
    numbers: dict[str, float] = {}
    for step, read in enumerate(reads):
        done = stepper(step, read)
        of_step = {"loss": done.loss, "norm": done.grad_norm, "tokens": done.tokens}
        if done.experts:
            found[f"experts of step {step}"] = torch.tensor(done.experts, dtype=torch.float64)
        numbers |= {f"{kind} of step {step}": value for kind, value in of_step.items()}
    numbers["evaluated loss"] = stepper.evaluate(reads[::2]).loss
    found |= {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    return found | held("trained", stepper.model)


def held(kind: str, model: Model) -> Tensors:
    """Returns copies of what this rank has of each parameter."""
    named = model.named_parameters()
    return {f"{kind} {name}": stored(p).detach().cpu().clone() for name, p in named}


def keep_gradients(stepper: Stepper, found: Tensors) -> None:
    """Lets the next step keep the gradients that this rank owns, unless it updates in backward."""

    def keep() -> AbstractContextManager[None]:
        for name, parameter in owned(stepper.model) if not stepper.updates.in_backward else ():
            assert parameter.grad is not None, name
            found[f"gradient {name}"] = parameter.grad.cpu().clone()
        stepper.updates.around = nullcontext
        return nullcontext()

    stepper.updates.around = keep


def differences(model: Model, got: Tensors, want: Tensors, least: float = 0.0) -> dict[str, float]:
    """Returns how much this rank's numbers differ from those of one device, which are whole.

    It is relative to the largest element of the whole tensor, or to `least` if that is larger.
    """
    found = {}
    parameters = dict(model.named_parameters())
    for key, mine in got.items():
        whole, name = want[key], key.rpartition(" ")[2]
        scale = max(float(whole.abs().max()), least, 1e-6 * (name in _ALWAYS_ZERO))
        if name in parameters:
            part = replica_part(parameters[name])
            is_part = part is not None and part.shape == mine.shape  # or all that a device has
            shard = shard_of(part if is_part else parameters[name])  # type: ignore[arg-type]
            assert shard.size == tuple(whole.shape), name
            whole = shard.block_of(whole, mine.shape)
        difference = float((mine - whole).abs().max()) / (scale or 1.0) if mine.numel() else 0.0
        found[key] = difference if math.isfinite(difference) else math.inf
    return found


def without_methods(settings: TrainConfig) -> TrainConfig:
    """Returns the settings without any memory-saving method."""
    plain: dict[str, Any] = {"recompute": "none", "recompute_layers": 0, "loss_chunk_tokens": 0}
    return settings.model_copy(update=plain | {"update": "after_backward", "offload": "none"})


# --------------------------------------------------------------------------- the command


class CellResult(NamedTuple):
    """What came of a cell.

    Attributes:
        word: `equal`, `refused` by the check before a run, or `wrong`.
        what: What differs most, or why it was not compared.
        relative: By how much that differs.
    """

    cell: Cell
    word: str
    what: str
    relative: float | None = None


def measure(cells: Iterable[Cell]) -> Iterator[CellResult]:
    """Trains cells and yields what came of each."""
    for cell in cells:
        try:
            run = cell.run()
        except ConfigError as error:
            yield CellResult(cell, "refused", "; ".join(error.problems))
            continue
        try:
            worst = in_processes(run.layout.n_processes, one_rank, run)
        except SystemExit as ended:
            if ended.code != 1:  # it was stopped
                raise
            yield CellResult(cell, "wrong", "a process failed, as printed above")
            continue
        what, relative = max(worst, key=lambda found: found[1])
        yield CellResult(cell, "equal" if relative <= EQUAL else "wrong", what, relative)


def in_processes(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls a function in n CPU processes, and returns what each returns, as JSON keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        launch(_one_process, (n, folder, function, args), n)
        return [json.loads(Path(folder, f"{rank}").read_text()) for rank in range(n)]


def _one_process(n: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    world = init_process_groups("cpu", n, _TIMEOUT_S)
    Path(folder, f"{world.rank}").write_text(json.dumps(function(*args)))
    close_process_groups()


def one_rank(run: RunConfig) -> tuple[str, float]:
    """Trains on one device, and a part of a layout; returns what differs most, and by how much."""
    axes = build_axes(run.layout, "cpu")
    alone = {"layout": LayoutConfig(), "train": without_methods(run.train)}
    with without_dynamo():  # it would take most of the time
        want = trained(*_begin(run.model_copy(update=alone), Axes()))
        stepper, reads = _begin(run, axes)
        found = differences(stepper.model, trained(stepper, reads), want)
    try:
        assert_copies_equal(stepper.model, axes)
    except RuntimeError as error:
        found[str(error)] = math.inf
    return max(found.items(), key=lambda pair: pair[1])


def _begin(run: RunConfig, axes: Axes) -> tuple[Stepper, list[ReadRows]]:
    train = run.train
    model = build_parallel(
        run.model, run.layout, axes, train.seed, torch.device("cpu"), train.dtype
    )
    batches = [_batch(run, step) for step in range(_STEPS)]
    reads: list[ReadRows] = [partial(_rows, batch) for batch in batches]
    return Stepper(model, train, axes, run.layout), reads


def _rows(batch: Batch, rows: Any) -> Batch:
    return {key: x[rows] for key, x in batch.items()}


def _batch(run: RunConfig, step: int) -> Batch:
    """Returns a random batch with padding, and with targets that do not count."""
    n, model, draw = run.train.global_batch, run.model, torch.Generator().manual_seed(step)
    batch = rows_like(run, slice(0, n))
    if model.span_head:
        batch["answer"] = torch.zeros(n, 2, dtype=torch.int64)
    below = dict.fromkeys(("segments", "pair"), 2) | dict.fromkeys(("at", "answer"), run.seq_len)
    below |= {"labels": model.n_labels}
    for key, x in batch.items():
        if x.dtype == torch.bool:
            lengths = torch.randint(1, x.shape[1] + 1, (n, 1), generator=draw)
            batch[key] = torch.arange(x.shape[1]) < lengths
        else:
            batch[key] = torch.randint(below.get(key, model.vocab_size), x.shape, generator=draw)
    if "targets" in batch:
        left_out = torch.rand(batch["targets"].shape, generator=draw) < 0.3
        batch["targets"] = batch["targets"].masked_fill(left_out, IGNORE)
    return batch
