"""What `gridformer prepare` shows: how far it is, and at the end what it has written."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.utils.units import counted

if TYPE_CHECKING:
    from rich.console import Console

    from gridformer.data.prepare.writer import PrepareProgress
    from gridformer.data.tokenfolder import Index, TokenFolder

FEW = 5  # documents for validation, below which more are suggested


class Bar:
    """A progress bar on the terminal that `show` updates from `PrepareProgress` reports."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        name, counts = TextColumn("{task.description}"), TextColumn("{task.fields[counts]}")
        self.bar = Progress(
            *(SpinnerColumn(), name, BarColumn(), counts, TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # rich would write an empty line at its end
        )
        self._task = self.bar.add_task("looking for text", total=None, counts="")
        self._told = False

    def show(self, now: PrepareProgress) -> None:
        """Shows the progress, and first of all from where a preparation goes on."""
        counts = ""
        if now.kept and not self._told:
            self.bar.console.print(
                f"going on after {counted(now.kept, 'document')}", highlight=False
            )
            self._told = True
        if now.tokens:
            size = f"{now.bytes / 1e6:,.1f} MB"
            counts = f"{size}, {now.tokens:,} tokens, {now.documents:,} documents"
        self.bar.update(
            self._task, description=now.phase, completed=now.bytes, total=now.total, counts=counts
        )


def summarize(folder: TokenFolder, out: Path, console: Console) -> None:
    """Prints what a token folder contains, and a command that trains on it.

    `out` is the path of the folder as the command names it.
    """
    from rich.table import Table
    from rich.text import Text

    from gridformer.data.prepare.reading import is_damage

    index = folder.index
    n_bytes = sum(source.bytes for source in index.sources)
    documents = sum(source.documents for source in index.sources)
    added = documents * (index.ends + (index.bos_token is not None))  # tokens that are no text
    words = max(1, index.train.tokens + index.val.tokens - added)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    unit = 2 if index.kind == "pairs" else 1
    counts = f"{index.train.documents // unit:,} train, {index.val.documents // unit:,} val"
    longest = ", ".join(f"{name} {n}" for name, n in _usual_lengths(folder).items())
    skipped = [(f"{n:,} {what}", is_damage(what)) for what, n in index.skipped.items()]
    rows = {
        {"pairs": "pairs", "chat": "conversations"}.get(index.kind, "documents"): counts,
        "languages": " to ".join(index.languages or ()),
        "labels": _shortened(index.labels),
        "tokens": f"{index.train.tokens:,} train, {index.val.tokens:,} val",
        "90% fit into": longest,
        "vocabulary": f"{index.vocab_size:,} ({index.tokenizer.origin})",
        "bytes per token": f"{n_bytes / words:.2f} ({n_bytes / 1e6:,.1f} MB of text)",
        "catalogs": f"{n:,}" if (n := sum(len(s.parts) for s in index.sources)) else "",
        "left out": ", ".join(what for what, damaged in skipped if not damaged),
        "damaged": ", ".join(what for what, damaged in skipped if damaged),
        "license": "; ".join(s.license for s in index.sources if s.license),
        "token folder": str(out),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))  # Text, because brackets in paths are not markup
    console.print(table)
    if more := more_for_validation(index):
        console.print(Text(more), soft_wrap=True)
    # Printed on its own line without wrapping, so that it can be copied.
    console.print(Text(f"next: {next_command(folder, out)}"), soft_wrap=True)


def more_for_validation(index: Index) -> str:
    """Returns a sentence about how to hold out more documents, if few are; otherwise nothing."""
    from gridformer.data.prepare.split_file import split_of

    unit = 2 if index.kind == "pairs" else 1
    n_val = index.val.documents // unit
    n = n_val + index.train.documents // unit
    if index.kind == "examples" or n_val >= FEW or n > 1000:  # with more, few were asked for
        return ""
    for fraction in (0.05, 0.1, 0.2):
        held = sum(split_of(index.seed, one, fraction) == "val" for one in range(n))
        if held >= FEW:
            return (
                f"Whole documents are held out for validation, here {n_val} of {n} with "
                f"{index.val.tokens:,} tokens: --val-fraction {fraction} --overwrite holds out "
                f"{held}."
            )
    return ""


def next_command(folder: TokenFolder, out: Path) -> str:
    """Returns a command that trains on the folder."""
    if folder.kind == "examples":
        of = {"answer": "squad", "right": "race", "value": "sts-b"}
        run = next((of[name] for name in of if name in folder.index.columns), "mnli")
        if run == "squad" and (folder.train.columns["answer"] < 0).any():
            run = "squad2"  # some questions have no answer
        if len(folder.index.labels) == 2:
            run = "qqp"
        words = ["gridformer", "train", run, f"data.path={out}"]
        if run == "mnli":
            words.append("data.validation=[]")  # its own sets are folders of fixed names
        return shlex.join([*words, "--out", f"runs/{out.resolve().name}"])
    shipped = {"pairs": "translate", "chat": "chat"}.get(folder.kind, "demo")
    words = ["gridformer", "train", shipped, f"data.path={out}"]
    if folder.kind == "labeled":
        words.append(f"model.n_labels={len(folder.index.labels)}")
    words += [f"{key}={n}" for key, n in _usual_lengths(folder).items()]
    # A separate run directory, because that of the run file may hold a model of other data.
    return shlex.join([*words, "--out", f"runs/{out.resolve().name}"])


def _usual_lengths(folder: TokenFolder) -> dict[str, int]:
    """Returns lengths, multiples of 8, that hold 90% of the pairs' texts or conversations."""
    import numpy as np

    known = {"pairs": ("data.source_len", "data.seq_len"), "chat": ("data.seq_len",)}
    keys = known.get(folder.kind, ())
    if not keys:
        return {}
    lengths = np.diff(folder.train.offsets).reshape(-1, len(keys))
    return {key: 8 * -(-int(n) // 8) for key, n in zip(keys, np.quantile(lengths, 0.9, axis=0))}


def _shortened(labels: tuple[str, ...], most: int = 12) -> str:
    shown = ", ".join(labels[:most])
    return f"{len(labels)}: {shown}{', ...' if len(labels) > most else ''}" if labels else ""
