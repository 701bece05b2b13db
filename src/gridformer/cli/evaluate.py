"""`gridformer evaluate`: measures a trained model on tasks."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gridformer.cli.shared import (
    AsJson,
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


def evaluate(
    run_dir: TrainedModel,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="LAYOUT")] = None,
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

    [bold]Examples:[/bold]

    gridformer evaluate runs/demo --tasks text:README.md

    gridformer evaluate runs/demo --set val

    gridformer evaluate runs/demo layout.scheme=megatron layout.cols=2 --tasks text:README.md --json

    Args:
        overrides: The layout on which to evaluate, such as layout.scheme=optimus layout.rows=2
            layout.cols=2. The default is one process, whatever the layout of training was.
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
    from contextlib import ExitStack
    from dataclasses import replace

    from gridformer.checkpoint.copies import url_of
    from gridformer.evaluate.loading import checkpoint_label_names, plan_job, run_directory
    from gridformer.evaluate.tasks import (
        Options,
        TaskArgument,
        check_tasks,
        evaluate_worker,
        parse_tasks,
        timeout_of,
    )
    from gridformer.launch import launch
    from gridformer.launch.watch import UseWatch
    from gridformer.utils.errors import ConfigError

    if not tasks and not sets:
        raise ConfigError(
            "--tasks and --set are missing: write, for example, --tasks text:FILE or --set val"
        )
    asked = parse_tasks(tasks) if tasks else []
    options = Options(batch_size, stride, limit, length)
    words = {"beams": beams, "length_penalty": length_penalty}
    given: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    options = replace(options, search=replace(options.search, **given))
    reads: int | None = length if asked else None  # sets have the lengths of the run
    asked += [TaskArgument("set", name) for name in sets or []]
    with ExitStack() as at_end:
        with waiting() as tell:
            folder = at_end.enter_context(run_directory(run_dir, tell))
            job = plan_job(
                folder, overrides or [], device_option(device), reads, dtype_option(dtype)
            )
            names = checkpoint_label_names(job.run, job.folder)
            check_tasks(job.run, asked, options, names, [*given])
        job = replace(
            job,
            name=url_of(run_dir) or str(run_dir),
            timeout_s=timeout or timeout_of(asked),
            watch=UseWatch(),
        )
        launch(evaluate_worker, (job, asked, options, as_json), job.n_processes)
