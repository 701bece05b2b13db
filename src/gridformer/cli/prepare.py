"""`gridformer prepare`: text in, token folder out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gridformer.data.prepare import Progress
    from gridformer.data.tokenfolder import TokenFolder


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Text files, folders, quoted patterns, .jsonl, .jsonl.gz, .parquet or .arrow "
            "files, save_to_disk folders, hf:NAME, hf:NAME/CONFIG, or python-stdlib.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    suffix: Annotated[
        list[str] | None,
        typer.Option(
            "--suffix",
            help="Take these files from folders; repeatable. Without it: all usual text files.",
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option("--text-key", help="Key or column of the text in records.")
    ] = "text",
    split: Annotated[
        str, typer.Option("--split", help="Split of a Hugging Face data set.")
    ] = "train",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json; without it one is trained."),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", help="Size of the vocabulary trained here.")
    ] = 4096,
    tokenizer_sample_mb: Annotated[
        float, typer.Option("--tokenizer-sample-mb", help="How much text to train it on.")
    ] = 16.0,
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", help="Share of documents held out for validation.")
    ] = 0.02,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the documents held out.")] = 1234,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a token folder at --out.")
    ] = False,
) -> None:
    """Turn text into a token folder that `gridformer train` reads.

    Every file, and every record of a data set, is a document; a corpus may be larger than memory.

    For a first try: gridformer prepare python-stdlib --out data/python-stdlib
    """
    import os

    # Says that threads are wanted; unset, the library turns them off, loudly, after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    from rich.console import Console

    from gridformer.data.prepare import prepare_corpus
    from gridformer.data.sources import open_sources
    from gridformer.data.tokenizer import Tokenizer

    with _Bar(Console(stderr=True)) as bar:
        folder = prepare_corpus(
            open_sources(sources, suffixes=suffix or (), text_key=text_key, split=split),
            out,
            tokenizer=Tokenizer.load(tokenizer) if tokenizer else None,
            vocab_size=vocab_size,
            sample_bytes=int(tokenizer_sample_mb * 1e6),
            val_fraction=val_fraction,
            seed=seed,
            overwrite=overwrite,
            on_progress=bar.show,
        )
    _summarise(folder, out, Console())


class _Bar:
    """A progress bar that follows `Progress` reports."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("looking for text", total=None, counts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, now: Progress) -> None:
        counts = ""
        if now.tokens:
            counts = (
                f"{now.bytes / 1e6:,.1f} MB, {now.tokens:,} tokens, {now.documents:,} documents"
            )
        self._bar.update(
            self._task, description=now.phase, completed=now.bytes, total=now.total, counts=counts
        )


def _summarise(folder: TokenFolder, out: Path, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    index = folder.index
    n_bytes = sum(source.bytes for source in index.sources)
    documents = sum(source.documents for source in index.sources)
    words = index.train.tokens + index.val.tokens - documents  # without the end-of-text tokens
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "documents": f"{index.train.documents:,} train, {index.val.documents:,} val",
        "tokens": f"{index.train.tokens:,} train, {index.val.tokens:,} val",
        "vocabulary": f"{index.vocab_size:,} ({index.tokenizer.origin})",
        "bytes per token": f"{n_bytes / words:.2f} ({n_bytes / 1e6:,.1f} MB of text)",
        "left out": ", ".join(f"{n:,} {what}" for what, n in index.skipped.items()),
        "licence": "; ".join(s.license for s in index.sources if s.license),
        "where": str(out),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))  # Text: brackets in paths are no markup
    console.print(table)
    # On its own and unwrapped, to be copied.
    command = f"gridformer train configs/runs/demo.yaml data.path={out}"
    console.print(Text(f"next: {command}"), soft_wrap=True)
