"""Instructions of a thread for one score of attention, in what Triton makes of the kernels.

    python -m benchmarks.gpu.instructions          # no GPU is needed; Triton brings a disassembler

The kernels are compiled for architecture 9.0 (bfloat16, heads of 64 elements, causal, the first of
their tiles), with dropout and without. Counted are the instructions of the loop that most tiles run
through, which is the one of those with tensor-core products that has the fewest, and the powers of
two among them (MUFU.EX2).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

KERNELS = ("forward", "backward_queries", "backward_keys")
WIDTH = 64


def main() -> None:
    print("| kernel | dropout | instructions for a score | powers of two |\n|---|---|---|---|")
    for p in (0.1, 0.0):
        for name in KERNELS:
            code, scores = compiled(name, p)
            loop = min(products(code), key=len)
            powers = sum(one == "MUFU.EX2" for one in loop)
            print(f"| `{name}` | {p} | {len(loop) / scores:.1f} | {powers / scores:.1f} |")


def compiled(name: str, p: float) -> tuple[str, float]:
    """Return a kernel's machine code as text, and how many scores of a tile a thread has."""
    import triton
    from tests.models.kernels.test_compiled import ARGUMENTS, TYPES
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gridformer.models.kernels import flash, flash_backward
    from gridformer.models.kernels.attention import Settings

    kernel: Any = getattr(flash if name == "forward" else flash_backward, name)
    tiles = flash.tile_sizes(torch.empty(1, 1, 1, WIDTH, dtype=torch.bfloat16, device="meta"), name)
    tile = dict(tiles[0])
    options = {option: tile.pop(option) for option in ("num_warps", "num_stages")}
    constants = flash._constants(Settings(True, WIDTH**-0.5, 0, p), None, None, None, None) | tile
    names = kernel.arg_names
    types: dict[str, Any] = dict.fromkeys(names, TYPES[torch.bfloat16]) | ARGUMENTS
    types |= {one: ("i32",) * 3 for one in names if one.endswith("strides")}
    signature = {one: types.get(one, "i32") for one in names} | dict.fromkeys(
        constants, "constexpr"
    )
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}  # as Triton finds whole tensors to be
    for place, one in enumerate(names):
        if one in constants:
            continue
        parts = {"sizes": (2, 3, 4)}.get(one, range(3) if one.endswith("strides") else ())
        pointer = isinstance(types[one], str) and types[one].startswith("*")
        for where in [(place,)] * pointer + [(place, part) for part in parts]:
            aligned[where] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return text.stdout, tile["R"] * tile["C"] / (32 * options["num_warps"])


def products(code: str) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop with products on tensor cores."""
    lines, labels, loops = code.splitlines(), {}, []
    for place, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x?_?\d+):", line):
            labels[label[1]] = place
        back = re.search(r"BRA\S*\s.*`\((\.L_x?_?\d+)\)", line)
        if back and back[1] in labels:
            loops.append((labels[back[1]], place))
    for first, last in loops:
        if any(first <= a and b <= last for a, b in loops if (a, b) != (first, last)):
            continue
        found = (
            re.search(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P[\dT]+\s+)?([A-Z][A-Z0-9_.]*)", line)
            for line in lines[first : last + 1]
        )
        loop = [one[1] for one in found if one]
        if any("MMA" in one for one in loop):
            yield loop


if __name__ == "__main__":
    main()
