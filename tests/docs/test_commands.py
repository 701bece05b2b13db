"""Commands, run files and Python in README and docs are accepted; nothing is run here.

test_pages.py runs the commands of blocks. Those in sentences, and those that it does not run, are
only parsed.
"""

import ast
import re
from pathlib import Path

import pytest
import yaml

from gridformer.config import parse_run
from gridformer.utils.errors import ConfigError
from tests.support.fenced import (
    NOT_RUN,
    PAGES,
    ROOT,
    check_arguments,
    commands,
    fences,
    run_files,
    why_not_run,
    words_of,
)

# README tells readers to save this run file.
MINE = next(fence.text for fence in fences(ROOT / "README.md") if fence.language == "yaml")


@pytest.fixture(autouse=True)
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(MINE)
    Path("RUN.yaml").write_text(MINE)


def arguments(command: str) -> list[str]:
    """Return gridformer's arguments, whatever launches it."""
    words = words_of(command)
    return words[words.index("gridformer") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_accepted(page: Path) -> None:
    for name, fence in run_files(page):
        Path(name).write_text(fence.text)
    for command in commands(page):
        if "gridformer" not in words_of(command):
            continue  # torchrun with the reader's own script
        try:
            check_arguments(arguments(command))
        except ConfigError as error:
            pytest.fail(f"{command}: {error}")
        words = words_of(command)
        if "--emit" in words:  # which writes a run file
            Path(words[words.index("--emit") + 1]).write_text(MINE)


def test_every_command_is_run_or_says_why_not() -> None:
    typed = [(page, one) for page in PAGES for fence in fences(page) for one in fence.typed]
    for page, command in typed:
        run = words_of(command)[0] == "gridformer"  # by test_pages.py
        assert run or why_not_run(page, command), f"{page}: {command}"
    for start in NOT_RUN:
        assert any(re.match(start, command) for _, command in typed), f"no command: {start}"


BENCHMARK = re.compile(r"python -m (benchmarks[\w.]*)([^`#\n]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_benchmarks_and_their_options_exist(page: Path) -> None:
    """Benchmarks take minutes, so their options are only looked for in their code."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for module, arguments in BENCHMARK.findall(text):
        path = ROOT / module.rstrip(".").replace(".", "/")
        files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        code = "".join(file.read_text(encoding="utf-8") for file in files)
        for option in re.findall(r"(?<= )--([a-z][a-z-]*)", arguments):
            assert re.search(rf"\b(--)?{option}\b|\b{option.replace('-', '_')}\b", code), option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_run_files_and_python_are_accepted(page: Path) -> None:
    for fence in fences(page):
        if fence.language == "yaml":
            run = yaml.safe_load(fence.text)
            if len(run) == 1:  # one section of a run file
                run = {"model": "demo-4m", "data": {"path": "."}, **run}
            parse_run(run)
        elif fence.language == "python":
            compile(fence.text, f"{page}:{fence.line}", "exec", ast.PyCF_ONLY_AST)


@pytest.mark.parametrize(
    "wrong",
    [
        "gridformer trian demo",
        "gridformer train demo --explian",
        "gridformer train demo train.step=3",
        "gridformer train no-such-run",
        "gridformer generate runs/demo --beam 3",
    ],
)
def test_wrong_commands_are_noticed(wrong: str) -> None:
    with pytest.raises(ConfigError):
        check_arguments(arguments(wrong))
