"""What the terminal says of a run."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from gridformer.train.console import bar_of_steps, beside_bar, command_after
from tests.support.chats import chat_folder
from tests.support.multirank.runs import plan


@pytest.mark.parametrize(
    ("task", "command"),
    [
        ("causal", 'gridformer generate {out} --prompt "..."'),
        ("chat", 'gridformer generate {out} --chat --prompt "..."'),
    ],
)
def test_the_command_after_a_run_uses_its_model(tmp_path: Path, task: str, command: str) -> None:
    chats = plan(tmp_path / "run", "gpt2", {}, path=chat_folder(tmp_path).path, task="chat")
    data = chats.run.data.model_copy(update={"task": task})
    found = replace(chats, run=chats.run.model_copy(update={"data": data}))
    assert command_after(found) == command.format(out=chats.out)


@pytest.mark.parametrize("task", ["causal", "classify"])
def test_the_command_after_a_run_can_be_copied(tmp_path: Path, task: str) -> None:
    folder = chat_folder(tmp_path).path
    chats = plan(tmp_path / "my run", "gpt2", {}, path=folder, task="chat")
    data = chats.run.data.model_copy(update={"task": task, "path": "my data"})
    found = replace(chats, run=chats.run.model_copy(update={"data": data}))
    words = shlex.split(command_after(found))
    assert words[2] == str(chats.out)
    if task == "classify":
        assert words[3:] == ["--tasks", "examples:my data"]


@pytest.mark.parametrize("parts", [4, 5])
@pytest.mark.parametrize("n_steps", [150, 100_000])
@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_progress_bar_cuts_neither_the_steps_nor_the_time_left(
    width: int, n_steps: int, parts: int
) -> None:
    said = ["loss 4.666", "val 4.750 (perplexity 115.6)", "2,389 tokens/s"]
    said += ["0.0141 TFLOP/s per process (MFU 32.1%)", "peak 12.3 GiB"][: parts - 3]
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = bar_of_steps(console)
    bar.add_task(beside_bar(said, width, n_steps), total=n_steps, completed=24)
    with console.capture() as capture:
        console.print(bar.get_renderable())
    (line,) = capture.get().splitlines()
    assert re.fullmatch(rf"  step +24/{n_steps} [━╸ ]{{10,}} loss 4.666.* -:--:-- *", line), line
    assert "…" not in line


PRINTS = """
import sys
from gridformer.train.console import _RunConsole
console = _RunConsole()
sys.stdin.readline()
for number in range(3):
    console.print("x" * 9000)
print("went on", file=sys.stderr)
"""


def test_a_run_goes_on_if_nobody_reads_what_it_prints() -> None:
    """As behind `| head`."""
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        program.stdout.close()
        program.stdout = None
        _, said = program.communicate("go on\n")
    assert (program.returncode, said) == (0, "went on\n")


def test_processes_of_a_run_go_on_without_standard_output(
    token_folder: Path, tmp_path: Path
) -> None:
    """Service managers may close it before the command begins."""
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(token_folder)},
        "layout": {"dp": 2},
        "train": {"steps": 1, "global_batch": 2, "eval_batches": 1, "device": "cpu"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(sections))
    words = [sys.executable, "-m", "gridformer", "train", str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        ["sh", "-c", f"exec {shlex.join(words)} >&-"], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
