"""`gridformer generate`: text from a trained model of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUNDIR", help="A run directory, or one of its checkpoints.")
    ],
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt",
            "-p",
            help="What to continue or translate; ___ marks a blank; - reads standard input.",
        ),
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
    beams: Annotated[
        int, typer.Option("--beams", help="t5, transformer: of beam search; 1 is greedy search.")
    ] = 4,
    length_penalty: Annotated[
        float,
        typer.Option("--length-penalty", help="t5, transformer: above 0 favours longer texts."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same text.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Talk to a trained model, on one process, whatever layout trained it.

    gpt2 continues the prompt; bert, and t5 trained on spans, fill in its blanks; transformer, and
    t5 trained on pairs, say the other text of the pair.

    Try: gridformer generate runs/demo --prompt "def read(self"
    """
    import sys

    import torch

    from gridformer.errors import ConfigError
    from gridformer.evaluate.decode import Search
    from gridformer.evaluate.generate import Sampling, answer, load_model

    sampling = Sampling(0.0 if greedy else temperature, top_k, top_p, seed)
    how = Search(1 if greedy else beams, length_penalty, max_tokens)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError([f"--device {device} is not to be had here: use --device cpu or auto"])
    if prompt == "-":
        prompt = sys.stdin.read()
    trained = load_model(run_dir, torch.device(device))
    for text in answer(trained, prompt, sampling, how):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
