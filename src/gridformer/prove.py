"""Whether a network trains on a layout as in one process: measured in float64 on CPU processes."""

from __future__ import annotations

import copy
import json
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gridformer import comm
from gridformer.config import LayoutConfig, load_run
from gridformer.config.factory import logits_of, make, probed
from gridformer.exactness import EQUAL, in_processes
from gridformer.models.network import class_of
from gridformer.parallel.network.modules import change_input
from gridformer.parallel.network.network import parallelize
from gridformer.parallel.network.plan import roles_of
from gridformer.parallel.network.refusals import check, run_of, runs_as_a_family
from gridformer.parallel.registry import describe_layout, spec_of
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.tensors import map_tensors

STEPS = 3
_LAYERS = 2  # of a network that is cut
_MOST_PARAMETERS = 50_000_000  # of a network that is not
_PARTS = (
    ". Between an opening and a closing product a device has a part of the columns and heads: "
    "write -1 for a width or number of heads that the line states, or name what counts heads by "
    "the role heads (docs/how-to/own-network.md)"
)


@dataclass
class Proof:
    """What a comparison found.

    Attributes:
        worst: The name of the tensor that differs most, and its largest difference, relative to the
            largest value in it, or to a thousandth of that of all tensors of its kind.
        loss: The loss of the unchanged network. Like `worst` None if the layout cannot run it.
        not_placed: Parameters that the plan does not place.
        notes: Sentences about what was compared.
    """

    equal: bool
    worst: dict[str, Any] | None
    loss: float | None
    layout: str
    not_placed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """Returns the result without notes, as one JSON object."""
        values = asdict(self)
        del values["notes"]
        return json.dumps(values)


