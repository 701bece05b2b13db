"""`gridformer generate`: text from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUNDIR", help="A run directory, or one of its checkpoints.")
    ],
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to continue; - reads standard input.")
    ] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Where to stop.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Below 1 safer, above 1 wilder.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the k likeliest words; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Only the likeliest words of that total probability.")
    ] = 1.0,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest word; same as -t 0.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same text.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Continue a prompt with a trained model, on one process, whatever layout trained it.

    Try: gridformer generate runs/demo --prompt "def read(self"
    """
    import sys

    import torch

    from gridformer.errors import ConfigError
    from gridformer.evaluate.generate import Sampling, load_model, stream

    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError([f"--device {device} is not to be had here: use --device cpu or auto"])
    if prompt == "-":
        prompt = sys.stdin.read()
    model, tokenizer = load_model(run_dir, torch.device(device))
    sys.stdout.write(prompt)
    for text in stream(model, tokenizer, prompt, max_tokens, sampling):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
