"""Networks that a function of the user returns, which a run file names: `package.module:function`.

The function is imported as Python imports everything: from the current directory or installed
packages. What lies in the folder of a run is never imported, and functions get no arguments, so
that the folders of others can name nothing but what is here, and do nothing with it.
"""

from __future__ import annotations

import bisect
import copy
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gridformer.config.base import closest
from gridformer.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

_LONGEST = 1024  # the length up to which it is tried how long sequences may be


class Made(NamedTuple):
    """What a function returns: a network, and if it has them, inputs of it and its plan."""

    module: nn.Module
    inputs: Any = None
    plan: Mapping[str, str] | None = None


given: dict[str, Made] = {}


def give(module: nn.Module, plan: Mapping[str, str] | None) -> str:
    """Returns a name of a network in memory, by which it is found as those of functions are."""
    name = f"{type(module).__module__}:{type(module).__qualname__}"
    name += f" {len(given)}" if name in given else ""
    given[name] = Made(module, None, plan)
    return name


def make(name: str) -> Made:
    """Calls a function by its name.

    Raises:
        UserError: There is no such function, or it fails, or it returns no network.
    """
    from torch import nn

    if name in given:
        return given[name]
    function = _function(name)
    try:
        made = function()
    except Exception as error:
        raise UserError(f"{name}: {type(error).__name__}: {error}") from error
    made = Made(*made[:3]) if isinstance(made, tuple) and made else Made(made)
    if not isinstance(made.module, nn.Module):
        kind = type(made.module).__name__
        raise UserError(f"{name}: returns a {kind}, not a torch.nn.Module")
    return made


