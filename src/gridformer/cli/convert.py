"""`gridformer import`, `export` and `average`: weights of Hugging Face, and means of weights."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.shared import RunDirectory, waiting
from gridformer.utils.files import refuse_existing
from gridformer.utils.units import counted, format_count


class DTypeOption(StrEnum):
    """The values of --dtype."""

    keep = "keep"
    float32 = "float32"
    bfloat16 = "bfloat16"


_DType = Annotated[
    DTypeOption,
    typer.Option("--dtype", help="The type of the written tensors. keep does not change it."),
]


def import_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Path,
    dtype: _DType = DTypeOption.keep,
    task: str = "",
) -> None:
    """Convert a model of Hugging Face to a run directory, tensor by tensor.

    generate reads the run directory as any other, and train.init_from=RUNDIR
    begins a run with its weights. Nothing is downloaded.

    Try: gridformer import FOLDER --out runs/imported

    Args:
        folder: A folder of Hugging Face: config.json, safetensors files and a tokenizer.
        out: The run directory to write, which must not exist.
        task: The data.task of a model that predicts tokens, if the folder does not say it: pairs
            for a t5 that translates. The default is that of its family.
    """
    from gridformer.checkpoint.convert.importing import import_folder

    with waiting() as tell:
        done = import_folder(folder, out, dtype.value, partial(tell, ""), task)
    typer.echo(
        f"{out}: a {done.model_type} with {format_count(done.n_parameters)} parameters "
        f"({counted(done.run.model.n_layers, 'layer')}, family {done.run.model.family})"
    )
    if not done.has_tokenizer:
        typer.echo(
            f"{folder} has no tokenizer.json, which generate needs. transformers "
            f'writes one: AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}"); '
            f"then copy it to {out}"
        )
    elif done.run.model.token_head:
        typer.echo(f'next: gridformer generate {out} --prompt "..."')


def export(
    run_dir: RunDirectory, out: Path, dtype: _DType = DTypeOption.keep, shard_gib: float = 5.0
) -> None:
    """Convert the last checkpoint of a run to a folder that from_pretrained opens.

    It does not matter which layout wrote the checkpoint.

    Try: gridformer export runs/demo --out exported

    Args:
        out: The folder to write, which must not exist.
        shard_gib: The largest size of a file in GiB.
    """
    from gridformer.checkpoint.convert.exporting import export_run
    from gridformer.checkpoint.copies import run_with_checkpoints

    refuse_existing(out)
    with waiting() as tell, run_with_checkpoints(run_dir, partial(tell, "")) as folder:
        done = export_run(folder, out, dtype.value, shard_gib, partial(tell, ""))
    files = f"{done.n_files} files" if done.n_files > 1 else "one file"
    typer.echo(
        f"{out}: a {done.model_type} with {format_count(done.n_parameters)} parameters in "
        f"{files}, from step {done.step}; "
        f'transformers.{done.architecture}.from_pretrained("{out}") opens it'
    )


def average(
    run_dir: Annotated[Path, typer.Argument(metavar="RUNDIR")], out: Path, last: int = 5
) -> None:
    """Average the weights of the last checkpoints of a run.

    The original Transformer translates with such a mean. It does not matter which layouts wrote the
    checkpoints. generate, evaluate and export read the written run directory as any other, and
    train.init_from=RUNDIR begins a run with its weights.

    Try: gridformer average runs/translate --last 3 --out runs/translate-average

    Args:
        run_dir: A run directory, or a URL like train.checkpoint_to.
        out: The run directory to write, which must not exist.
        last: The number of the newest checkpoints to average.
    """
    from gridformer.checkpoint.copies import run_with_checkpoints, url_of
    from gridformer.checkpoint.whole import average_run

    refuse_existing(out)
    with (
        waiting() as tell,
        run_with_checkpoints(run_dir, partial(tell, ""), max(1, last)) as folder,
    ):
        name = url_of(run_dir) or str(run_dir)
        averaged = average_run(folder, out, last, partial(tell, ""), name)
    steps = ", ".join(map(str, averaged))
    typer.echo(f"{out}: the mean of the checkpoints of steps {steps}")
