"""Finds fenced blocks, inline code and commands in Markdown pages."""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gridformer.config import load_run, model_names, parse_run
from gridformer.config.reading import closest
from gridformer.utils.errors import ConfigError
from tests.support.commands import built

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"`([\w-]+\.yaml)`:$")
_INLINE = re.compile(r"(?<!`)`(gridformer [^`]+)`(?!`)")
COMMAND = re.compile(r"^(\$ )?(gridformer|torchrun|srun) ")

# Commands that no test runs as they are typed, by how they begin, and why. They are parsed.
NOT_RUN = {
    r"(git|make|pip|source|python -m pytest) ": "they install, or run these tests",
    r"gridformer demo": "tests/cli runs it",
    r"python -m benchmarks": "they measure for minutes, some as root",
    r"torchrun |srun ": "they need several machines, or Slurm",
    r"gridformer prove (megatron|optimus)": "it compares many models for minutes",
    r"gridformer train demo train.compile=true": "it compiles, which other tests do with less",
    r"gridformer prepare hf:": "it needs a network",
    r"gridformer evaluate FOLDER": "it needs a network",
    r"gridformer (import|export) \S*olmoe": "it needs published weights",
    r"gridformer \S+ .*data/talks": "it needs published weights with a chat template",
    r"NCCL_|gridformer (train best|plan \S+ --cluster local).yaml": "it needs GPUs",
    r"gridformer \S+ (runs/)?wmt14": "it needs WMT's corpus, and days",
    r"gridformer prepare .* --vocab-size 37000": "it needs WMT's corpus",
}


@dataclass(frozen=True)
class Fence:
    """A fenced block, with the language written after the backticks and its first line's number."""

    language: str
    text: str
    line: int

    @property
    def lines(self) -> list[str]:
        """Return lines as a shell reads them: a backslash at the end continues a line."""
        return self.text.replace("\\\n", " ").splitlines()

    @property
    def typed(self) -> list[str]:
        """What readers type: lines of bash, and commands in a block without a language."""
        lines = (line.split(" #")[0].removeprefix("$ ").strip() for line in self.lines)
        bash, plain = self.language == "bash", not self.language
        return [line for line in lines if line and (bash or (plain and COMMAND.match(line)))]


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [Fence(m[1], m[2], text[: m.start(2)].count("\n") + 1) for m in _FENCE.finditer(text)]


def run_files(page: Path) -> Iterator[tuple[str, Fence]]:
    """Yield run files that a page tells readers to save under a name, and the names."""
    text = page.read_text(encoding="utf-8").splitlines()
    for fence in fences(page):
        named = _SAVED.search("\n".join(text[: fence.line - 2]).rstrip())
        if fence.language == "yaml" and named:
            yield named[1], fence


def commands(page: Path) -> Iterator[str]:
    """Yield commands in a page's fences and, if they have arguments, in its inline code."""
    for fence in fences(page):
        yield from (line.removeprefix("$ ") for line in fence.lines if COMMAND.match(line))
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in _INLINE.findall(prose):
        command = " ".join(found.split())
        if len(command.split()) > 2:
            yield command


def why_not_run(page: Path, command: str) -> str:
    """Return why no test runs a command; nothing for those that tests/docs/test_pages.py runs."""
    if page.parent.name == "results":
        return "its pages are of measurements"
    return next((why for start, why in NOT_RUN.items() if re.match(start, command)), "")


def words_of(command: str) -> list[str]:
    """Split a command into words as a shell does, without comments."""
    return shlex.split(command, comments=True)


def check_arguments(words: list[str]) -> None:
    """Parse `gridformer WORDS` and validate overrides, without running anything.

    Run files that are not shipped are looked up in the current folder. Raises ConfigError for
    unknown commands, options, keys, models and run files.
    """
    name, *rest = words
    known = built().commands
    if name not in known:
        raise ConfigError(f"no command is called '{name}'{closest(name, known)}")
    try:
        values = known[name].make_context(name, rest).params
    except Exception as error:
        # an error of click, or of the copy of click inside typer
        if hasattr(error, "format_message"):
            raise ConfigError(error.format_message()) from None
        raise
    if name in ("train", "memory", "check"):
        run, overrides = str(values["run"]), values["overrides"] or []
        if name != "train" and run in model_names():
            parse_run({"model": run, "data": {"path": "."}}, overrides)
        else:
            load_run(run, overrides)
    if name == "layouts" and not os.path.exists(values["model"]):
        parse_run({"model": values["model"], "data": {"path": "."}}, values["overrides"] or [])
