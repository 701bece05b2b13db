"""What each process of `gridformer generate` does."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

from gridformer.evaluate.beams import BeamSearch
from gridformer.evaluate.continuing import Speed
from gridformer.evaluate.generate import (
    Stops,
    answer,
    answer_prompts,
    continue_prompts,
    continues,
)
from gridformer.evaluate.job import Job
from gridformer.evaluate.sampling import Sampling


@dataclass(frozen=True)
class Generation:
    """Prompts and settings.

    Attributes:
        prompts: The prompts.
        many: Whether they come from a file, so that the output is one JSON object a line.
        batch_size: Prompts that go through the model together.
        sampling: Settings for models that continue texts.
        how: Settings for encoder-decoders.
        shown: What the output calls each prompt, if that is not the prompt itself.
        stops: Of conversations, see `gridformer.evaluate.generate.Stops`.
    """

    prompts: list[str]
    many: bool = False
    batch_size: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    how: BeamSearch = field(default_factory=BeamSearch)
    shown: list[str] | None = None
    stops: Stops = None


def generate_worker(job: Job, asked: Generation) -> None:
    """The entrypoint of every process of `gridformer generate`; rank 0 prints the texts."""
    with job.open() as (trained, rank):
        speed = Speed()
        if asked.many and continues(job.run.model):
            found = continue_prompts(
                trained,
                asked.prompts,
                asked.how.max_tokens,
                asked.sampling,
                asked.batch_size,
                speed,
                asked.stops,
            )
            for prompt, one in zip(asked.shown or asked.prompts, found):
                line = {"prompt": prompt, "text": one.text}
                _write(rank, json.dumps(line, ensure_ascii=False) + "\n")
        elif asked.many and job.run.model.two_stacks:
            texts = answer_prompts(trained, asked.prompts, asked.how, asked.batch_size)
            for prompt, text in zip(asked.prompts, texts):
                line = {"prompt": prompt, "text": text}
                _write(rank, json.dumps(line, ensure_ascii=False) + "\n")
        else:
            for prompt in asked.prompts:  # of bert one after the other
                pieces = answer(trained, prompt, asked.sampling, asked.how, speed, asked.stops)
                if asked.many:
                    line = {"prompt": prompt, "text": "".join(pieces)}
                    _write(rank, json.dumps(line, ensure_ascii=False) + "\n")
                else:
                    for text in pieces:
                        _write(rank, text)
                    _write(rank, "\n")
        if rank == 0 and speed.prompt_tokens:
            print(speed, file=sys.stderr)


def _write(rank: int, text: str) -> None:
    if rank == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
