"""Triton compiles the kernels for GPUs, which it can do without one, and their tiles fit into them.

The interpreter accepts what the compiler refuses, for example numbers of another type.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.models.kernels.attention import MAX_HEAD_BYTES
from gridformer.models.kernels.library import threshold
from tests.support.fake_gpu import own_process
from tests.support.kernels import NO_TRITON
from tests.support.marks import full_unless

InProcess = Callable[..., Any]
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes of a block, by architecture
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# The types of arguments that are not tensors of the computation's type.
ARGUMENTS: dict[str, Any] = {
    "sizes": ("i32",) * 6,
    **dict.fromkeys(("first_head", "first_query"), "i32"),
    "counter": "*i64",
    "valid": "*u8",
    **dict.fromkeys(("documents", "key_documents", "key_hashes", "hashes"), "*i32"),
    **dict.fromkeys(("bias", "grad_bias", "lse", "delta"), "*fp32"),
}
ATTENTION = ("forward", "backward_queries", "backward_keys", "backward_bias")
CASES = [
    (name, dtype, head_dim, architecture)
    for name in ATTENTION
    for dtype in (torch.bfloat16, torch.float32)
    for head_dim in (64, 128, 256)
    for architecture in SHARED_MEMORY
    if head_dim * dtype.itemsize <= MAX_HEAD_BYTES
    if head_dim == 64 or architecture == 89  # the others have more shared memory
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    pytest.importorskip("triton", reason=NO_TRITON)
    with own_process() as call:
        call(_cache_in, tmp_path_factory.mktemp("triton"))
        yield call


def _cache_in(folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder)


@pytest.mark.parametrize("dtype", full_unless(lambda dtype: dtype == torch.bfloat16, TYPES))
def test_dropout_compiles(compiler: InProcess, dtype: torch.dtype) -> None:
    assert compiler(compile_dropout, dtype, 90) == 0


def compile_dropout(dtype: torch.dtype, architecture: int) -> int:
    from gridformer.models.kernels import masking

    constants = {"THRESHOLD": threshold(0.1), "SCALE": 1 / 0.9, "ROWS": 2, "COLUMNS": 1024}
    pointers = {"x": TYPES[dtype], "out": TYPES[dtype], "counter": "*i64"}
    return shared_memory(masking._masked, pointers, constants, architecture, {"num_warps": 4})


@pytest.mark.parametrize("dtype", full_unless(lambda dtype: dtype == torch.bfloat16, TYPES))
@pytest.mark.parametrize("name", ["_terms", "_gradient"])
def test_the_loss_compiles(compiler: InProcess, name: str, dtype: torch.dtype) -> None:
    assert compiler(compile_loss, name, dtype, 90) < SHARED_MEMORY[90]


def compile_loss(name: str, dtype: torch.dtype, architecture: int) -> int:
    from gridformer.models.kernels import softmax

    numbers = dict.fromkeys(("share", "spread"), "fp32") | {"targets": "*i64"}
    sizes = ("n_tokens", "n_columns", "stride", "first", "n_words")
    arguments = {"logits": TYPES[dtype], **dict.fromkeys(sizes, "i32"), **numbers}
    arguments |= dict.fromkeys(("out", "norms", "factors"), "*fp32")
    kernel = getattr(softmax, name)
    mine = {key: arguments[key] for key in kernel.arg_names if key in arguments}
    return shared_memory(kernel, mine, {"COLUMNS": 4096}, architecture, {"num_warps": 8})


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "architecture"),
    full_unless(lambda case: case[1:] == (torch.bfloat16, 64, 80), CASES, unpack=True),
)
def test_attention_compiles(
    compiler: InProcess, name: str, dtype: torch.dtype, head_dim: int, architecture: int
) -> None:
    """With all that it can do: dropout, padding, a bias, causality, a window, documents."""
    used = compiler(compile_attention, name, dtype, head_dim, architecture)
    assert 0 < used <= SHARED_MEMORY[architecture]


def test_the_fastest_tiles_are_used(compiler: InProcess) -> None:
    """Those of a run that must not depend on measured times are always the first ones."""
    chosen, again, fixed, measurements = compiler(choose_tiles)
    assert (chosen, again, fixed) == (2, 2, 0)
    assert measurements == 1, "they are measured once, however a kernel is called"


def choose_tiles() -> tuple[int, int, int, int]:
    from types import SimpleNamespace

    from gridformer.models.kernels import flash

    counts = []

    def times(runs: Any, device: Any) -> dict[int, float]:
        counts.append(len(runs))
        return {1: 2.0, 2: 1.0, 3: 1.5}  # the first one did not run

    q: Any = SimpleNamespace(
        shape=(2, 3, 100, 64),
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        element_size=lambda: 2,
    )
    tiles = flash.tile_sizes(q, "forward")

    def choice() -> int:
        return tiles.index(flash.fastest_tiles("forward", q, 100, (1.0,), lambda tiles: None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "measured", times)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        first = choice()
        q.shape = 2, 3, 90, 64  # about the same work
        again = choice()
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        return first, again, choice(), len(counts)


def compile_attention(name: str, dtype: torch.dtype, head_dim: int, architecture: int) -> int:
    from gridformer.models.kernels import flash, flash_backward
    from gridformer.models.kernels.attention import Settings

    kernel = getattr(flash if name == "forward" else flash_backward, name)
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype, device="meta")
    tiles = flash.tile_sizes(q, name)[0]
    options = {option: tiles.pop(option) for option in ("num_warps", "num_stages")}
    one, settings = torch.ones(1), Settings(True, head_dim**-0.5, 0, 0.1, 100)
    constants = flash._constants(settings, one, one, one, None) | tiles
    types = dict.fromkeys(kernel.arg_names, TYPES[dtype]) | ARGUMENTS
    types |= {name: ("i32",) * 3 for name in types if name.endswith("strides")}
    types = {name: types[name] for name in kernel.arg_names}
    return shared_memory(kernel, types, constants, architecture, options)


def shared_memory(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    architecture: int,
    options: dict[str, int],
) -> int:
    """Compile a kernel to machine code and return the shared memory that it needs, in bytes.

    Args:
        types: The types of arguments as Triton names them; other arguments are integers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(kernel.arg_names, "i32") | types
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.asm["cubin"]
    used: int = compiled.metadata.shared
    return used
