"""`gridformer generate` and `evaluate`: generate text with a trained model, and measure it."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from gridformer.cli.shared import LONGEST, AsJson, waiting
from gridformer.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from gridformer.config.train import DType
    from gridformer.evaluate.loading import Job
    from gridformer.mesh.process_group import DeviceChoice

TrainedModel = Annotated[
    Path,
    typer.Argument(
        metavar="RUNDIR|FOLDER",
        help="A run directory, one of its checkpoints, a URL like train.checkpoint_to, or a folder "
        "of Hugging Face.",
    ),
]
Layout = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of the layout to run on, such as layout.scheme=megatron layout.cols=2. Without "
        "any it is one process, whatever the layout of training was.",
    ),
]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="The type of the computation: float32, bfloat16, float16 or float64. The default is "
        "that of training. Weights are read as they are and cast.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="The device: cpu, cuda or auto.")]
Beams = Annotated[
    int | None,
    typer.Option(
        "--beams",
        help="For t5 and transformer: the number of beams, where 1 is greedy search. The "
        "default is 4.",
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        help="For t5 and transformer: values above 0 favor longer texts. The default is 1.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1,
        max=LONGEST,
        help="On several processes: one that waits for another for this number of seconds ends the "
        "command and names the cause. The default is 600, and 21600 for lm-eval tasks, whose data "
        "one process may have to prepare.",
    ),
]


def generate(
    run_dir: TrainedModel,
    overrides: Layout = None,
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
    from gridformer.evaluate import prompts as files
    from gridformer.evaluate.beams import BeamSearch
    from gridformer.evaluate.continuing import Sampling
    from gridformer.evaluate.generate import Generation, check_options, generate_worker
    from gridformer.launch import launch

    sampled = _given(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    searched = _given(beams=beams, length_penalty=length_penalty)
    given = [*sampled, *searched]
    _check_no_text(overrides or [], prompt or prompts)
    if greedy:
        _check_greedy(sampled | searched)
        sampled["temperature"], searched["beams"] = 0.0, 1
    sampling, search = Sampling(**sampled), BeamSearch(**searched, max_tokens=max_tokens)
    if prompt and prompts:
        raise UserError("--prompt and --prompts both name what to continue: leave one out")
    if system and not chat:
        raise UserError("--system is a message of a conversation: also use --chat")
    texts = [sys.stdin.read() if prompt == "-" else prompt]
    if prompts and not chat:
        texts = files.read_prompts(prompts)
    with _job(run_dir, overrides, device, dtype, timeout or 600.0, None, batch_size, True) as job:
        check_options(job.run.model, given, chat)
        shown, stops = texts, None
        if chat:
            talks = files.read_conversations(prompts) if prompts else [files.said_by_user(texts[0])]
            if system:
                talks = [files.said_by_system(system, talk) for talk in talks]
            shown = [talk[-1]["content"] for talk in talks]
            texts, stops = files.chat_prompts(job.folder, talks)
        how = Generation(sampling, search, batch_size, stops)
        work = (job, texts, how, shown if prompts else None)
        launch(generate_worker, work, job.run.layout.n_processes)


def evaluate(
    run_dir: TrainedModel,
    overrides: Layout = None,
    tasks: str = "",
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="NAME")] = None,
    stride: Annotated[int, typer.Option(min=0)] = 0,
    length: Annotated[int, typer.Option(min=0)] = 0,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    limit: Annotated[int, typer.Option(min=0)] = 0,
    beams: Beams = None,
    length_penalty: LengthPenalty = None,
    as_json: AsJson = False,
    timeout: Timeout = None,
    dtype: DTypeName = "",
    device: Device = "auto",
) -> None:
    """Measure a trained model on tasks, on any layout, with the same numbers.

    Without --tasks and --set, these are the validation sets of its run.

    [bold]Examples:[/bold]

    gridformer evaluate runs/demo

    gridformer evaluate runs/demo --tasks text:README.md

    gridformer evaluate runs/demo layout.scheme=megatron layout.cols=2 --tasks text:README.md --json

    Args:
        tasks: Tasks, separated by commas: text:FILE (perplexity), wikitext:FILE (perplexity per
            word of WikiText's original), lambada:FILE (last words), labels:FILE (accuracy of a
            classifier), examples:FOLDER (scores of a fine-tuned model), bleu:FILE (pairs of texts),
            lm-eval:TASK (of lm-evaluation-harness).
        sets: A validation or test set of the run: its name in data.validation or data.test, that of
            a source, or val for the validation split of data.path. Its loss and scores are those of
            an evaluation during training. Can be repeated.
        stride: For text and wikitext: windows of the text overlap by all but this number of tokens.
            The default is 0, which means that they do not overlap.
        length: The model reads at most this number of tokens at once. The default is 0, which means
            model.max_seq_len.
        batch_size: About this number of windows or texts go through the model together.
        limit: Only this number of documents are measured; 0 means all.
    """
    from gridformer.checkpoint.side_files import root_of
    from gridformer.config import NO_PATH
    from gridformer.data.side_texts import read_label_names
    from gridformer.evaluate.beams import BeamSearch
    from gridformer.evaluate.examples import validation_names
    from gridformer.evaluate.measures import Options
    from gridformer.evaluate.tasks import TaskArgument, check_tasks, evaluate_worker, parse_tasks
    from gridformer.launch import launch

    asked = parse_tasks(tasks) if tasks else []
    searched = _given(beams=beams, length_penalty=length_penalty)
    search = BeamSearch(**searched, max_tokens=256)
    options = Options(batch_size, stride, limit, length, search)
    reads = length if asked else None  # sets have the lengths of the run
    # For lm-evaluation-harness, rank 0 may download and prepare data for a long time.
    longest = 6 * 3600.0 if any(one.kind == "lm-eval" for one in asked) else 600.0
    with _job(run_dir, overrides, device, dtype, timeout or longest, reads, batch_size) as job:
        names = read_label_names(root_of(job.folder))
        if not asked and not sets:
            if job.run.data.path.name == NO_PATH:
                raise UserError(f"{run_dir} has no data of its own: use --tasks, as text:FILE")
            sets = validation_names(job.run)
        asked += [TaskArgument("set", name) for name in sets or []]
        check_tasks(job.run, asked, options, names, [*searched])
        launch(evaluate_worker, (job, asked, options, as_json), job.run.layout.n_processes)


@contextlib.contextmanager
def _job(
    run_dir: Path,
    overrides: list[str] | None,
    device: str,
    dtype: str,
    timeout_s: float,
    length: int | None = None,
    batch_size: int = 0,
    decodes: bool = False,
) -> Iterator[Job]:
    """Yields a trained model and its layout, which fit together."""
    from gridformer.checkpoint.copies import url_of
    from gridformer.evaluate.loading import plan_job, run_directory
    from gridformer.launch.watch import UseWatch
    from gridformer.parallel.registry import describe_layout

    with contextlib.ExitStack() as at_end:
        with waiting() as tell:
            folder = at_end.enter_context(run_directory(run_dir, partial(tell, "")))
            on, of = device_option(device), dtype_option(dtype)
            job = plan_job(folder, overrides or [], on, length, of, batch_size, decodes)
        if job.run.layout.n_processes > 1:
            print(f"layout: {describe_layout(job.run.layout)}", file=sys.stderr)
        name = url_of(run_dir) or str(run_dir)
        yield replace(job, name=name, timeout_s=timeout_s, watch=UseWatch())


def dtype_option(name: str) -> DType | None:
    """Returns the value of --dtype, or None if there is none."""
    from gridformer.config.train import DType

    known: dict[str, DType] = {one: one for one in get_args(DType)}
    if name and name not in known:
        raise UserError(f"--dtype {name} must be one of {', '.join(known)}")
    return known.get(name)


def device_option(name: str) -> DeviceChoice:
    """Returns the value of --device."""
    known: dict[str, DeviceChoice] = {"auto": "auto", "cpu": "cpu", "cuda": "cuda"}
    if name not in known:
        raise UserError(f"--device {name} is no device: use --device cpu, cuda or auto")
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError(f"--device {name} is not available here: use --device cpu or auto")
    return known[name]


def _given(**options: Any) -> dict[str, Any]:
    """Returns the options that the user has set."""
    return {name: value for name, value in options.items() if value is not None}


def _check_greedy(given: dict[str, Any]) -> None:
    """Refuses options that --greedy overrules; -t 0 and --beams 1 say the same as it does."""
    same = {"temperature": 0, "beams": 1, "length_penalty": given.get("length_penalty")}
    problems = [
        f"--{name.replace('_', '-')} {value} has no effect with --greedy, which always takes the "
        "likeliest token: leave out one of them"
        for name, value in given.items()
        if value != same.get(name)
    ]
    if problems:
        raise ConfigError(*problems)


def _check_no_text(overrides: list[str], asked: object) -> None:
    """Refuses a text that is given as if it were a setting of the layout."""
    from gridformer.config.base import shortened_text

    texts = [word for word in overrides if not re.match(r"[a-z]+\.[a-z_.]+=", word)]
    if not texts:
        return
    what = f"argument {shortened_text(texts[0])}: is no setting of the layout"
    if asked:
        raise UserError(
            f"{what}; leave it out, or quote a text of several words, such as --prompt 'two words'"
        )
    text = shortened_text(shlex.quote(" ".join(texts)))
    raise UserError(f"{what}; to generate from this text, write --prompt {text}")