@dataclass(frozen=True)
class NetworkSource:
    """Where a network comes from: a Hugging Face folder, or `package.module:function`.

    Attributes:
        name: The path, or the name of the function. It returns a module, or a tuple of a module,
            its inputs (a dict of keyword arguments or a tuple of arguments, tensors [batch, ...])
            and, if it has one, its plan.
        batch: Samples of the inputs that are made.
        seq_len: Tokens of these.
    """

    name: str
    batch: int
    seq_len: int

    def origin(self) -> tuple[str, Mapping[str, str] | None]:
        """Returns the folder or function, and the plan, if it is that of a run."""
        if not (run := Path(self.name) / "config.yaml").is_file():
            return self.name, None
        model = load_run(run).model
        return model.folder or model.factory or self.name, model.plan or None

    def load(self) -> tuple[nn.Module, Any, Mapping[str, str] | None, list[str]]:
        """Returns a network, its inputs, its plan and notes; equal in every process.

        Raises:
            UserError: There is no such network.
        """
        torch.manual_seed(0)
        name, plan = self.origin()
        if (folder := Path(name)).is_dir():
            module, inputs, notes = self._from_folder(folder)
            return module, inputs, plan, notes
        if ":" not in name:
            raise UserError(f"{name}: is neither a folder nor package.module:function")
        module, inputs, own = make(name)
        inputs = self._inputs_of(module) if inputs is None else inputs
        return module, inputs, plan or own, []

    def _from_folder(self, folder: Path) -> tuple[nn.Module, Any, list[str]]:
        """Builds the network of a config.json, with new weights. No code of the folder is run."""
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: has no config.json, as a Hugging Face folder has; a run of one of "
                "gridformer's own families becomes one with gridformer export"
            )
        kind, config = class_of(str(folder))
        notes = ["weights are new ones, and dropout is 0: neither is part of the proof"]
        config.use_cache = False
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
        layers = getattr(config, "num_hidden_layers", 0)
        if size > _MOST_PARAMETERS and layers > _LAYERS:
            config.num_hidden_layers = _LAYERS
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:_LAYERS]
            notes.append(f"{_LAYERS} of its {layers} layers, with the same widths and heads")
        module = kind(config)
        inputs = self._inputs_of(module)
        if kind.__name__.endswith(("ForCausalLM", "LMHeadModel")):
            inputs["labels"] = inputs["input_ids"]
        return module, inputs, notes

    def _inputs_of(self, module: nn.Module) -> Any:
        """Returns random inputs for a model of transformers, or a function's network of tokens."""
        config = getattr(module, "config", None)
        draw = torch.Generator().manual_seed(1)
        if words := getattr(config, "vocab_size", 0):
            longest = getattr(config, "max_position_embeddings", self.seq_len) or self.seq_len
            shape = self.batch, min(self.seq_len, longest)
            inputs = {"input_ids": torch.randint(words, shape, generator=draw)}
            if getattr(config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = torch.randint(words, shape, generator=draw)
            return inputs
        if side := getattr(config, "image_size", 0):
            high, wide = side if isinstance(side, list | tuple) else (side, side)
            channels = getattr(config, "num_channels", 3)
            pixels = torch.randn(self.batch, channels, high, wide, generator=draw)
            return {"pixel_values": pixels.double()}
        with suppress(UserError):
            words, *_ = probed(self.origin()[0], self.seq_len)
            return (torch.randint(words, (self.batch, self.seq_len), generator=draw),)
        raise UserError(
            f"{self.name}: no inputs are known for {type(module).__name__}: return (module, inputs)"
        )


def prove(
    source: NetworkSource,
    layout: LayoutConfig,
    plan: Mapping[str, str] | None = None,
) -> Proof:
    """Compares a network on a layout with the unchanged one in one process.

    Raises:
        ConfigError: The network cannot run on the layout. No process has been started.
        UserError: There is no such network.
    """
    module, inputs, own, _ = source.load()
    check_with_inputs(module, inputs, layout, plan or own)
    del module
    return Proof(**in_processes(layout.n_processes, _one_rank, source, layout, plan)[0])


def check_with_inputs(
    module: nn.Module, inputs: Any, layout: LayoutConfig, plan: Mapping[str, str] | None = None
) -> None:
    """Runs a network up to its first layer, where it stops from then on.

    Raises:
        ConfigError: It cannot run on the layout, or not with these inputs.
    """
    if runs_as_a_family(layout):
        run_of(module, layout, plan)
        return
    roles, spec = check(module, layout, plan), spec_of(layout)
    divided = {"samples": spec.batch_parts(layout), "tokens": spec.sequence_parts(layout)}
    shapes = list[torch.Size]()

    def stop(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        raise StopIteration

    for name in roles.lists[:1] if max(divided.values()) > 1 else ():
        change_input(next(module.get_submodule(name).children()), stop)
        with suppress(Exception), torch.no_grad(), in_float64():  # processes say what it raises
            _run(module.double(), _doubled(inputs))
    for (what, n), size in (pair for shape in shapes for pair in zip(divided.items(), shape)):
        if size % n:
            raise ConfigError(
                f"{describe_layout(layout)} divides {what} between sections, and {size} do not "
                f"divide by {n}: use other inputs, or a layout that does not shard {what}"
            )


def not_placed(source: NetworkSource, plan: Mapping[str, str] | None) -> list[str]:
    """Returns the parameters of a network that a plan does not place."""
    name, of_run = source.origin()
    module, _, own = (source.load()[0], None, None) if Path(name).is_dir() else make(name)
    return roles_of(module, plan or of_run or own).not_placed


def _one_rank(
    source: NetworkSource, layout: LayoutConfig, plan: Mapping[str, str] | None
) -> dict[str, Any]:
    module, inputs, own, notes = source.load()
    proof = compare(module, inputs, layout, plan or own)
    return {} if proof is None else {**asdict(proof), "notes": notes}


# --------------------------------------------------------------------------- the comparison


class _InFloat64(TorchFunctionMode):
    """Lets code that casts to float32, as norms and softmax do, stay in float64.

    Otherwise rounding to float32 would hide differences, or look like some.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Makes float64 the type of what is computed in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def compare(
    module: nn.Module,
    inputs: Any,
    layout: LayoutConfig,
    plan: Mapping[str, str] | None = None,
) -> Proof | None:
    """Trains a network on a layout and, in process 0, alone; call it in every process.

    Compares the loss, every gradient of the first step, and the weights after three steps of AdamW.

    Args:
        module: The network, equal in every process. It is modified in place.
        inputs: A dict of keyword arguments, or a tuple of arguments, equal in every process.

    Returns:
        The result in process 0, None in others.
    """
    module = module.double().train()
    inputs = _doubled(inputs)
    alone: Any = copy.deepcopy(module)
    if hasattr(alone, "set_experts_implementation"):
        alone.set_experts_implementation("eager")
    net = parallelize(module, layout, plan)
    batch = _batch_of(alone, inputs) if runs_as_a_family(layout) else None
    with in_float64():
        expected = None
        if net.axes.world.index == 0:
            with _errors_of_the_network("in one process, unchanged"):
                expected = _train_alone(alone, inputs, batch)
        del alone
        comm.barrier((net.axes.world,))  # a network that fails by itself is told first

        def step() -> float:
            if batch is not None:
                return net.train_batch(batch, _loss_of_batch)
            loss = _loss(_run(net, net.local(inputs)))
            net.backward(loss)
            return net.total(loss)

        with _errors_of_the_network(f"on {describe_layout(layout)}", _PARTS):
            result = _train(net, step, net.optimizer(torch.optim.AdamW, lr=1e-3), net.gradients)
    if expected is None:
        return None
    name, relative = max(_differences(expected, result), key=lambda pair: pair[1])
    return Proof(
        relative <= EQUAL,
        {"name": name, "relative": relative},
        expected[0],
        describe_layout(layout),
    )


@contextmanager
def _errors_of_the_network(where: str, remedy: str = "") -> Iterator[None]:
    """Makes what a network's own code raises in the block a sentence that names its line.

    Raises:
        ConfigError: What failed is neither an operation of gridformer nor a message.
    """
    try:
        yield
    except Exception as error:
        every = traceback.walk_tb(error.__traceback__)
        frames = [one for one in every if _package(one) not in ("torch", __name__)]
        own = [one for one in frames if _package(one) != "gridformer"]
        if not own or frames[-1] != own[-1]:
            raise
        libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))
        own = [one for one in own if not one[0].f_code.co_filename.startswith(libraries)] or own
        (line,) = traceback.StackSummary.extract(iter(own[-1:]))
        place = f"{os.path.relpath(line.filename)}:{line.lineno}"
        raise ConfigError(f"{place} fails {where}: {line.line}: {error}{remedy}") from None


def _package(frame: tuple[FrameType, int]) -> str:
    name: str = frame[0].f_globals.get("__name__", "")
    return name if name == __name__ else name.partition(".")[0]


_Result = tuple[float, dict[str, Tensor | None], dict[str, Tensor]]


def _train(
    network: Any,
    step: Callable[[], float],
    optimizer: torch.optim.Optimizer,
    gradients: Callable[[], dict[str, Tensor | None]],
) -> _Result:
    """Returns the loss and the gradients of the first of some steps, and the weights after them."""
    first: tuple[float, dict[str, Tensor | None]] | None = None
    for _ in range(STEPS):
        loss = step()
        first = first or (loss, gradients())
        optimizer.step()
        network.zero_grad()
    assert first is not None
    return (*first, network.state_dict())


def _train_alone(network: nn.Module, inputs: Any, batch: Mapping[str, Tensor] | None) -> _Result:
    named = dict(network.named_parameters())

    def step() -> float:
        if batch is not None:
            loss = _loss_of_batch(network(batch["tokens"]), batch)
        else:
            loss = _loss(_run(network, inputs))
        loss.backward()
        return float(loss.detach())

    def gradients() -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in named.items()}

    return _train(network, step, torch.optim.AdamW(named.values(), lr=1e-3), gradients)


def _batch_of(network: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Returns tokens [b, s], and for the loss weights [b, s, v] of logits."""
    tokens: Tensor = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs[0]
    with torch.no_grad(), in_float64():
        size = logits_of(network(tokens[:1])).shape[1:]
    weights = torch.randn(size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return {"tokens": tokens, "weights": weights.expand(len(tokens), *size)}


def _loss_of_batch(out: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (logits_of(out) * batch["weights"]).sum(-1).mean()


def _run(network: Callable[..., Any], inputs: Any) -> Any:
    return network(**inputs) if isinstance(inputs, Mapping) else network(*inputs)


def _doubled(inputs: Any) -> Any:
    return map_tensors(lambda x: x.double() if x.is_floating_point() else x, inputs)


def _loss(out: Any) -> Tensor:
    """Returns the loss that a network returns, or a random linear function of its first result."""
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if not isinstance(out, Tensor):
        values = out.values() if isinstance(out, Mapping) else out
        out = next(value for value in values if isinstance(value, Tensor))
    if not out.dim():
        return out
    weights = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(2)).to(out)
    return (out * weights).sum() / len(out)


def _differences(expected: _Result, result: _Result) -> Iterator[tuple[str, float]]:
    yield "loss", abs(expected[0] - result[0]) / max(abs(expected[0]), 1e-300)
    grads = {name: grad.abs() for name, grad in expected[1].items() if grad is not None}
    noise = 1e-10 * max((float(grad.max()) for grad in grads.values()), default=0.0)
    kinds = ("gradient of ", expected[1], result[1]), ("", expected[2], result[2])
    for kind, ours, theirs in kinds:
        sizes = {
            name: float(x.abs().max()) for name, x in ours.items() if x is not None and _counts(x)
        }
        least = max(sizes.values(), default=0.0) / 1000
        for name, x in ours.items():
            y = theirs.get(name)
            if x is None or y is None or x.shape != y.shape:
                yield f"{kind}{name}", 0.0 if x is y else float("inf")
            elif name in sizes:
                apart = (x - y).abs()
                if not kind and name in grads:
                    # Adam makes whole steps of the rounding of gradients that are zero in theory.
                    apart[(grads[name] > 0) & (grads[name] < noise)] = 0.0
                off = float(apart.max()) / max(sizes[name], least, 1e-300)
                yield f"{kind}{name}", float("inf") if off != off else off


def _counts(x: Tensor) -> bool:
    return x.numel() > 0 and x.is_floating_point()
