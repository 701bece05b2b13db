"""What the terminal says of a run, metrics that cannot be written, and the plot of the losses."""

import errno
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from gridformer.config import load_run
from gridformer.train.console import _speed, bar_of_steps, beside_bar, command_after, title_of
from gridformer.train.loggers import TensorBoard
from gridformer.train.metrics import METRICS, TENSORBOARD, MetricsFile, plot_loss, read_metrics
from gridformer.utils.files import FullDiskError
from tests.support.chats import chat_folder
from tests.support.multirank.runs import plan


@pytest.mark.parametrize(
    ("task", "rest"),
    [
        ("causal", ["--prompt", "..."]),
        ("chat", ["--chat", "--prompt", "..."]),
        ("classify", ["--tasks", "examples:my data"]),
    ],
)
def test_the_command_after_a_run_uses_its_model(tmp_path: Path, task: str, rest: list[str]) -> None:
    """It can be copied, whatever the names of folders are."""
    chats = plan(tmp_path / "my run", "gpt2", {}, path=chat_folder(tmp_path).path, task="chat")
    data = chats.run.data.model_copy(update={"task": task, "path": "my data"})
    command = command_after(replace(chats, run=chats.run.model_copy(update={"data": data})))
    verb = "evaluate" if task == "classify" else "generate"
    assert shlex.split(command) == ["gridformer", verb, str(chats.out), *rest]


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


@pytest.mark.parametrize(
    ("tflops", "said"),
    [
        (312.4, "312 TFLOP/s per GPU"),
        (0.1, "0.1 TFLOP/s per GPU"),
        (0.00655, "6.55 GFLOP/s per GPU"),
        (5.43e-5, "54.3 MFLOP/s per GPU"),
    ],
)
def test_operations_have_a_unit_that_fits(tflops: float, said: str) -> None:
    assert _speed({"model_tflops": tflops}, "GPU") == said


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


def test_a_full_disk_is_named_also_where_tensorboard_meets_it(tmp_path: Path) -> None:
    """TensorBoard writes in a thread of its own, and raises what that met without a file's name."""
    file, log = MetricsFile(tmp_path, 0), TensorBoard(tmp_path, 0)
    file.on_step({"step": 1, "loss": 2.0})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        patch.object(log._events, "add_scalar", side_effect=full),
        pytest.raises(FullDiskError, match=f"full: {tmp_path / TENSORBOARD} could not be"),
    ):
        log.on_step({"step": 1, "loss": 2.0})
    with (
        patch.object(log._events, "close", side_effect=full),
        pytest.raises(FullDiskError, match=TENSORBOARD),
    ):
        log.close()
    log._events.close()
    file.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_a_disk_that_is_full_at_the_end_is_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, 0)
    file.close()
    with Path("/dev/full").open("a", encoding="utf-8") as file._file:
        file._file.write("what a full disk has not taken before")
        with pytest.raises(FullDiskError, match=f"{METRICS} could not be written"):
            file.close()


def test_the_plot_names_the_run_and_its_label_covers_no_curve(tmp_path: Path) -> None:
    """The last validation loss is written beside the axes, at the height where its curve ends."""
    lines = [{"step": 0, "val_loss": 6.3}]
    lines += [{"step": step, "loss": 6.3 - step / 4} for step in range(1, 10)]
    lines[-1]["val_loss"] = 3.53
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn: list[Figure] = []
    with patch.object(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure)):
        run = load_run("demo", ["model.vocab_size=512"])
        plot_loss(tmp_path, title_of(run), run)
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_title() == "demo: demo-4m (3.8M parameters) on optimus 2x2"
    (label,) = axes.texts
    assert label.get_text() == "3.53\nperplexity\n34.1"
    figure.draw_without_rendering()
    where, inside = label.get_window_extent(), axes.get_window_extent()
    assert inside.x1 < where.x0 < where.x1 <= figure.bbox.x1
    height = axes.transData.transform((0.0, 3.53))[1]
    assert where.y0 < height < where.y1
    assert [curve.get_label() for curve in axes.lines] == [
        "training, each step",
        "training, smoothed",
        "validation",
    ]


@pytest.mark.parametrize(
    ("run_file", "label", "unit"),
    [
        ("demo", "0.70\nperplexity\n2.0", "cross entropy (nats per token)"),
        ("bert", "0.70\nperplexity\n1.5", "sum of cross entropies (nats)"),
        ("qqp", "0.70", "cross entropy (nats per example)"),
        ("squad", "0.70", "cross entropy (nats per example)"),
        ("sts-b", "0.70", "mean squared error"),
    ],
)
def test_only_tokens_have_a_perplexity(
    run_file: str, label: str, unit: str, tmp_path: Path
) -> None:
    """A loss of labels, answers or numbers has none, and in a sum that of tokens counts."""
    line = {"step": 1, "loss": 0.8, "val_loss": 0.7}
    pair = ["model.n_labels=2"] if run_file == "bert" else []
    run = load_run(run_file, ["model.vocab_size=512", *pair])
    if not run.model.only_token_head:
        line["val_loss_tokens"] = math.log(1.5)
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n")
    drawn: list[Figure] = []
    with patch.object(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure)):
        plot_loss(tmp_path, "", run)
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == [label]
    assert axes.get_ylabel() == unit
