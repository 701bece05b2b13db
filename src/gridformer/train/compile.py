"""torch.compile, block by block: where it may be used, what it needs, and switching it on.

What is compiled is a transformer block, the head and the loss, each in place: names of modules and
parameters stay, so checkpoints do too. All blocks are the same code on the same shapes, so one
compilation serves all of them, and what it costs does not grow with the depth of the model.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from gridformer.config import RunConfig
from gridformer.mesh.launch_env import joined
from gridformer.models import Model
from gridformer.models.blocks import (
    Attention,
    CrossAttention,
    CrossEntropy,
    Dropout,
    Layer,
    TiedHead,
)

_OFF = "use train.compile=false"


def compile_model(model: Model, backend: str = "inductor") -> None:
    """Compile a model's blocks, head and loss in place; they are compiled when first called.

    Shapes are taken as fixed, as they are in training: another micro-batch or sequence length
    compiles anew, and so does evaluation, which keeps nothing for a backward pass.

    Dropout stays outside the compiled code: its mask is a function of the step and of the
    micro-batch, Python numbers that compiled code would take for constants and be compiled anew
    for. A block is then several compiled pieces with a mask between them; masks are the same bits.

    Args:
        model: whose blocks hold no communication; see `compile_problems`.
        backend: of torch.compile; `aot_eager` needs no C++ compiler and gains no speed.
    """
    kinds = (Layer, TiedHead, CrossEntropy)
    parts = [module for module in model.modules() if isinstance(module, kinds)]
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, Dropout) and module.p > 0.0:
            _leave_out(module, "forward")
        if isinstance(module, Attention | CrossAttention) and module.dropout > 0.0:
            _leave_out(module, "_unfused")
    for part in parts:
        part.compile(backend=backend, dynamic=False)


def compile_problems(run: RunConfig) -> list[str]:
    """Why this machine cannot compile, one sentence each with its remedy; none when it is off.

    Which layouts cannot be compiled `gridformer.parallel.validation.check` says.
    """
    if not run.train.compile:
        return []
    return toolchain_problems("cuda" if _takes_cuda(run) else "cpu")


def toolchain_problems(device_type: str) -> list[str]:
    """What torch.compile needs on this machine and does not find, for `cpu` or `cuda`."""
    return (_problems_on_cuda() if device_type == "cuda" else _problems_on_cpu()) + _no_headers()


def _leave_out(module: Dropout | Attention | CrossAttention, method: str) -> None:
    """Have one module's method run as it is, between the compiled pieces before and after it."""
    from torch.compiler import disable

    setattr(module, method, disable(getattr(module, method)))


def _takes_cuda(run: RunConfig) -> bool:
    """Whether the run will be on GPUs, as `gridformer.launch.init_world` will choose."""
    import torch

    if run.train.device != "auto":
        return run.train.device == "cuda"
    place = joined()
    n_local = place.local_size if place else run.layout.n_processes
    return torch.cuda.is_available() and n_local <= torch.cuda.device_count()


def _problems_on_cpu() -> list[str]:
    """torch.compile writes C++ for the CPU and compiles it with $CXX, or g++."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is not None:
        return []
    return [
        f"train.compile=true needs a C++ compiler on the CPU, and there is no {compiler}: "
        f"install one (Debian, Ubuntu: apt install g++), name one in CXX, or {_OFF}"
    ]


def _problems_on_cuda() -> list[str]:
    """torch.compile writes Triton for GPUs, which builds its launchers with $CC, gcc or clang."""
    problems = []
    if find_spec("triton") is None:
        problems.append(
            "train.compile=true needs the package triton on a GPU, and there is none: pip install "
            f"triton (CUDA builds of torch for Linux bring it), or {_OFF}"
        )
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang"])):
        problems.append(
            f"train.compile=true needs a C compiler for Triton, and there is no "
            f"{named or 'gcc or clang'}: install one (Debian, Ubuntu: apt install gcc), name one "
            f"in CC, or {_OFF}"
        )
    return problems


def _no_headers() -> list[str]:
    """Compiled code is loaded as Python modules, which takes Python's own C headers."""
    scheme = "nt" if os.name == "nt" else "posix_prefix"  # where torch and Triton look
    if (Path(sysconfig.get_path("include", scheme)) / "Python.h").exists():
        return []
    return [
        "train.compile=true needs Python's C headers, and Python.h is missing: install them "
        f"(Debian, Ubuntu: apt install python3-dev), or {_OFF}"
    ]
