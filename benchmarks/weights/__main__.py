"""Weights in and out: the peak memory of import and export beside the size of a model.

    python -m benchmarks.weights                # 3.9 GB: takes 12 GB of disk, a few minutes
    python -m benchmarks.weights --layers 32    # the shape of Llama 3.1 8B

It writes a folder of Hugging Face with random weights, imports it, exports it again and compares
the files. Each command runs in a process of its own, whose peak is what the system reports for it:
all memory, with the libraries and with what it has read of mapped files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.common.machine import describe_machine
from gridformer.checkpoint.convert.exporting import write_weight_files
from gridformer.checkpoint.convert.importing import write_json
from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.checkpoint.whole import shapes_of
from gridformer.config import ModelConfig
from gridformer.utils.units import GIB, format_bytes

DTYPE = torch.bfloat16


def main(
    layers: Annotated[int, typer.Option(help="Layers of 0.41 GiB each.")] = 4,
    small: Annotated[bool, typer.Option(help="A tiny model, to try the script.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; the default is the system's.")
    ] = None,
) -> None:
    model = ModelConfig(
        family="llama",
        n_layers=layers,
        hidden_size=64 if small else 4096,
        n_heads=32,
        n_kv_heads=8,
        ffn_size=96 if small else 14336,
        vocab_size=256 if small else 128256,
        max_seq_len=8192,
        tied_head=False,
    )
    about = describe_machine("benchmarks.weights")
    print("; ".join(f"{key} {value}" for key, value in about.items() if value))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        theirs, run, back = (Path(name) / part for part in ("theirs", "run", "back"))
        largest, total = synthesize(model, theirs)
        print(f"{format_bytes(total)} of weights, the largest tensor {format_bytes(largest)}")
        for command, source, out in (("import", theirs, run), ("export", run, back)):
            seconds, peak = measured([command, str(source), "--out", str(out)])
            over = peak - largest
            print(
                f"{command}: peak {format_bytes(peak)}, {format_bytes(over)} more than the largest "
                f"tensor; {seconds:.0f} s of processor time"
            )
            if over > GIB:
                raise SystemExit(f"{command} takes more than 1 GiB above the largest tensor")
        for path in sorted(theirs.glob("*.safetensors")):
            subprocess.run(["cmp", path, back / path.name], check=True)
        print("the exported files equal the imported ones byte for byte")


def synthesize(model: ModelConfig, folder: Path) -> tuple[int, int]:
    """Write a folder with random weights; return the bytes of its largest tensor and of all."""
    kind, shapes = KINDS["llama"], shapes_of(model)
    streamed = {}
    for entry in kind.entries(model):
        shape = entry.form.shape_of_theirs(shapes[entry.ours])
        streamed[entry.theirs[0]] = Streamed(shape, DTYPE, partial(random_tensor, shape))
    folder.mkdir()
    write_weight_files(streamed, folder, 5 * GIB)
    config = kind.write_config(model)
    assert isinstance(config, dict)
    write_json(folder / "config.json", {"model_type": "llama", **config})
    sizes = [tensor.n_bytes for tensor in streamed.values()]
    return max(sizes), sum(sizes)


def random_tensor(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=generator)
    return bits.view(DTYPE)


def measured(arguments: list[str]) -> tuple[float, int]:
    """Run gridformer in a process; return its processor time in s and its peak in bytes."""
    child = subprocess.Popen([sys.executable, "-m", "gridformer", *arguments], stdout=sys.stderr)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"gridformer {' '.join(arguments)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


if __name__ == "__main__":
    typer.run(main)