def _function(name: str) -> Any:
    place, colon, function = name.partition(":")
    if not (place and colon and function):
        raise UserError(f"{name}: is not package.module:function")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    top = place.partition(".")[0]
    try:
        spec = None if top in sys.modules else importlib.util.find_spec(top)
        for file in [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else ():
            if run := next((folder for folder in Path(file).parents if _is_run(folder)), None):
                raise UserError(f"{name}: is in {run}, a run, from which no code is imported")
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{place}.".startswith(f"{missing}."):
            raise UserError(f"{name}: {error}") from error
        above, _, last = missing.rpartition(".")
        paths = getattr(sys.modules[above], "__path__", []) if above else [here]
        known = [file.stem for path in paths for file in Path(path).iterdir()]
        meant = difflib.get_close_matches(last, known, 1)
        more = f": did you mean '{'.'.join(filter(None, (above, *meant)))}'?" if meant else ""
        raise UserError(f"{name}: there is no module {missing}{more}") from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{name}: {place} raises {type(error).__name__}: {error}") from error
    found = vars(module).get(function)
    if not callable(found):
        ours = {n: x for n, x in vars(module).items() if getattr(x, "__module__", "") == place}
        known = [n for n, x in ours.items() if callable(x) and not n.startswith("_")]
        raise UserError(f"{name}: {place} has no function {function}{closest(function, known)}")
    return found


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run, or a checkpoint of one."""
    run = (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file()
    return run or (folder / "checkpoint.json").is_file()


@lru_cache(maxsize=8)
def on_meta(name: str) -> Made:
    """Returns what a function makes, with the network on the meta device; do not change it.

    If its code needs numbers there, such as those of its inputs, it is made in memory first.
    """
    import torch

    if name in given:
        return given[name]._replace(module=copied(given[name].module))
    try:
        with torch.device("meta"):
            made = make(name)
    except UserError:
        made = make(name)
    return made._replace(module=made.module.to("meta"))


def copied(network: nn.Module) -> nn.Module:
    """Returns a copy of a network on the meta device, also while a step is recorded."""
    import torch
    from torch import nn

    new = dict[int, Any]()
    for x in (*network.parameters(), *network.buffers()):
        empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
        is_parameter = isinstance(x, nn.Parameter)
        new[id(x)] = nn.Parameter(empty, x.requires_grad) if is_parameter else empty
    return copy.deepcopy(network, new)


def path_of_layers(module: nn.Module) -> str:
    """Returns the name of the list of a network's layers, which is the longest one in no other."""
    from torch import nn

    kinds = nn.ModuleList
    lists = {n: len(m) for n, m in module.named_modules() if isinstance(m, kinds) and len(m)}
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    return max(outer, key=lambda name: lists[name], default="")


def logits_of(out: Any) -> Tensor:
    """Returns the logits in what a network returns: itself, its `logits`, or the first of several.

    Raises:
        TypeError: It is none of these.
    """
    from torch import Tensor

    out = out[0] if isinstance(out, tuple) and out else getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise TypeError(f"returns a {type(out).__name__}, not logits")
    return out


@lru_cache(maxsize=64)
def probed(name: str, length: int) -> tuple[int, int, str]:
    """Runs a network of tokens [1, length] on the meta device.

    Returns:
        The last dimensions of its result, and of its first layer's; the name of the module that
        returns the result, or an empty one if the network's own code does.

    Raises:
        UserError: It cannot be run so, or does not return logits.
    """
    import torch

    module, results = on_meta(name).module, dict[str, Any]()
    if not (path := path_of_layers(module)):
        raise UserError(f"{name}: the network has no torch.nn.ModuleList of layers")
    names = {part: n for n, part in module.named_modules() if n}

    def after(part: nn.Module, _: Any, out: Any) -> None:
        results[names[part]] = out

    hooks = [part.register_forward_hook(after) for part in names]
    try:
        with torch.no_grad(), torch.device("meta"):
            out = logits_of(module(torch.zeros(1, length, dtype=torch.int64)))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{name}: does not map tokens [1, {length}] to logits ({said})") from error
    finally:
        for hook in hooks:
            hook.remove()
    first = results.get(f"{path}.0")
    if out.dim() != 3 or tuple(out.shape[:2]) != (1, length):
        shape = [*out.shape]
        raise UserError(f"{name}: makes {shape} of tokens [1, {length}], not logits of each")
    head = next((part for part, result in results.items() if result is out), "")
    return out.shape[-1], 0 if first is None else logits_of(first).shape[-1], head


class Chain(NamedTuple):
    """The modules of a network with parameters of their own, by where they are read.

    Attributes:
        before: Read for what enters the first layer.
        behind: Read for what is made of the last layer's result.
        problem: Why the network cannot be cut between its layers, if it cannot.
    """

    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    problem: str = ""


@lru_cache(maxsize=8)
def chain_of(name: str) -> Chain:
    """Returns what a network of tokens reads outside its layers, on the meta device.

    Gradients tell it: those of the first layer's input, of each layer's result, and of the logits,
    where every layer's input and result is the leaf of a graph of its own.
    """
    import torch
    from torch import Tensor

    module = on_meta(name).module
    path = path_of_layers(module)
    layers = dict(module.get_submodule(path).named_children())
    values = {n: p.detach() for n, p in module.named_parameters() if p.is_floating_point()}
    values = {n: value.requires_grad_() for n, value in values.items()}
    entering, results, leaves = list[Tensor](), dict[str, Tensor](), list[Tensor]()

    def enter(layer: nn.Module, args: Any) -> Any:
        if not args or (leaves and args[0] is not leaves[-1]) or [layer] != waiting[:1]:
            raise ValueError("a layer does not get the result of the one before it first")
        del waiting[0]
        entering.append(args[0])
        return args[0].detach().requires_grad_(), *args[1:]

    def leave(layer: nn.Module, _: Any, out: Any) -> Tensor:
        if not isinstance(out, Tensor):
            raise ValueError(f"a layer returns a {type(out).__name__}, not a tensor")
        results[next(n for n, one in layers.items() if one is layer)] = out
        leaves.append(out.detach().requires_grad_())
        return leaves[-1]

    waiting = [*layers.values()]
    hooks = [one.register_forward_pre_hook(enter) for one in waiting]
    hooks += [one.register_forward_hook(leave) for one in waiting]
    try:
        with torch.enable_grad(), torch.device("meta"):
            tokens = torch.zeros(1, 2, dtype=torch.int64)
            logits = logits_of(torch.func.functional_call(module, values, (tokens,)))
    except Exception as error:
        return Chain(problem=str(error))
    finally:
        for hook in hooks:
            hook.remove()

    def read(x: Tensor, over: Iterable[Tensor]) -> list[bool]:
        """Whether x has a gradient with respect to each of some tensors."""
        grads = torch.autograd.grad(x.sum(), [*over], retain_graph=True, allow_unused=True)
        return [grad is not None for grad in grads]

    def reads(x: Tensor) -> set[str]:
        if not x.requires_grad:
            return set()
        found = {n for n, there in zip(values, read(x, values.values())) if there}
        same = {id(p) for n, p in module.named_parameters() if n in found}
        return {n for n, p in module.named_parameters(remove_duplicate=False) if id(p) in same}

    before, behind = reads(entering[0]), reads(logits)
    for n, result in results.items():
        if any(not other.startswith(f"{path}.{n}.") for other in reads(result)):
            return Chain(problem=f"layer {n} reads what is computed outside it")
    if any(read(logits, leaves[:-1])):
        return Chain(problem="what is behind the layers reads several of them")
    outside = {n.rpartition(".")[0]: (n in before, n in behind) for n in (*before, *behind)}
    for n, where in outside.items():
        if not n or n.startswith(f"{path}."):
            return Chain(problem=f"{n or 'the network'} has parameters that are read outside it")
        if any(n.startswith(f"{other}.") and where != outside[other] for other in outside):
            return Chain(problem=f"{n} is read in another place than the module around it")
    first, last = ([n for n, where in outside.items() if where[i]] for i in (0, 1))
    return Chain(tuple(sorted(first)), tuple(sorted(last)))


def sizes_of(name: str, plan: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of `model` for a network of tokens, as far as it tells them.

    Raises:
        UserError: There is no such network.
    """
    from torch import nn

    module = on_meta(name).module
    path, (words, width, _) = path_of_layers(module), probed(name, 2)
    sizes = {"n_layers": len(module.get_submodule(path)._modules)}
    sizes |= {"hidden_size": width, "vocab_size": words}
    for n, part in module.named_modules():
        for pattern, role in plan.items():
            if not n.startswith(f"{path}.0.") or not fnmatchcase(n, str(pattern)):
                continue
            kind, _, text = str(role).partition(":")
            if kind == "heads":
                sizes.setdefault("n_heads", getattr(part, text.split(",")[0].strip(), 0))
            elif kind.startswith("closing") and isinstance(part, nn.Linear):
                sizes["ffn_size"] = max(sizes.get("ffn_size", 0), part.in_features)
    sizes = {key: size for key, size in sizes.items() if isinstance(size, int) and size}
    names = [n for n, _ in module.named_parameters(remove_duplicate=False)]

    def fails(length: int) -> bool:
        try:
            probed(name, length)
        except UserError:
            return True
        return False

    longest = 1 + bisect.bisect_left(range(2, _LONGEST + 1), True, key=fails)
    tied = len(names) > len([*module.parameters()])
    return {**sizes, "max_seq_len": longest, "tied_head": tied}
