"""`gridformer generate`: text from a trained model of any family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
        float | None,
        typer.Option(
            "--temperature", "-t", help="gpt2: below 1 safer, above 1 wilder. Without it 0.8."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="gpt2: only the k likeliest words; 0: all.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="gpt2: only the likeliest words of that total probability."),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest word: -t 0, or --beams 1.")
    ] = False,
    beams: Annotated[
        int | None,
        typer.Option(
            "--beams",
            help="t5, transformer: of beam search; 1 is greedy search. Without it 4.",
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            "--length-penalty",
            help="t5, transformer: above 0 favors longer texts. Without it 1.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="gpt2: same seed, same text. Without it 0.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Talk to a trained model, on one process, whatever layout trained it.

    gpt2 continues the prompt; bert, and t5 trained on spans, fill in its blanks; transformer, and
    t5 trained on pairs, say the other text of the pair.

    Try: gridformer generate runs/demo --prompt "def read(self"
    """
    import sys

    import torch

    from gridformer.evaluate.decode import Search
    from gridformer.evaluate.generate import Sampling, answer, check_options, load_model
    from gridformer.utils.errors import ConfigError

    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampled: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    asked = {"beams": beams, "length_penalty": length_penalty}
    searched: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    given = [*sampled, *searched]
    if greedy:
        sampled["temperature"], searched["beams"] = 0.0, 1
    sampling, how = Sampling(**sampled), Search(**searched, max_tokens=max_tokens)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError([f"--device {device} is not to be had here: use --device cpu or auto"])
    if prompt == "-":
        prompt = sys.stdin.read()
    trained = load_model(run_dir, torch.device(device))
    check_options(trained.run.model, given)
    for text in answer(trained, prompt, sampling, how):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
