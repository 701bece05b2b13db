"""Networks that a function of the user returns, which a run file names: `package.module:function`.

The function is imported as Python imports everything: from the current directory or installed
packages. What lies in the folder of a run is never imported, and functions get no arguments, so
that the folders of others can name nothing but what is here, and do nothing with it.
"""

from __future__ import annotations

import bisect
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
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


def make(name: str) -> Made:
    """Calls a function by its name.

    Raises:
        UserError: There is no such function, or it fails, or it returns no network.
    """
    from torch import nn

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

    try:
        with torch.device("meta"):
            made = make(name)
    except UserError:
        made = make(name)
    return made._replace(module=made.module.to("meta"))


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
