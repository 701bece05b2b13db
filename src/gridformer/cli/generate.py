"""`gridformer generate`: generates text with a trained model of any family."""

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
            help="The text to continue, translate or fill in, where ___ marks a blank. - reads it "
            "from standard input.",
        ),
    ] = "",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The largest number of tokens to generate.")
    ] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            "-t",
            help="For gpt2: values below 1 make the text more predictable, values above 1 more "
            "varied. The default is 0.8.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", help="For gpt2: sample from the k most likely tokens; 0 means all."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="For gpt2: sample from the most likely tokens that have this total probability.",
        ),
    ] = None,
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Always choose the most likely token: -t 0, or --beams 1."),
    ] = False,
    beams: Annotated[
        int | None,
        typer.Option(
            "--beams",
            help="For t5 and transformer: the number of beams, where 1 is greedy search. The "
            "default is 4.",
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            "--length-penalty",
            help="For t5 and transformer: values above 0 favor longer texts. The default is 1.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="For gpt2: the seed of sampling. The default is 0.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="The device: cpu, cuda or auto.")
    ] = "auto",
) -> None:
    """Generate text with a trained model on one process, whatever its training layout was.

    gpt2 continues the prompt. bert, and t5 trained on spans, fill in its blanks. transformer, and
    t5 trained on pairs, generate the other text of the pair.

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
        raise ConfigError([f"--device {device} is not available here: use --device cpu or auto"])
    if prompt == "-":
        prompt = sys.stdin.read()
    trained = load_model(run_dir, torch.device(device))
    check_options(trained.run.model, given)
    for text in answer(trained, prompt, sampling, how):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
