"""torch.compile, block by block: checking what it needs on this machine, and applying it.

Blocks and the loss are compiled in place, so that names of parameters, and therefore checkpoints,
stay the same; one compilation serves all blocks. Modules that communicate run uncompiled between
compiled regions: torch.compile cannot trace messages that are started early and waited for late.
The messages of norms are operators.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gridformer import parallel
from gridformer.comm.agree import first_text
from gridformer.config import RunConfig
from gridformer.mesh import Axis
from gridformer.mesh.gpus import gpus_here
from gridformer.mesh.launch_env import rank_env
from gridformer.models import Model
from gridformer.models.blocks import (
    CrossEntropy,
    DropoutSite,
    Layer,
    Linear,
    MergedLinear,
    MixtureOfExperts,
    as_operator,
    copy_of,
    scores,
)
from gridformer.models.kernels import library
from gridformer.parallel.tensor.branched import Elsewhere
from gridformer.parallel.tensor.norm import GridNorm
from gridformer.parallel.tensor.partitioned_activations import PartitionedFromFirst
from gridformer.parallel.tensor.sequence import GatheringRows

_in_parts, _over_rows = scores.attention_in_parts, GatheringRows.attend
_left_out: set[type[nn.Module]] = set()  # whose forward passes are excluded


# Weight passes read memory of an earlier backward pass, so compiled code may not write there again.
_NOTHING_REUSED = {"allow_buffer_reuse": False, "inplace_buffers": False}


def compile_model(model: Model, backend: str = "inductor", splits: bool = False) -> None:
    """Compiles a model's blocks and loss in place, each when it is first called.

    Shapes are treated as static; another micro-batch size or sequence length recompiles, and so
    does evaluation, which saves nothing for a backward pass. Dropout reads what its masks depend on
    from a tensor, its counter, because compiled code would treat numbers as constants. In bfloat16
    and float16 the products of blocks are operators, which read the copies of a step; with `splits`
    they are, too, and leave gradients of weights to weight passes. Where the
    common layers of D&SP-cSub are on another rank, nothing is compiled.

    Args:
        model: This rank's model on any layout.
        backend: The backend of torch.compile; `aot_eager` needs no C++ compiler and is not faster.
        splits: Whether backward passes are split (gridformer.models.blocks.late_gradient).
    """
    from torch import compile
    from torch.compiler import disable

    if isinstance(model.recompute.partition, PartitionedFromFirst):
        # What compiled code saves behind the last product of a block, such as the counter of a
        # dropout, decides how far it is recomputed. All ranks then recompute whole blocks.
        model.recompute.stops_early = False
    parts = compiled_parts(model)
    for module in (module for part in parts for module in part.modules()):
        if is_left_out(module):
            _leave_out_all(type(module))
        if isinstance(module, Linear | MergedLinear) and (
            splits or copy_of(next(module.parameters()))
        ):
            as_operator(module)
    if scores.attention_in_parts is _in_parts:  # whose parts would each be compiled
        scores.attention_in_parts = disable(_in_parts)
        GatheringRows.attend = disable(_over_rows)  # type: ignore[method-assign] # it communicates
    options: Any = _NOTHING_REUSED if splits and backend == "inductor" else None
    for part in parts:
        compiled = compile(part.forward, backend=backend, dynamic=False, options=options)
        part.forward = _with_counters(part, compiled)


def compiled_parts(model: Model) -> list[nn.Module]:
    """Returns the modules that `compile_model` compiles, each with all but what is left out."""
    if any(isinstance(module, Elsewhere) for module in model.modules()):
        # The first sub-grid has the common layers, which stand here as meta tensors: the compiler
        # cannot keep those for the backward pass.
        return []
    kinds: tuple[type[nn.Module], ...] = Layer, CrossEntropy
    dtype = model.compute_dtype or torch.float32
    for parameter in model.parameters():  # compiled code then only reads the answer
        if library.available(parameter.device, dtype) and model.fused:
            kinds = (Layer,)  # the loss consists of kernels already
        break
    return [module for module in model.modules() if isinstance(module, kinds)]


def is_left_out(module: nn.Module) -> bool:
    """Whether a module inside a compiled one, and all inside it, runs uncompiled.

    It communicates, or its rows depend on the data. The messages of norms are operators.
    """
    ours = type(module).__module__.startswith(parallel.__name__ + ".")
    return (ours and not isinstance(module, GridNorm)) or isinstance(module, MixtureOfExperts)


def compile_problems(run: RunConfig) -> list[str]:
    """Returns why this machine cannot compile a run, each reason with its remedy.

    The result is empty unless `train.compile` is true.
    """
    if run.train.compile is not True:
        return []
    return toolchain_problems(device_of(run))


def device_of(run: RunConfig) -> str:
    """Returns the type of device that a run will use, as `init_process_groups` decides it."""
    if run.train.device != "auto":
        return run.train.device
    return "cuda" if gpus_here(rank_env(), run.layout.n_processes) else "cpu"


def why_uncompiled(run: RunConfig, device_type: str) -> str:
    """Returns why a run is not compiled on a type of device that has the tools; empty if it is."""
    train, model = run.train, run.model
    if train.compile != "auto":
        return "" if train.compile else "train.compile is false"
    reasons = {
        "CPUs gain little": device_type == "cpu",
        "recompute=except_attention keeps what compiled blocks do not": train.recompute
        == "except_attention",
        "deterministic=true has been shown for uncompiled blocks only": train.deterministic,
        "the rows of a mixture of experts depend on the data": model.n_experts > 0,
        "they are another library's": model.family == "network",
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def agreed_uncompiled(run: RunConfig, device_type: str, world: Axis) -> str:
    """Returns what `why_uncompiled` does, or the first tool that a rank lacks.

    All ranks must call this together.
    """
    why = why_uncompiled(run, device_type)
    if why or run.train.compile != "auto":
        return why
    missing = _missing_tools(device_type)
    return first_text(f"it needs {missing[0]}" if missing else "", world)


def toolchain_problems(device_type: str) -> list[str]:
    """Returns a problem for each tool that torch.compile needs on `cpu` or `cuda` and lacks."""
    off = "or use train.compile=false"
    return [f"train.compile=true needs {problem}, {off}" for problem in _missing_tools(device_type)]


def _missing_tools(device_type: str) -> list[str]:
    """Returns each tool that torch.compile needs and lacks, with how to get it."""
    problems = []
    if device_type == "cpu":  # torch.compile generates C++ and builds it with $CXX
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            problems.append(
                f"a C++ compiler on the CPU, and {compiler} was not found: install one (Debian, "
                "Ubuntu: apt install g++), set CXX to one"
            )
    else:
        if find_spec("triton") is None:
            problems.append(
                "the package triton on a GPU, and it is not installed: pip install triton (CUDA "
                "builds of torch for Linux include it)"
            )
        named = os.environ.get("CC")  # Triton builds its launchers with it
        if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
            problems.append(
                f"a C compiler for Triton, and {named or 'gcc or clang'} was not found: install "
                "one (Debian, Ubuntu: apt install gcc), set CC to one"
            )
    # Compiled code is loaded as Python modules. This is where torch and Triton look for headers.
    scheme = "nt" if os.name == "nt" else "posix_prefix"
    if not (Path(sysconfig.get_path("include", scheme)) / "Python.h").exists():
        problems.append(
            "Python's C headers, and Python.h is missing: install them (Debian, Ubuntu: apt "
            "install python3-dev)"
        )
    return problems


def _with_counters(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward pass, also recomputed, that first takes the counters of its dropout."""
    sites = [
        module for module in part.modules() if isinstance(module, DropoutSite) and module.p > 0.0
    ]
    if not sites:
        return forward

    def with_counters(*args: Any, **kwargs: Any) -> Any:
        if part.training:
            for site in sites:
                site.hold()
        return forward(*args, **kwargs)

    return with_counters


def _leave_out_all(kind: type[nn.Module]) -> None:
    """Excludes the forward passes of all modules of a class from compilation.

    It changes the class, because compiled code checks that a module's functions are still the same
    objects. With one object for each module, every block would be compiled again.
    """
    from torch.compiler import disable

    if kind not in _left_out:
        kind.forward = disable(kind.forward)
        _left_out.add(kind)
