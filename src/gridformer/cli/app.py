"""The `gridformer` command: it registers the subcommands and prints the errors they raise.

Neither this module nor those of the subcommands import torch at the top, so `--help` is instant.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from gridformer import __version__
from gridformer.cli.convert import average, export, import_
from gridformer.cli.demo import demo
from gridformer.cli.errors import check_arguments, errors_as_sentences
from gridformer.cli.launch import launch
from gridformer.cli.machine import calibrate, doctor
from gridformer.cli.plan import layouts, plan
from gridformer.cli.predict import check, memory, predict
from gridformer.cli.prepare import prepare
from gridformer.cli.prove import prove
from gridformer.cli.report import health, report, verify
from gridformer.cli.schema import schema
from gridformer.cli.train import train
from gridformer.cli.trained import evaluate, generate
from gridformer.utils.process import let_threads_sleep, use_expandable_segments

# Short words for values leave the width of a terminal to the help; errors name bounds.
_VALUES: dict[object, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: " "}


class _Command(TyperCommand):
    """A command that suggests KEY=VALUE for `--key`, as other programs have it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's, of which typer has a copy of its own
            if hasattr(error, "possibilities") and any(p.name == "overrides" for p in self.params):
                from gridformer.config.reading import key_of

                word = error.option_name.lstrip("-")  # type: ignore[attr-defined]
                if key := key_of(word):
                    error.possibilities = [key if "=" in key else f"{key}=VALUE"]
            raise

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = _VALUES[bool]
        return option


def add(function: Callable[..., None], group: str) -> None:
    """Adds a command to a group. Its help and that of its options are in its docstring.

    An entry of `Args:` describes an option `--name` unless the annotation says otherwise, and says
    itself what a default of 0 stands for. Paragraphs become one line each, which a terminal of any
    width breaks.
    """
    prose, _, entries = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    text = "\n\n".join(map(_one_line, prose.split("\n\n")))
    described = inspect.unwrap(function)
    hints = get_type_hints(described, include_extras=True)
    for name, said in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", entries, re.MULTILINE):
        kind, info = hints[name], typer.Option()
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)
        info.help = _one_line(said)
        if inspect.signature(described).parameters[name].default == 0:
            info.show_default = False
        if isinstance(info, OptionInfo) and info.default is ...:
            info.param_decls = (f"--{name.strip('_').replace('_', '-')}",)
        hints[name] = Annotated[kind, info]
    for hint in hints.values():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo) and info.metavar is None:
                info.metavar = _VALUES.get(_innermost(hint))
    described.__annotations__ = hints
    name = function.__name__.rstrip("_")
    app.command(name, cls=_Command, help=text, rich_help_panel=group)(check_arguments(function))


def _innermost(kind: Any) -> Any:
    """Returns the first type inside of unions and lists: `str` of `list[str] | None`."""
    while get_args(kind) and get_origin(kind) is not Literal:
        kind = get_args(kind)[0]
    return kind


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
_GROUPS = {
    "Train and data": (demo, prepare, train, evaluate, generate, report),
    "Weights": (import_, export, average),
    "Before you launch": (plan, layouts, memory, check, predict, prove, calibrate),
    "Operate": (launch, health, verify, doctor, schema),
}
for group, commands in _GROUPS.items():
    for command in commands:
        add(command, group)


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
    """Runs the command, and prints errors as sentences."""
    # Both work only before torch is imported or initializes CUDA, and no command has done so yet.
    let_threads_sleep()
    use_expandable_segments()
    with errors_as_sentences():
        app()


if __name__ == "__main__":
    main()
