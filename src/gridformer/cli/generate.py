"""`gridformer generate`: generates text with a trained model of any family."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from gridformer.cli.shared import (
    Beams,
    Device,
    DTypeName,
    LengthPenalty,
    Timeout,
    TrainedModel,
    device_option,
    dtype_option,
    waiting,
)


def generate(
    run_dir: TrainedModel,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="LAYOUT")] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p")] = "",
    prompts: Path | None = None,
    chat: bool = False,
    system: str = "",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t")] = None,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    seed: int | None = None,
    timeout: Timeout = None,
    dtype: DTypeName = "",
    device: Device = "auto",
) -> None:
    """Generate text with a trained model, whatever its training layout was.

    Decoders (gpt2 and llama) continue the prompt. bert, and t5 trained on spans, fill in its
    blanks. transformer, and t5 trained on pairs, generate the other text of the pair. Every layout
    gives the same result as one process. For decoders, tokens per second are printed on standard
    error.

    [bold]Examples:[/bold]

    gridformer generate runs/demo --prompt "def read(self"

    gridformer generate runs/demo layout.scheme=megatron layout.cols=2 --prompts prompts.txt

    Args:
        overrides: The layout on which to generate, such as layout.scheme=megatron layout.cols=2.
            The default is one process, whatever the layout of training was.
        prompt: The text to continue, translate or fill in, where ___ marks a blank. - reads it from
            standard input.
        prompts: A file of prompts, one per line, or JSON lines with the key prompt. The output is
            JSON lines with prompt and text.
        chat: For models that were trained on conversations: the prompt is what a user says, and the
            output is the answer. A line of --prompts may have messages instead.
        system: With --chat: what the system says first.
        batch_size: This number of prompts of a file go through the model together; not for bert.
        max_tokens: The largest number of tokens to generate.
        temperature: For decoders: values below 1 make the text more predictable, values above 1
            more varied. The default is 0.8.
        top_k: For decoders: sample from the k most likely tokens; 0 means all.
        top_p: For decoders: sample from the likeliest tokens that have this total probability.
        greedy: Always choose the most likely token: -t 0, or --beams 1.
        seed: For decoders: the seed of sampling. The default is 0.
    """
    import sys
    from contextlib import ExitStack
    from dataclasses import replace

    from gridformer.evaluate.beams import BeamSearch
    from gridformer.evaluate.continuing import Sampling
    from gridformer.evaluate.generate import Generation, check_options, generate_worker
    from gridformer.evaluate.loading import plan_job, run_directory
    from gridformer.evaluate.prompts import read_prompts
    from gridformer.launch import launch
    from gridformer.launch.watch import UseWatch
    from gridformer.utils.errors import ConfigError

    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampled: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    asked = {"beams": beams, "length_penalty": length_penalty}
    searched: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    given = [*sampled, *searched]
    overrides = overrides or []
    _check_no_text(overrides, prompt, prompts)
    if greedy:
        _check_greedy(sampled | searched)
        sampled["temperature"], searched["beams"] = 0.0, 1
    sampling, how = Sampling(**sampled), BeamSearch(**searched, max_tokens=max_tokens)
    if prompt and prompts:
        raise ConfigError("--prompt and --prompts both name what to continue: leave one out")
    if system and not chat:
        raise ConfigError("--system is a message of a conversation: also use --chat")
    texts = (
        []
        if chat and prompts
        else read_prompts(prompts)
        if prompts
        else [sys.stdin.read() if prompt == "-" else prompt]
    )
    with ExitStack() as at_end:
        with waiting() as tell:
            folder = at_end.enter_context(run_directory(run_dir, tell))
            job = plan_job(folder, overrides, device_option(device), dtype=dtype_option(dtype))
            check_options(job.run.model, given, chat)
        wanted = Generation(texts, prompts is not None, batch_size, sampling, how)
        if chat:
            from gridformer.evaluate.prompts import (
                chat_prompts,
                read_conversations,
                said_by_system,
                said_by_user,
            )

            talks = read_conversations(prompts) if prompts else [said_by_user(texts[0])]
            talks = [said_by_system(system, talk) for talk in talks] if system else talks
            rendered = chat_prompts(job.folder, talks)
            wanted = replace(
                wanted,
                prompts=[*rendered.texts],
                shown=[*rendered.shown],
                stops=rendered.stops,
            )
        job = replace(job, timeout_s=timeout or job.timeout_s, watch=UseWatch())
        launch(generate_worker, (job, wanted), job.n_processes)


def _check_greedy(given: dict[str, Any]) -> None:
    """Refuses options that --greedy overrules; -t 0 and --beams 1 say the same as it does."""
    from gridformer.utils.errors import ConfigError

    same = {"temperature": 0, "beams": 1, "length_penalty": given.get("length_penalty")}
    problems = [
        f"--{name.replace('_', '-')} {value} has no effect with --greedy, which always takes the "
        "likeliest token: leave out one of them"
        for name, value in given.items()
        if value != same.get(name)
    ]
    if problems:
        raise ConfigError(*problems)


def _check_no_text(overrides: list[str], prompt: str, prompts: Path | None) -> None:
    """Refuses a text that is given as if it were a setting of the layout."""
    from gridformer.config.base import shortened_text
    from gridformer.utils.errors import ConfigError

    texts = [word for word in overrides if not re.match(r"[a-z]+\.[a-z_.]+=", word)]
    if not texts:
        return
    if prompt or prompts:
        raise ConfigError(
            f"argument {shortened_text(texts[0])}: is no setting of the layout; leave it out, "
            "or quote a text of several words, such as --prompt 'two words'"
        )
    text = shlex.quote(" ".join(texts))
    raise ConfigError(
        f"argument {shortened_text(texts[0])}: is no setting of the layout; to generate from "
        f"this text, write --prompt {shortened_text(text)}"
    )
