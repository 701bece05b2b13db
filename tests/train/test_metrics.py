"""What happens if metrics cannot be written, and what the picture of the losses shows."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure

from gridformer.config import load_run
from gridformer.train.console import title_of
from gridformer.train.loggers import TensorBoard
from gridformer.train.metrics import (
    METRICS,
    TENSORBOARD,
    MetricsFile,
    plot_loss,
    read_metrics,
)
from gridformer.utils.files import FullDiskError


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
