"""`gridformer prepare`: turns text into a token folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gridformer.utils.errors import UserError
from gridformer.utils.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from gridformer.data.prepare.writer import PrepareProgress
    from gridformer.data.tokenfolder import TokenFolder


def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE")],
    out: Path,
    suffix: list[str] | None = None,
    text_key: str = "text",
    pair_keys: Annotated[str | None, typer.Option(metavar="FROM,TO")] = None,
    pair_files: bool = False,
    label_key: Annotated[str | None, typer.Option(metavar="KEY")] = None,
    labels_from_folders: bool = False,
    chat: Annotated[str | None, typer.Option(metavar="TEMPLATE")] = None,
    split: str = "train",
    tokenizer: Path | None = None,
    eos: Annotated[str | None, typer.Option(metavar="TOKEN")] = None,
    bos: Annotated[str | None, typer.Option(metavar="TOKEN")] = None,
    vocab_size: int | None = None,
    tokenizer_sample_mb: float | None = None,
    val_fraction: float = 0.02,
    seed: int = 1234,
    task_format: Annotated[str | None, typer.Option("--format", metavar="FORMAT")] = None,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    overwrite: bool = False,
) -> None:
    """Turn text into a token folder that `gridformer train` reads.

    Every file, and every record of a data set, is a document. A corpus may be larger than memory.
    Pairs of texts are for translation, and labeled documents are for classification. If the
    preparation is stopped, the same command goes on where it was.

    For a first try: gridformer prepare python-stdlib --out data/python-stdlib

    Args:
        sources: Text files, folders, quoted patterns, .jsonl, .jsonl.gz, .parquet, .arrow, .csv,
            .tsv or .json files, save_to_disk folders, hf:NAME, hf:NAME/CONFIG, or python-stdlib.
            gettext:de takes pairs of English and German (or any other language) from this machine's
            message catalogs, and gettext:de:PATH from those in a folder.
        out: The token folder to write.
        suffix: Read only files with this suffix from folders. Can be repeated. By default, all
            common text files are read.
        text_key: The key or column of the text in records.
        pair_keys: Read records as pairs: the keys or columns of a text and of its translation, such
            as en,de.
        pair_files: Read every two sources as pairs: line i of the second file, such as train.de,
            translates line i of the first, such as train.en.
        label_key: The key or column of the label in records.
        labels_from_folders: Take the label of a file from its folder: SOURCE/LABEL/...
        chat: Read records as conversations: messages with role and content, or instruction, input
            and output, or prompt and completion. The template makes text of them: chatml, llama3,
            tokenizer (the one beside --tokenizer), or the path of a jinja file.
        split: The split of a Hugging Face data set.
        tokenizer: A tokenizer.json file, or a folder of Hugging Face that has one. By default, a
            tokenizer is trained.
        eos: The token that ends every document. By default it is the one that the tokenizer names;
            none adds no token.
        bos: A token with which every document begins, other than pairs. By default there is none.
        vocab_size: The vocabulary size of the tokenizer that is trained. The default is 4096.
        tokenizer_sample_mb: The amount of text to train the tokenizer on, in MB. The default is 16.
        val_fraction: The fraction of documents held out for validation.
        seed: The seed that chooses the held-out documents.
        task_format: SOURCE is the folder of a data set for fine-tuning, with the files as they are
            distributed: mnli, mnli-mismatched, qqp, qnli, rte, mrpc, sst-2, cola, sts-b (GLUE's
            .tsv files), squad (JSON of SQuAD 1.1 or 2.0) or race. It needs --tokenizer, and the
            splits are those of the data set.
        workers: The number of processes that tokenize. By default there is one for each core, or a
            single one for less than 64 MB of text.
        overwrite: Replace an existing token folder at --out.
    """
    import os

    # If this is unset, the tokenizers library turns its threads off after a fork, with a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    from rich.console import Console

    from gridformer.cli.prepare_output import Bar, summarize
    from gridformer.config import closest
    from gridformer.data.prepare.atomic_folder import documents_kept
    from gridformer.data.prepare.corpus import prepare_corpus
    from gridformer.data.prepare.sources import open_sources
    from gridformer.data.prepare.tasks import FORMATS, prepare_task
    from gridformer.data.prepare.writer import WriteOptions
    from gridformer.data.tokenizer import Tokenizer

    ends = eos != "none"
    keys = [key.strip() for key in pair_keys.split(",")] if pair_keys is not None else []
    names = (eos if ends else None, bos if bos != "none" else None)
    others = (pair_keys, pair_files, label_key, labels_from_folders, suffix)
    trained = {"--vocab-size": vocab_size, "--tokenizer-sample-mb": tokenizer_sample_mb}
    unused = [option for option, value in trained.items() if value is not None]
    refusals = {
        f"{'--chat' if chat else '--format'} says what begins and ends a document, so omit --eos "
        "and --bos": (chat or task_format) and (eos or bos),
        "--chat reads conversations, so omit --pair-keys, --pair-files, --label-key, "
        "--labels-from-folders and --suffix": chat is not None and any(others),
        "--eos and --bos name tokens of a given tokenizer: add --tokenizer, or omit them": (
            any(names) and tokenizer is None
        ),
        f"--tokenizer names a tokenizer, and {' and '.join(unused)} would train one: leave out one "
        "or the other": tokenizer is not None and unused,
        f"--pair-keys {pair_keys} must be two different keys, such as --pair-keys en,de": (
            keys and not (len(keys) == 2 and all(keys) and keys[0] != keys[1])
        ),
        f"--format {task_format} is unknown{closest(task_format or '', FORMATS)}": (
            task_format is not None and task_format not in FORMATS
        ),
        f"--format {task_format} reads one folder, not {len(sources)}: name one": (
            task_format is not None and len(sources) != 1
        ),
        f"--format {task_format} needs --tokenizer: name the tokenizer.json of the model that you "
        "fine-tune, or the folder that holds it": task_format is not None and tokenizer is None,
    }
    if problems := [problem for problem, wrong in refusals.items() if wrong]:
        raise UserError(problems[0])
    vocab_size = 4096 if vocab_size is None else vocab_size
    sample_bytes = int((16.0 if tokenizer_sample_mb is None else tokenizer_sample_mb) * 1e6)

    def write(show: Callable[[PrepareProgress], None]) -> TokenFolder:
        options = WriteOptions(workers=workers, overwrite=overwrite, on_progress=show)
        given = Tokenizer.load(tokenizer, *names) if tokenizer else None
        if task_format is not None and given is not None:
            return prepare_task(task_format, Path(sources[0]), out, given, **options)
        common: dict[str, Any] = {
            "tokenizer": given,
            "vocab_size": vocab_size,
            "sample_bytes": sample_bytes,
            "val_fraction": val_fraction,
            "seed": seed,
            **options,
        }
        if chat is not None:
            from gridformer.data.chat import open_template
            from gridformer.data.prepare.corpus import prepare_chat

            template, needed = open_template(chat, tokenizer)
            return prepare_chat(sources, out, template, needed, split=split, **common)
        opened = open_sources(
            sources,
            suffixes=suffix or (),
            text_key=text_key,
            split=split,
            pair_keys=(keys[0], keys[1]) if keys else None,
            label_key=label_key,
            labels_from_folders=labels_from_folders,
            pair_files=pair_files,
        )
        return prepare_corpus(opened, out, ends=ends, **common)

    try:
        shown = Bar(Console(stderr=True))
        with shown.bar:
            folder = write(shown.show)
    except BaseException:
        if kept := documents_kept(out):
            Console(stderr=True).print(
                f"done: {counted(kept, 'document')}; the same command goes on from there",
                highlight=False,
            )
        raise
    summarize(folder, out, Console())
