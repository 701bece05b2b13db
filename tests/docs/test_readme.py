"""Every command in README works as typed, on the demo's data, after the set-up commands.

The commands run one after the other, as a reader types them, in a copy of what they read. Two
things are changed: training takes fewer steps than typed, and the demo's data are prepared from
part of the standard library's sources. A command of a new kind fails until it is added here.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
import torch

from examples import own_model
from gridformer.data.prepare import gettext
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.memory import budget
from tests.support.commands import Done, gridformer_here
from tests.support.fenced import ROOT, fences, words_of
from tests.support.marks import extra

README = ROOT / "README.md"
FENCES = fences(README)

# Set-up commands, and why they are not run here.
NOT_RUN = {
    "make demo": "it installs; what it runs then is `gridformer demo`",
    "make test": "it runs this test",
}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def typed(fence_language: str) -> list[str]:
    return [line for f in FENCES if f.language == fence_language for line in f.lines if line]


COMMANDS = [" ".join(line.split("#")[0].split()) for line in typed("bash")]
REFUSALS = [*FENCES, *fences(ROOT / "docs/how-to/run-files.md")]
TRANSCRIPTS = list(dict.fromkeys(f.text for f in REFUSALS if f.language == "console"))


def fewer_steps(command: str) -> str:
    """Return the same command with a hundredth of its steps, or with 2 steps."""
    command = re.sub(r"(?<=train.trace_step=)\d+", "2", command)
    steps = re.search(r"train\.steps=(\d+)", command)
    fewer = int(steps[1]) // 100 if steps else 2
    # The run file of README saves twice, so that a mean has parts; so do 2 steps.
    return f"{command} train.save_every=1 train.steps={fewer} train.eval_batches=1"


def in_shell(command: str) -> Done:
    """Run the command as a shell would, with this environment's programs on PATH."""
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": PATH}
    )
    return done


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of translated messages, which not every machine has."""
    polib = extra("polib")
    catalog = polib.POFile()
    for number in range(100):
        english = f"Cannot open the file number {number}"
        german = f"Die Datei Nummer {number} kann nicht geöffnet werden"
        catalog.append(polib.POEntry(msgid=english, msgstr=german))
    folder = tmp_path_factory.mktemp("locale")
    catalog.save_as_mofile(str(folder / "programs.mo"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def checkout(tmp_path_factory: pytest.TempPathFactory, messages: Path) -> Iterator[None]:
    """Change into a folder with what README's commands read, where `make demo` leaves it."""
    here = tmp_path_factory.mktemp("checkout")
    shutil.copy(README, here)
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, here / folder)
    (here / "mine.yaml").write_text(typed_run_file())
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    (here / "talks.jsonl").write_text(100 * (json.dumps({"messages": turns}) + "\n"))
    sources = sorted(Path(get_path("stdlib")).glob("[a-d]*.py"))
    with contextlib.chdir(here), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gettext, "system_folders", lambda language: [messages])
        patch.setattr(budget, "SEARCH_S", 1e9)  # answers must not depend on the machine's load
        corpus = open_sources([str(path) for path in sources])
        prepare_corpus(corpus, Path("data/python-stdlib"), vocab_size=512)
        one_process = "layout.scheme=single layout.rows=1 layout.cols=1"
        few_steps = "train.steps=1 train.eval_batches=1"
        done = gridformer_here("train", "demo", *one_process.split(), *few_steps.split())
        assert done.returncode == 0, done.stderr
        yield


def typed_run_file() -> str:
    """Return the first run file in README, which it tells readers to save as mine.yaml."""
    first = next(fence for fence in FENCES if fence.language == "yaml")
    assert "`mine.yaml`" in README.read_text(encoding="utf-8").splitlines()[first.line - 4]
    return first.text


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_work_in_this_order(command: str) -> None:
    words = words_of(command)
    if command in NOT_RUN:
        pytest.skip(NOT_RUN[command])
    assert words[0] == "gridformer", "a new kind of command: say in this file how it is tested"
    if words[1] == "train" and "--explain" not in words:
        command = fewer_steps(command)
    command = command.replace("calibrate", "calibrate --quick --processes 1,2")
    # A process takes seconds to import torch, so one command that does not need torch represents
    # all; tests/cli/test_train.py starts others as a user does. Where gridformer is only on
    # PYTHONPATH, no shell finds it.
    alone = command.startswith("gridformer prepare docs/") and shutil.which("gridformer", path=PATH)
    done = in_shell(command) if alone else gridformer_here(*words_of(command)[1:])
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda text: text.splitlines()[0])
def test_commands_print_what_readme_says(transcript: str) -> None:
    """Refusals are whole. Numbers of predictions may differ by 5%, and `...` stands for lines."""
    command, *printed = transcript.removeprefix("$ ").splitlines()
    done = gridformer_here(*words_of(command)[1:])
    if printed[0].startswith("error:"):
        assert done.returncode == 2
        assert " ".join(printed).split() == done.stderr[done.stderr.index("error:") :].split()
        return
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.splitlines())
    for line in filter("...".__ne__, printed):
        words, numbers = words_and_numbers(line)
        same = next((n for w, n in map(words_and_numbers, lines) if w == words), None)
        assert same == pytest.approx(numbers, rel=0.05), line


def words_and_numbers(line: str) -> tuple[list[str], list[float]]:
    numbers = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", line)]
    return re.sub(r"\d[\d,]*(?:\.\d+)?", "N", line).split(), numbers


def test_every_block_is_one_that_is_tested() -> None:
    """Every block names its language; blocks in another language need their own test."""
    assert {fence.language for fence in FENCES} == {"bash", "console", "yaml", "python"}
    assert all(command.startswith("$ gridformer ") for command in TRANSCRIPTS)
    assert set(NOT_RUN) <= set(COMMANDS), "README has lost a command that is named here"


def test_the_library_example_runs() -> None:
    example = next(f.text for f in FENCES if f.language == "python")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    torch.manual_seed(0)
    alone, words = own_model.network()[0], names["words"]
    want = own_model.loss_of(alone(words[:, :-1]), {"targets": words[:, 1:]})
    assert float(names["loss"]) == pytest.approx(want.item(), rel=1e-5)
