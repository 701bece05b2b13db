"""The command line as a whole: fast help, and errors without tracebacks."""

import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.models import CommandInfo
from typer.testing import CliRunner

from gridformer.cli import app as cli
from gridformer.cli.errors import check_arguments
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import LARGEST_INTEGER
from tests.support.commands import gridformer_alone


def test_help_names_every_command_and_needs_no_torch() -> None:
    found = gridformer_alone("--help")
    assert found.returncode == 0
    for command in ("demo", "prepare", "train", "generate", "import", "export", "average"):
        assert f" {command} " in found.stdout
    assert "completion" not in found.stdout
    program = "import gridformer.cli.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_version_and_a_mistake_which_is_a_message_and_exit_code_2(tmp_path: Path) -> None:
    found = gridformer_alone("--version")
    assert (found.returncode, found.stdout) == (0, f"gridformer {cli.__version__}\n")
    found = gridformer_alone("train", "no-such-run", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: no-such-run: no such run file")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("command", "option", "told"),
    [
        ("train", "--steps", "train.steps=VALUE"),
        ("train", "--train.steps", "train.steps=VALUE"),
        ("predict", "--tensor-parallel-size", "layout.cols=VALUE"),
        ("memory", "--fsdp", "layout.dp_mode=fsdp"),
        ("train", "--outt", "--out"),
        ("doctor", "--steps", "--help"),
    ],
)
def test_an_option_that_is_a_key(command: str, option: str, told: str) -> None:
    found = CliRunner().invoke(cli.app, [command, "demo", option, "3"], terminal_width=200)
    assert found.exit_code == 2
    assert f"No such option: {option} (Possible options: {told})" in found.output


def test_problems_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, text in (
        (UserError("what to do"), "error: what to do\n"),
        (ConfigError("only one"), "error: only one\n"),
        (ConfigError("a", "b"), "error: 2 problems\n  - a\n  - b\n"),
    ):
        monkeypatch.setattr(cli, "app", Mock(side_effect=error))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 2
        assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "command", cli.app.registered_commands, ids=lambda one: one.callback.__name__
)
def test_help_is_whole_sentences_that_fill_the_lines(command: CommandInfo) -> None:
    """A line ends only where the next word has no room, or where the paragraph ends."""
    assert command.callback is not None
    name = command.name or command.callback.__name__
    found = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "80"})
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in found.stdout
    before = next(number for number, line in enumerate(lines) if "╭" in line)
    prose = [line.strip() for line in lines[:before]]
    says = (inspect.unwrap(command.callback).__doc__ or "").strip().partition("\n\n")[0]
    assert " ".join(says.split()) in " ".join(prose), "the command's help, not an option's"
    for line, after in itertools.pairwise(prose):
        if line and after:
            assert len(f" {line} {after.split()[0]} ") > 80, line


@pytest.mark.parametrize(
    "command", cli.app.registered_commands, ids=lambda one: one.callback.__name__
)
def test_an_option_has_the_help_of_its_own_command(command: CommandInfo) -> None:
    """Commands may share the annotation of an option, and so the help that one of them sets."""
    described = inspect.unwrap(command.callback or cli.main)
    entries = inspect.cleandoc(described.__doc__ or "").partition("Args:\n")[2]
    for name, said in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", entries, re.MULTILINE):
        assert described.__annotations__[name].__metadata__[0].help == " ".join(said.split())


@pytest.mark.parametrize(
    ("value", "shown", "remedy"),
    [
        (10**23, str(10**23), f"is too large: use at most {LARGEST_INTEGER}"),
        (-(10**23), str(-(10**23)), f"is too small: use at least -{LARGEST_INTEGER}"),
        (float("inf"), "inf", f"is too large: use at most {LARGEST_INTEGER}"),
        (float("nan"), "nan", "is not a number"),
    ],
)
def test_a_number_that_is_too_large(value: float, shown: str, remedy: str) -> None:
    taken = []

    @check_arguments
    def command(seed: float) -> None:
        taken.append(seed)

    with pytest.raises(UserError) as refused:
        command(seed=value)
    assert str(refused.value).startswith(f"--seed: {shown} ")
    assert remedy in str(refused.value)
    for works in (LARGEST_INTEGER, -LARGEST_INTEGER):
        command(seed=works)
    assert taken == [LARGEST_INTEGER, -LARGEST_INTEGER]
