"""The `gridformer` command: it registers the subcommands and prints the errors they raise.

Neither this module nor those of the subcommands import torch at the top, so `--help` is instant.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from gridformer import __version__
from gridformer.cli.convert import average, export, import_
from gridformer.cli.demo import demo
from gridformer.cli.errors import check_arguments, errors_as_sentences
from gridformer.cli.evaluate import evaluate
from gridformer.cli.generate import generate
from gridformer.cli.health import health
from gridformer.cli.launch import launch
from gridformer.cli.machine import calibrate, doctor
from gridformer.cli.plan import layouts, plan
from gridformer.cli.predict import check, memory, predict
from gridformer.cli.prepare import prepare
from gridformer.cli.report import report
from gridformer.cli.train import train
from gridformer.cli.verify import verify
from gridformer.utils.process import let_threads_sleep, use_expandable_segments


def flowing(text: str) -> str:
    """Returns a docstring as paragraphs of one line each, which a terminal of any width breaks.

    Typer keeps the line breaks of the source, so half a line would stand alone after each of them.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


_EPILOG = (
    "[bold]From a text corpus to generated text:[/bold]\n\n"
    "gridformer prepare python-stdlib --out data/python-stdlib\n\n"
    "gridformer train demo\n\n"
    'gridformer generate runs/demo --prompt "def read(self"'
)

app = typer.Typer(
    name="gridformer",
    help="Train transformers on a grid of devices, with the same loss as on one device.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(prepare)
app.command()(train)
app.command()(generate)
app.command("import")(import_)
app.command()(export)
app.command()(average)
app.command()(evaluate)
app.command()(report)
app.command()(layouts)
app.command()(memory)
app.command()(check)
app.command()(predict)
app.command()(plan)
app.command()(launch)
app.command()(calibrate)
app.command()(doctor)
app.command()(health)
app.command()(verify)


for command in app.registered_commands:
    assert command.callback is not None
    command.help = flowing(command.callback.__doc__ or "")
    command.callback = check_arguments(command.callback)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gridformer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Declares the options of the command itself. The help text is that of `app`."""


def main() -> None:
    """Runs the command. See `gridformer.cli.errors` for what becomes of errors."""
    # Both work only before torch is imported or initializes CUDA, and no command has done so yet.
    let_threads_sleep()
    use_expandable_segments()
    with errors_as_sentences():
        app()


if __name__ == "__main__":
    main()
